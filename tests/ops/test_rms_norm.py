"""The one-pass RMSNorm: values against fp64, and the calls that go to torch's instead."""

import attnpack
import pytest
import torch
from attnpack import ops
from torch.nn import functional as F

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", (1, 3, 16, 31, 64, 577))
def test_error_is_at_most_twice_that_of_torch(dtype, dim):
    torch.manual_seed(dim)
    x, weight = torch.randn(2, 35, dim, dtype=dtype), torch.randn(dim, dtype=dtype)
    exact = F.rms_norm(x.double(), (dim,), weight.double(), 1e-6)
    error, theirs = (
        (y - exact).abs().max() for y in (ops.rms_norm(x, weight, 1e-6), F.rms_norm(x, (dim,), weight, 1e-6))
    )
    if dtype == torch.float64:  # their result is the exact one
        theirs = 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert error <= 2 * theirs + 1e-7 * exact.abs().max() * (dtype == torch.float32)


def test_layouts_empty_inputs_and_eps():
    x, weight = torch.randn(4, 6, 10).transpose(0, 1)[..., ::2], torch.randn(10)[::2]
    torch.testing.assert_close(ops.rms_norm(x, weight, 0.5), F.rms_norm(x, (5,), weight, 0.5))
    assert ops.rms_norm(torch.empty(0, 5), weight, 1e-6).shape == (0, 5)
    assert torch.equal(ops.rms_norm(torch.zeros(2, 5), weight, 1e-6), torch.zeros(2, 5))
    assert ops.rms_norm(torch.full((1, 5), torch.nan), weight, 1e-6).isnan().all()
    mixed = ops.rms_norm(x.bfloat16(), weight, 1e-6)  # weights of another dtype: torch decides
    torch.testing.assert_close(mixed, F.rms_norm(x.bfloat16(), (5,), weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(dtype):
    x, weight = torch.randn(300, 1000, dtype=dtype), torch.randn(1000, dtype=dtype)
    whole = ops.rms_norm(x, weight, 1e-6)
    assert torch.equal(torch.cat([ops.rms_norm(row[None], weight, 1e-6) for row in x]), whole)


def test_gradients_transforms_and_compilation_are_torchs():
    x, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,)))
    assert torch.autograd.gradcheck(lambda x, w: ops.rms_norm(x, w, 1e-6), (x, weight))
    torch.library.opcheck(torch.ops.attnpack.rms_norm.default, (x.detach(), weight.detach(), 1e-6))
    module = attnpack.RMSNorm(5).double()
    with torch.no_grad():
        torch.testing.assert_close(module(x), F.rms_norm(x, (5,), module.weight, 1e-6))
        torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))
        torch.testing.assert_close(torch.func.vmap(module)(x), module(x))


def test_the_layer_uses_it_without_gradients():
    module = attnpack.RMSNorm(8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
        module(torch.randn(2, 8))
    assert "attnpack::rms_norm" in {event.name for event in profile.events()}


WRONG = {
    "a number": (torch.tensor(1.0), torch.ones(5), r"x has shape \[\], wants \[\.\.\., 5\] as weight is \[5\]"),
    "width": (torch.ones(2, 4), torch.ones(5), r"x has shape \[2, 4\], wants \[\.\.\., 5\]"),
    "weight of rank 2": (torch.ones(2, 5), torch.ones(2, 5), r"weight has shape \[2, 5\], wants \[dim\]"),
    "weight of rank 0": (torch.ones(2, 5), torch.tensor(1.0), r"weight has shape \[\], wants \[dim\]"),
    "integers": (torch.ones(2, 5).long(), torch.ones(5), "x has dtype Long, weight Float: both want a float dtype"),
    "bools": (torch.ones(2, 5), torch.ones(5).bool(), "x has dtype Float, weight Bool: both want a float dtype"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("gradients", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_does_not_fit_is_named(wrong, gradients, device):
    x, weight, message = WRONG[wrong]
    x, weight = x.to(device), weight.to(device)
    if gradients and x.is_floating_point():
        x = x.clone().requires_grad_()
    with pytest.raises(ValueError, match=f"attnpack: {message}"):
        ops.rms_norm(x, weight, 1e-6)


def test_tensors_on_two_devices_are_named():
    with pytest.raises(ValueError, match=r"attnpack: x is on cpu, weight on meta: move one of them"):
        ops.rms_norm(torch.ones(2, 5), torch.ones(5, device="meta"), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", (1, 16, 31, 577))
def test_a_sum_and_its_norm_have_the_bits_of_both(dtype, dim):
    torch.manual_seed(dim)
    x, weight = torch.randn(2, 35, dim, dtype=dtype), torch.randn(dim, dtype=dtype)
    added = torch.randn(35, 2, dim, dtype=dtype).transpose(0, 1)
    total, normed = ops.add_rms_norm(x, added, weight, 1e-6)
    assert torch.equal(total, x + added) and torch.equal(normed, ops.rms_norm(x + added, weight, 1e-6))
    assert all(y.shape == (0, dim) for y in ops.add_rms_norm(x[0, :0], x[0, :0], weight, 1e-6))


def test_gradients_and_errors_of_a_sum_and_its_norm():
    x, y, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (3, 5), (5,)))
    assert torch.autograd.gradcheck(lambda *t: ops.add_rms_norm(*t, 1e-6), (x, y, weight))
    for leaves in ((x, y, weight), (x.detach(), y.detach(), weight.detach())):
        torch.library.opcheck(torch.ops.attnpack.add_rms_norm.default, (*leaves, 1e-6))
    with pytest.raises(ValueError, match=r"added has shape \[2, 5\] and dtype Double, wants \[3, 5\] and Double"):
        ops.add_rms_norm(x, y[:2], weight, 1e-6)
    with pytest.raises(ValueError, match="added has shape .* and dtype Float, wants .* and Double as x has"):
        ops.add_rms_norm(x, y.float(), weight, 1e-6)


def names_of(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
        call()
    return {event.name for event in profile.events()}


@pytest.mark.parametrize("pre_norm", [True, False])
def test_blocks_use_it_unless_a_hook_looks_at_the_norm(pre_norm):
    attention = attnpack.GroupedQueryAttention(8, 2, 1)
    block = attnpack.EncoderBlock(attention, attnpack.FeedForward(8, 16), pre_norm=pre_norm)
    x = torch.randn(2, 3, 8)
    wanted = block(x)  # with gradients: torch's operators
    for layer in (block, block.cpp()):
        assert "attnpack::add_rms_norm" in names_of(lambda: layer(x))  # noqa: B023
        with torch.no_grad():
            torch.testing.assert_close(layer(x), wanted)
    seen = []
    block.post_attention_layernorm.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    with torch.no_grad():
        torch.testing.assert_close(block(x), wanted)
    assert len(seen) == 1 and seen[0].shape == x.shape
