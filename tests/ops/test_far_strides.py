"""Elements more than 2^31 apart: 32-bit index arithmetic would read or write elsewhere, forward and backward.

The numbers lie in an anonymous mapping of 10 GiB. Only the pages of 4 KiB that are touched take memory.
"""

import mmap
import resource

import pytest
import torch
from attnpack import attention
from op_cases import compute_results, make_inputs
from torch.testing import assert_close

SIZE = 10 * 2**30
AXES = {"batch": 0, "heads": 1, "rows": 2, "columns": 3}


@pytest.fixture(scope="module")
def far():
    """bytes [SIZE], zero."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    room = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    room.madvise(mmap.MADV_NOHUGEPAGE)
    yield torch.frombuffer(room, dtype=torch.uint8)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 600 * 1024  # KiB


def spread(x: torch.Tensor, far: torch.Tensor, axis: int, place: int) -> torch.Tensor:
    """x with its last index along `axis` more than 2^31 elements after the first; the other axes are dense."""
    last = max(x.shape[axis] - 1, 1)
    stride = -(-(2**31 + 64) // last)
    inner = list(x.movedim(axis, 0)[0].contiguous().stride())
    assert x.numel() < stride
    start = place * 2**20 // x.element_size()
    return far.view(x.dtype).as_strided(x.shape, [*inner[:axis], stride, *inner[axis:]], start).copy_(x)


@pytest.mark.parametrize("mask", [None, "bool", "own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [(2, 70), (40, 70)], ids=["decode", "prefill"])
@pytest.mark.parametrize("axis", AXES)
def test_far_apart_changes_no_bit(far, axis, lengths, dtype, mask):
    """Far strides change no bit of out, lse and the gradients of query, key, value and mask."""
    inputs = make_inputs(dtype, "gqa", lengths, mask=mask, positions={"causal": True, "q_offset": 20})
    expected = compute_results(attention, inputs)
    names = [n for n in ("query", "key", "value", "mask", "grad_out", "grad_lse") if getattr(inputs, n) is not None]
    near = {name: getattr(inputs, name) for name in names}
    for place, (name, x) in enumerate(near.items()):
        setattr(inputs, name, spread(x, far, min(AXES[axis], x.dim() - 1), place))
    for name, x in near.items():
        assert torch.equal(getattr(inputs, name), x)  # no two of them overlap
    for name, got in compute_results(attention, inputs).items():
        if axis == "columns" and name.startswith("grad"):  # its dot product with out is summed in another order
            assert_close(got, expected[name], atol=8 * torch.finfo(dtype).eps, rtol=8 * torch.finfo(dtype).eps)
        else:
            assert torch.equal(got, expected[name]), name


def test_a_start_beyond_32_bits(far):
    """The gradients of small tensors that are views into a large one."""
    inputs = make_inputs(lengths=(40, 70), mask="own")
    expected = compute_results(attention, inputs)
    for place, name in enumerate(("query", "key", "value", "mask", "grad_out")):
        x = getattr(inputs, name)
        room = far.view(x.dtype)[2**31 + place * 2**16 :]
        setattr(inputs, name, room[: x.numel()].view(x.shape).copy_(x))
    for name, got in compute_results(attention, inputs).items():
        assert torch.equal(got, expected[name]), name
