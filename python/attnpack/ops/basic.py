"""Linear layers, RMSNorm, and rows as integers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _C

_is_compiling = torch.compiler.is_compiling


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input weight^T + bias, as torch's linear, on the CPU by the fastest kernel for the CPU, the dtype and the size.

    Up to 16 rows of input read the weight once, on AMD's Zen 4 and 5 up to 24 in fp32 and 32 in bf16. A row's result
    does not depend on how many of these rows there are, nor on gradients. `attnpack info` names the kernel for more.
    The environment variable ATTNPACK_LINEAR pins one for all: "torch" (its linear) or "onednn".

    Args:
        input: [..., in], weight: [out, in], bias: [out].

    Returns:
        [..., out], accumulated in fp32 and rounded once.
    """
    if _is_compiling():
        return torch.ops.attnpack.linear(input, weight, bias)
    return _C.linear(input, weight, bias)


def linears(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> list[Tensor]:
    """`linear` of one input with several weights, which one call reads all.

    Args:
        input: [..., in]; weights: each [out, in]; biases: none, or one [out] for each weight.

    Returns:
        A list of [..., out], the results of `linear`.
    """
    if _is_compiling():
        return torch.ops.attnpack.linears(input, weights, biases)
    return _C.linears(input, weights, biases)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019); one pass without gradients.

    Args:
        x: [..., dim], weight: [dim].

    Returns:
        [..., dim] in x's dtype, computed in fp32 (fp64 for fp64).
    """
    if _is_compiling():
        return torch.ops.attnpack.rms_norm(x, weight, eps)
    return _C.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """A residual sum and its norm, (x + added, `rms_norm` of it), in one pass without gradients.

    Args:
        x, added: [..., dim], of one dtype; weight: [dim].
    """
    if _is_compiling():
        return torch.ops.attnpack.add_rms_norm(x, added, weight, eps)
    return _C.add_rms_norm(x, added, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020), computed in fp32 (fp64 for fp64) and rounded once; one pass without gradients.

    Args:
        gate, up: [...], of one shape.

    Returns:
        [...] in their dtype.
    """
    if _is_compiling():
        return torch.ops.attnpack.swiglu(gate, up)
    return _C.swiglu(gate, up)


def quantize_rows(x: Tensor, bits: int) -> Tensor:
    """Rows as bytes: integers in blocks of 32, each block with a scale in fp16; 8.5 or 4.5 bits per number.

    With 4 bits a row is rotated by a Hadamard matrix first, so that no number stands out of its block (QuaRot, Ashkboos
    et al. 2024, section 4).

    Args:
        x: [..., dim], float64, float32, bfloat16 or float16.
        bits: 8 or 4.

    Returns:
        [..., row bytes] uint8: dim integers, then ceil(dim / 32) scales. With 8 bits an integer is x * 127 / max |x| of
        its block, with 4 bits one of 16 steps. A block with a number that is not finite becomes NaN.
    """
    return (torch.ops.attnpack if _is_compiling() else _C).quantize_rows(x, bits)


def dequantize_rows(rows: Tensor, bits: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers [..., dim] of rows that `quantize_rows` made, in dtype."""
    return (torch.ops.attnpack if _is_compiling() else _C).dequantize_rows(rows, bits, dim, dtype)
