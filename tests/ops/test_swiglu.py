"""silu(gate) * up in one pass: values against fp64, and the calls that go to torch's operators instead."""

import attnpack
import pytest
import torch
from attnpack import ops
from torch.nn import functional as F

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((1,), (3, 5), (2, 7, 16), (40, 1001)), ids=str)
def test_error_is_at_most_that_of_torch(dtype, shape):
    torch.manual_seed(len(shape))
    gate, up = 5 * torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    exact = F.silu(gate.double()) * up.double()
    error, theirs = ((y - exact).abs() for y in (ops.swiglu(gate, up), F.silu(gate) * up))
    # Rounded once: half a unit in the last place, and what exp leaves of four units in fp32 or fp64.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bound = exact.abs() * (torch.finfo(dtype).eps / 2 * 1.001 + 8 * torch.finfo(wide).eps) + torch.finfo(dtype).tiny
    assert (error <= bound).all()
    if dtype in (torch.bfloat16, torch.float16) and gate.numel() > 1000:  # theirs rounds silu too
        assert error.mean() < theirs.mean()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_gates(dtype):
    gate = torch.tensor([0.0, -0.0, 60000.0, -60000.0, torch.inf, torch.nan, 88.0, -88.0, -20.0], dtype=dtype)
    up = torch.tensor([2.0, 2.0, 0.5, 1.0, -1.0, 1.0, 1.0, 0.0, 1.0], dtype=dtype)
    exact = (F.silu(gate.double()) * up.double()).to(dtype)
    torch.testing.assert_close(ops.swiglu(gate, up), exact, equal_nan=True)


def test_layouts_and_empty_inputs():
    gate, up = torch.randn(4, 6, 10).transpose(0, 1)[..., ::2], torch.randn(6, 1, 5).expand(6, 4, 5)
    out = ops.swiglu(gate, up)
    torch.testing.assert_close(out, F.silu(gate) * up)
    assert out.is_contiguous() and ops.swiglu(gate[:0], up[:0]).shape == (0, 4, 5)
    mixed = ops.swiglu(gate.bfloat16(), up)  # of two dtypes: torch decides
    torch.testing.assert_close(mixed, F.silu(gate.bfloat16()) * up)


def test_a_number_does_not_depend_on_its_place_or_the_threads():
    gate, up = torch.randn(2, 50_001).unbind(0)
    whole, threads = ops.swiglu(gate, up), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(ops.swiglu(gate, up), whole)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(ops.swiglu(gate[5:], up[5:]), whole[5:])


def test_gradients_and_compilation_are_torchs():
    gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(ops.swiglu, (gate, up))
    assert torch.autograd.gradgradcheck(ops.swiglu, (gate, up))
    torch.library.opcheck(torch.ops.attnpack.swiglu.default, (gate.detach(), up.detach()))
    torch.library.opcheck(torch.ops.attnpack.swiglu.default, (gate, up))
    module = attnpack.FeedForward(8, 16)
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(module(x), module.cpp()(x))


def test_the_layer_uses_it_without_gradients():
    module = attnpack.FeedForward(8, 16)
    for layer in (module, module.cpp()):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
            layer(torch.randn(2, 8))
        assert "attnpack::swiglu" in {event.name for event in profile.events()}


@pytest.mark.parametrize(
    ("gate", "up", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), r"up has shape \[2, 4\], wants \[2, 3\] as gate has"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2), "gate has dtype Long, up Float"),
        (torch.zeros(2), torch.zeros(2, device="meta"), "gate is on cpu, up on meta"),
    ],
)
def test_errors(gate, up, words):
    with pytest.raises(ValueError, match=words):
        ops.swiglu(gate, up)
