"""Quantised rows against their definition in fp64."""

import math

import pytest
import torch
from attnpack.ops import dequantize_rows, quantize_rows
from torch.testing import assert_close

DIMS = (1, 2, 31, 32, 33, 48, 64, 80, 96, 128, 576)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def hadamard(dim):
    """The rotation [dim, dim] of rows of `dim` numbers, built by Sylvester's rule."""
    size = dim & -dim
    block = torch.ones(1, 1, dtype=torch.float64)
    while block.size(0) < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block / math.sqrt(size)] * (dim // size))


def nearest(x, bits):
    """x [rows, dim] as quantised rows give it back, in fp64."""
    rotation = hadamard(x.size(-1)) if bits == 4 else torch.eye(x.size(-1), dtype=torch.float64)
    turned = x.double() @ rotation
    blocks = []
    for block in turned.split(32, dim=-1):
        largest = block.gather(-1, block.abs().argmax(-1, keepdim=True))
        scale = largest.abs() / 127 if bits == 8 else largest / -8
        scale = scale.half().double()
        codes = torch.where(scale == 0, 0, block / scale).round().clamp(*((-127, 127) if bits == 8 else (-8, 7)))
        blocks.append(codes * scale)
    return torch.cat(blocks, -1) @ rotation


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_rounded_to_the_nearest_step(bits, dim, dtype):
    x = (torch.randn(37, dim, dtype=torch.float64) * torch.logspace(-3, 3, 37)[:, None]).to(dtype)
    rows = quantize_rows(x, bits)
    assert rows.dtype == torch.uint8
    assert rows.size(-1) == (dim if bits == 8 else math.ceil(dim / 2)) + 2 * math.ceil(dim / 32)
    got, want = dequantize_rows(rows, bits, dim, torch.float64), nearest(x, bits)
    # A tie between two steps may fall to either side where fp32 and fp64 differ: one step of the block at most.
    step = want.abs().amax(-1, keepdim=True) / (127 if bits == 8 else 7)
    off = (got - want).abs() > 1e-5 * want.abs().amax(-1, keepdim=True)
    assert off.double().mean() < 0.01 if bits == 8 else off.any(-1).double().mean() < 0.3
    assert ((got - want).abs() <= 1.2 * step * math.sqrt(dim & -dim if bits == 4 else 1)).all()
    assert_close(dequantize_rows(rows, bits, dim, dtype), got.to(dtype))


@pytest.mark.parametrize("bits", [8, 4])
def test_errors_are_as_small_as_the_bits_allow(bits):
    x = torch.randn(512, 128, dtype=torch.float64)
    error = (dequantize_rows(quantize_rows(x, bits), bits, 128, torch.float64) - x).square().mean().sqrt()
    assert error < (0.007 if bits == 8 else 0.13)


def test_the_rotation_spreads_a_number_that_stands_out():
    x = torch.randn(256, 64)
    x[:, 5] *= 40
    error = (dequantize_rows(quantize_rows(x, 4), 4, 64) - x).square().mean()
    scale = x.abs().reshape(256, 2, 32).amax(-1, keepdim=True) / 8
    plain = ((x.reshape(256, 2, 32) / scale).round() * scale - x.reshape(256, 2, 32)).square().mean()
    assert error < 0.5 * plain


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_and_numbers_that_are_not_finite(bits):
    x = torch.randn(4, 64)
    x[0] = 0
    x[1, 3], x[2, 40] = float("nan"), float("-inf")
    back = dequantize_rows(quantize_rows(x, bits), bits, 64)
    assert (back[0] == 0).all()
    assert back[1].isnan().any() and back[2].isnan().any()
    assert back[3].isfinite().all()
    if bits == 8:
        assert back[1, 32:].isfinite().all() and back[2, :32].isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
def test_strided_rows_and_empty_batches(bits):
    x = torch.randn(3, 5, 2, 48).transpose(1, 2)
    assert torch.equal(quantize_rows(x, bits), quantize_rows(x.contiguous(), bits))
    rows = quantize_rows(torch.randn(6, 48), bits)[::2]
    assert torch.equal(dequantize_rows(rows, bits, 48), dequantize_rows(rows.contiguous(), bits, 48))
    assert dequantize_rows(quantize_rows(x[:0], bits), bits, 48).shape == (0, 2, 5, 48)


@pytest.mark.parametrize("bits", [8, 4])
def test_opcheck_and_compile(bits):
    x = torch.randn(2, 3, 80)
    torch.library.opcheck(torch.ops.attnpack.quantize_rows.default, (x, bits))
    rows = quantize_rows(x, bits)
    torch.library.opcheck(torch.ops.attnpack.dequantize_rows.default, (rows, bits, 80, torch.bfloat16))
    there_and_back = torch.compile(lambda x: dequantize_rows(quantize_rows(x, bits), bits, 80), fullgraph=True)
    assert_close(there_and_back(x), dequantize_rows(rows, bits, 80))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: quantize_rows(x, 5), "bits: got 5, want 8 or 4"),
        (lambda x: quantize_rows(x.int(), 8), "wants a float dtype"),
        (lambda x: dequantize_rows(x, 8, 64), "wants uint8"),
        (lambda x: dequantize_rows(quantize_rows(x, 4), 8, 64), r"wants \[..., 68\] for 64 numbers of 8 bits"),
        (lambda x: dequantize_rows(quantize_rows(x, 8), 8, 0), "dim: got 0"),
    ],
)
def test_wrong_arguments(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(torch.randn(2, 64))
