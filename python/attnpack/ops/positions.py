"""Where tokens stand: rotation, ALiBi, and fixed positions.

L length, D head dim, r the dims that rotate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .fast_path import fast_path

_is_compiling = torch.compiler.is_compiling

Rope = _C.RopeSettings | tuple | None
"""`RotaryEmbedding.settings`, or its first numbers as a tuple."""


@fast_path("apply_rope")
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotates the first r dims of x by the angles whose cosines and sines are given (Su et al. 2021, section 3.4.2).

    Args:
        x: [..., L, D].
        cos, sin: float32 or float64, broadcast to [..., L, r/2].
        interleaved: pairs (2i, 2i + 1) instead of (i, i + r/2).

    Returns:
        The rotated x, in its dtype; computed in fp32 (fp64 for fp64).
    """
    if _is_compiling():
        return torch.ops.attnpack.apply_rope(x, cos, sin, interleaved)
    return _C.apply_rope(x, cos, sin, {"interleaved": interleaved})


def rope_table(positions: Tensor, inv_freq: Sequence[float], factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of position * inv_freq, times factor: angles in fp64, tables in fp32.

    Args:
        positions: int64 [...].
        inv_freq: r/2 frequencies.

    Returns:
        (cos, sin), each [..., r/2].
    """
    if _is_compiling():
        return torch.ops.attnpack.rope_table(positions, list(inv_freq), factor)
    return _C.rope_table(positions, inv_freq, factor)


def rope_table_by_length(
    positions: Tensor,
    lengths: Tensor | None,
    inv_freq: Sequence[float],
    factor: float,
    long_inv_freq: Sequence[float],
    growth: float,
    trained_len: int,
) -> tuple[Tensor, Tensor]:
    """`rope_table` for frequencies that follow the length of the sequence, as `RotaryEmbedding` describes them.

    Args:
        positions: int64 [L] or [B, L].
        lengths: [B], default the highest position of a row + 1.
        long_inv_freq: the r/2 frequencies for lengths above trained_len, or none.
        growth: if above 0, lengths above trained_len take the frequencies of a larger base (dynamic NTK).

    Returns:
        (cos, sin), each [L, r/2], or [B, L, r/2] if positions or lengths have B rows.
    """
    if _is_compiling():
        return torch.ops.attnpack.rope_table_by_length(
            positions, lengths, list(inv_freq), factor, list(long_inv_freq), growth, trained_len
        )
    return _C.rope_table_by_length(positions, lengths, inv_freq, factor, long_inv_freq, growth, trained_len)


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The ALiBi slope of every head: 2^(-8 i / n) for i = 1 .. n if n is a power of two (Press et al. 2022)."""
    return tuple(_C.alibi_slopes(num_heads))


def sinusoidal_positions(positions: int, dim: int, *, base: float = 10000.0) -> Tensor:
    """Fixed positions, fp32 [positions, dim] (Vaswani et al. 2017, section 3.5).

    At position p, dims 2i and 2i + 1 hold the sine and the cosine of p / base^(2i / dim).
    `nn.Embedding.from_pretrained(table)` makes them the `embed_positions` of an Encoder or a Decoder.

    Raises:
        ValueError: positions is below 1, dim is odd, or base is no number above 0.
    """
    return _C.sinusoidal_positions(positions, dim, base)


def native_rope(rope: Rope) -> _C.RopeSettings | None:
    return _C.RopeSettings(*rope) if isinstance(rope, tuple) else rope


def with_native_rope(rules: Any) -> dict[str, Any]:
    """The keywords, with `rope` as C++ has it."""
    return rules | {"rope": native_rope(rules["rope"])} if isinstance(rules.get("rope"), tuple) else rules


def flat_rope(rope: Rope) -> dict[str, Any]:
    """rope as keywords of the layer ops."""
    given = () if rope is None else rope.numbers() if isinstance(rope, _C.RopeSettings) else rope
    names = ("inv_freq", "factor", "interleaved", "long_inv_freq", "growth", "trained_len", "raw_keys")
    return {f"rope_{name}": number for name, number in zip(names, given, strict=False)}
