"""Rotary position embedding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C, cpp, ops
from ..errors import check_positions
from ..ops import nested
from .native import NativeModule


class RopeSettings(NamedTuple):
    """The settings by which queries and keys are rotated."""

    inv_freq: tuple[float, ...]
    """dim / 2 frequencies. For lengths above trained_len, long_inv_freq replaces them, or the base grows if growth > 0.
    """
    factor: float = 1.0
    """Factor on cos and sin."""
    interleaved: bool = False
    long_inv_freq: tuple[float, ...] = ()
    growth: float = 0.0
    trained_len: int = 0
    raw_keys: bool = False


class RotaryEmbedding(NativeModule):
    """Rotates the first `dim` dims of a head by position * base^(-2i / dim) (Su et al. 2021).

    Args:
        dim: rotated dims, even; smaller than head_dim leaves the rest as it is.
        base: base of the frequencies, `rope_theta` in Hugging Face configs.
        max_positions: length of the training sequences; larger positions are legal.
        scaling: None, or a dict as in Hugging Face configs with `rope_type` (or `type`) and the settings of that type:
            "default";
            "linear", `factor`: positions / factor (Chen et al. 2023);
            "ntk", `factor`: base * factor^(dim / (dim - 2));
            "dynamic", `factor`: as "ntk" with the factor that follows from the length L of the sequence,
            factor * L / trained - (factor - 1);
            "yarn", `factor`, `beta_fast` 32, `beta_slow` 1, `truncate` True, `attention_factor`, `mscale`,
            `mscale_all_dim` (Peng et al. 2023);
            "llama3", `factor`, `low_freq_factor` 1, `high_freq_factor` 4 (Dubey et al. 2024);
            "longrope", `short_factor` and `long_factor` of dim / 2 numbers, `factor`, `attention_factor` (Ding et al.
            2024).
            "proportional", `partial_rotary_factor`, `factor` 1: the first pairs rotate, the others stay (Gemma 4).
            The trained length is `original_max_position_embeddings`, default max_positions. `rope_theta` in the dict
            is ignored.
        interleaved: pairs (2i, 2i + 1) instead of (i, i + dim/2).
        raw_keys: caches hold keys before rotation. Each call then rotates all cached keys, which costs a pass over the
            cache. This is the default if frequencies follow the length of the sequence ("dynamic", "longrope"): keys
            that were rotated when the sequence was shorter have other angles than those of a full recompute.

    The module holds numbers in double precision and no tensors: nothing in the state dict, nothing that `.to(bfloat16)`
    rounds. `device` and `dtype` have no effect; they exist because the other modules take them. Raises ValueError for a
    scaling that lacks something, has an unknown key or a list of the wrong length.
    """

    _cpp_class = cpp.RotaryEmbedding

    def __init__(
        self,
        dim: int,
        *,
        base: float = 10000.0,
        max_positions: int = 2048,
        scaling: dict[str, Any] | None = None,
        interleaved: bool = False,
        raw_keys: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        twin = self._configure(locals())
        for name in RopeSettings._fields:
            value = getattr(twin, name)
            setattr(self, name, tuple(value) if isinstance(value, list) else value)
        # Latent attention multiplies its scale by this factor: m(factor, mscale_all_dim)^2.
        self.softmax_factor: float = twin.softmax_factor

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in RopeSettings._fields:
            self.__dict__["_native"] = None

    @property
    def settings(self) -> RopeSettings | _C.RopeSettings:
        """The argument `rope` of `attnpack.ops.attend`: numbers while a graph is traced, else a native object that is
        made once."""
        if torch.compiler.is_compiling():
            return self._numbers()
        if self._native is None:
            self.__dict__["_native"] = _C.RopeSettings(*self._numbers())
        return self._native

    def _numbers(self) -> RopeSettings:
        return RopeSettings(**{name: getattr(self, name) for name in RopeSettings._fields})

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """x [B, H, L, D] rotated at `positions` (int64 [L] or [B, L]; default 0..L-1). If frequencies follow the
        length, the length of a row is its highest position + 1. For a jagged nested x [B, H, L*, D] positions are
        nested too, [B, L*], and start anew in each sequence by default."""
        if nested.is_nested(x):
            by_rows = x.transpose(1, 2)
            packed = nested.rows("x", by_rows).transpose(0, 1).unsqueeze(0)
            rotated = rotate_rows(self, packed, *nested.positions_of(by_rows, positions))
            return nested.like(rotated[0].transpose(0, 1), by_rows).transpose(1, 2)
        if positions is None:
            positions = torch.arange(x.size(2), device=x.device)
        else:
            check_positions(positions, x)
        if self.growth or self.long_inv_freq:
            cos, sin = ops.rope_table_by_length(
                positions, None, self.inv_freq, self.factor, self.long_inv_freq, self.growth, self.trained_len
            )
        else:
            cos, sin = ops.rope_table(positions, self.inv_freq, self.factor)
        if positions.dim() == 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return ops.apply_rope(x, cos, sin, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        scaling = f", scaling={self.scaling}" if self.scaling else ""
        return f"{self.dim}, base={self.base:g}{scaling}" + (", interleaved=True" if self.interleaved else "")

    def cpp(self) -> cpp.RotaryEmbedding:
        twin = super().cpp()
        for name in (*RopeSettings._fields, "softmax_factor"):
            made = getattr(twin, name)
            if (tuple(made) if isinstance(made, list) else made) != getattr(self, name):
                raise TypeError(
                    f"attnpack: RotaryEmbedding's {name} is not that of its base and scaling, which C++ makes its own "
                    "from. Build a new one, or call the Python module"
                )
        return twin


def rotate_rows(rope: RotaryEmbedding, x: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
    """Packed heads x [1, H, T, D], rotated at positions [T]. lengths: [T], the length of each row's sequence."""
    if rope.growth or rope.long_inv_freq:
        tables = ops.rope_table_by_length(
            positions.unsqueeze(1), lengths, rope.inv_freq, rope.factor, rope.long_inv_freq, rope.growth,
            rope.trained_len,
        )  # fmt: skip
        cos, sin = (table.squeeze(1) for table in tables)
    else:
        cos, sin = ops.rope_table(positions, rope.inv_freq, rope.factor)
    return ops.apply_rope(x, cos, sin, interleaved=rope.interleaved)
