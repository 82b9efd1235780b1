"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import cpp, ops
from .explain import wrong_kind
from .native import NativeModule


class RotaryEmbedding(NativeModule):
    """Rotates the first `dim` dims of a head by position * base^(-2i / dim) (Su et al. 2021).

    Args:
        dim: rotated dims, even; smaller than head_dim leaves the rest as it is.
        base: of the frequencies, `rope_theta` in Hugging Face configs.
        max_positions: length of training; positions past it are legal.
        scaling: None or a dict as in Hugging Face configs: `rope_type` (or `type`) "default" or "linear", `factor`,
            `original_max_position_embeddings`. `rope_theta` in it is ignored.
        interleaved: pairs (2i, 2i + 1) instead of (i, i + dim/2).

    Holds numbers in double precision and no tensors: nothing in the state dict, nothing that `.to(bfloat16)` rounds.
    `device` and `dtype` are taken for uniformity and have no effect.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(scaling, dict | None):
            wanted = "None or a dict such as {'rope_type': 'linear', 'factor': 2.0}"
            raise wrong_kind("scaling", scaling, wanted)
        if scaling and not {"rope_type", "type"} & scaling.keys():
            raise ValueError(
                f"attnpack: scaling: got {scaling} without rope_type, want one, as in {{'rope_type': 'linear'}}"
            )
        self._config = {
            "dim": dim,
            "base": base,
            "max_positions": max_positions,
            "scaling": scaling,
            "interleaved": interleaved,
        }
        self.dim = dim
        self.base = base
        self.max_positions = max_positions
        self.scaling = scaling
        self.interleaved = interleaved
        twin = self._make_cpp(None)
        self.inv_freq: tuple[float, ...] = tuple(twin.inv_freq)
        self.factor: float = twin.factor

    @property
    def settings(self) -> tuple[tuple[float, ...], float, bool]:
        """(inv_freq, factor, interleaved), as `attnpack.ops.attend` takes it."""
        return self.inv_freq, self.factor, self.interleaved

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """x [B, H, L, D] rotated at `positions` (int64 [L] or [B, L]; default 0..L-1)."""
        if positions is None:
            positions = torch.arange(x.size(2), device=x.device)
        cos, sin = ops.rope_table(positions, self.inv_freq, self.factor)
        if positions.dim() == 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return ops.apply_rope(x, cos, sin, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        scaling = f", scaling={self.scaling}" if self.scaling else ""
        return f"{self.dim}, base={self.base:g}{scaling}" + (", interleaved=True" if self.interleaved else "")

    def cpp(self) -> cpp.RotaryEmbedding:
        twin = super().cpp()
        if (tuple(twin.inv_freq), twin.factor) != (self.inv_freq, self.factor):
            raise TypeError(
                "attnpack: RotaryEmbedding's inv_freq or factor are not those of its base and scaling, which C++ makes "
                "its own from. Build a new one, or call the Python module"
            )
        return twin
