"""Products with weights as GGUF files hold them: 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _C

_is_compiling = torch.compiler.is_compiling

STORED_LAYOUTS: dict[str, tuple[int, int]] = _C.stored_layouts()
"""The formats by name, each with the numbers and the bytes of a block."""


def stored_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, round_input: bool | None = None
) -> Tensor:
    """input weight^T + bias with a weight in Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K, in the input's dtype.

    An input or a bias that wants gradients raises RuntimeError: stored weights have none.

    Args:
        input: [..., in]; bias: [out].
        weight: [out, blocks, bytes] uint8, whose bytes per block say which format it has.
        round_input: True rounds each 32 numbers of the input to 8 bits of their largest one, and multiplies integers. A
            row's result then does not depend on how many rows there are. False widens the weight to the input's dtype,
            a part at a time. Default: True where the CPU multiplies bytes (AVX2 and later), unless the input is
            float64.

    Returns:
        [..., out].
    """
    if _is_compiling():
        return torch.ops.attnpack.stored_linear(input, weight, bias, round_input)
    return _C.stored_linear(input, weight, bias, round_input)


def stored_linears(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> list[Tensor]:
    """`stored_linear` of one input with several weights, which may have different formats, in one call.

    Args:
        input: [..., in]; weights: each [out, blocks, bytes]; biases: none, or one [out] for each weight.

    Returns:
        A list of [..., out], the results of `stored_linear`.
    """
    if _is_compiling():
        return torch.ops.attnpack.stored_linears(input, weights, biases)
    return _C.stored_linears(input, weights, biases)


def widen_stored(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers [rows, in] of stored rows [rows, blocks, bytes], in dtype."""
    return (torch.ops.attnpack if _is_compiling() else _C).widen_stored(blocks, dtype)


def stored_rows(table: Tensor, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows [..., in] of a stored table [rows, blocks, bytes] by number, in dtype. Other numbers raise IndexError."""
    if _is_compiling():
        rows = torch.nn.functional.embedding(ids.flatten(), table.flatten(1)).unflatten(-1, table.shape[1:])
        return torch.ops.attnpack.widen_stored(rows, dtype).view(*ids.shape, -1)
    return _C.stored_rows(table, ids, dtype)


def to_stored(weight: Tensor, bits: int) -> Tensor:
    """A weight [out, in] in symmetric blocks of 32 numbers with a scale in fp16: Q8_0 for 8 bits, Q4_0 for 4.

    Each scale is the one of several that leaves the smallest squared error; 8 bits try 16, 4 bits 8. A step is at least
    2^-24, the smallest number of fp16: smaller numbers beside large ones move by at most half of that.

    Raises for numbers that are not finite, for rows that are no multiple of 32, and for a weight whose largest number
    is below 127 (8) such steps, 7.6e-6 (4.8e-7).
    """
    return _C.to_stored(weight, bits)


def inputs_of(weight: Tensor) -> int:
    """The numbers of a row of a stored weight. Raises unless the tensor is in one of the formats."""
    return _C.stored_inputs(weight)


def format_of(weight: Tensor) -> str:
    """The name of a stored weight's format, such as "Q4_K". Raises as `inputs_of`."""
    inputs_of(weight)
    return next(name for name, (_, size) in STORED_LAYOUTS.items() if size == weight.shape[-1])


def is_stored(weight: Tensor) -> bool:
    """Whether a tensor has the dtype and the number of dims of stored weights."""
    return weight.dtype == torch.uint8 and weight.dim() == 3
