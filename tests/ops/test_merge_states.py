"""merge_states joins results over disjoint keys."""

import pytest
import torch
from attnpack import attention, merge_states, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import DTYPES, INF, NAN, draw, make_inputs
from torch.testing import assert_close


def part(inputs, begin, end, **keywords):
    return attention(
        inputs.query, inputs.key[:, :, begin:end], inputs.value[:, :, begin:end], return_lse=True, **keywords
    )


@given(cuts=st.lists(st.integers(0, 40), max_size=6), seed=st.integers(0, 2**20))
@settings(max_examples=40, deadline=None)
def test_any_cut_of_the_keys_gives_the_whole(cuts, seed):
    """Parts may be empty; the order of joining does not matter."""
    inputs = make_inputs(torch.float64, lengths=(3, 40))
    inputs.key = draw(*inputs.key.shape, dtype=torch.float64, seed=seed)
    edges = [0, *sorted(cuts), 40]
    parts = [part(inputs, a, b) for a, b in zip(edges, edges[1:], strict=False)]
    whole = part(inputs, 0, 40)
    for order in (parts, parts[::-1]):
        out, lse = order[0]
        for other in order[1:]:
            out, lse = merge_states(out, lse, *other)
        assert_close((out, lse), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    inputs = make_inputs(dtype, lengths=(3, 40))
    out, lse = merge_states(*part(inputs, 0, 17), *part(inputs, 17, 40))
    whole = part(inputs, 0, 40)
    assert out.dtype == dtype and lse.dtype == whole[1].dtype
    assert_close(out, whole[0], atol=4 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps)
    assert_close(lse, whole[1])


def test_equals_the_reference_and_sinks_go_into_one_part():
    inputs = make_inputs(torch.float64, lengths=(3, 40))
    a, b = part(inputs, 0, 17, sinks=torch.ones(4)), part(inputs, 17, 40)
    merged = merge_states(*a, *b)
    assert_close(merged, reference.merge_states(*a, *b))
    assert_close(merged, part(inputs, 0, 40, sinks=torch.ones(4)))


def test_an_empty_part_weighs_nothing():
    out, lse = draw(1, 2, 3, 4), draw(1, 2, 3)
    empty = torch.zeros_like(out), torch.full_like(lse, -INF)
    for got in (merge_states(out, lse, *empty), merge_states(*empty, out, lse)):
        assert torch.equal(got[0], out) and torch.equal(got[1], lse)
    nothing = merge_states(*empty, *empty)
    assert (nothing[0] == 0).all() and (nothing[1] == -INF).all()
    unread = torch.full_like(out, NAN), empty[1]
    assert torch.equal(merge_states(*unread, out, lse)[0], out)


def test_very_different_sizes_do_not_overflow():
    out, lse = merge_states(
        torch.ones(1, 1, 2, 1), torch.tensor([[[1e4, -1e4]]]), torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2)
    )
    assert out.flatten().tolist() == [1, 0] and lse.flatten().tolist() == [1e4, 0]


def test_gradients():
    a, b = (draw(1, 2, 3, 4, dtype=torch.float64, seed=s).requires_grad_() for s in range(2))
    la, lb = (draw(1, 2, 3, dtype=torch.float64, seed=s).requires_grad_() for s in range(2))
    assert torch.autograd.gradcheck(merge_states, (a, la, b, lb))


def test_gradients_through_parts_are_those_of_the_whole():
    inputs = make_inputs(torch.float64, lengths=(3, 40))
    leaves = [inputs.query, inputs.key, inputs.value] = [
        x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)
    ]
    grads = []
    for result in (part(inputs, 0, 40), merge_states(*part(inputs, 0, 17), *part(inputs, 17, 40))):
        grads.append(torch.autograd.grad(result, leaves, (inputs.grad_out, inputs.grad_lse)))
    assert_close(*grads)


def test_gradients_of_empty_parts_are_zero():
    out, lse = torch.zeros(1, 1, 2, 3, requires_grad=True), torch.full((1, 1, 2), -INF, requires_grad=True)
    merged, total = merge_states(out, lse, out, lse)
    for grad in torch.autograd.grad(merged.sum() + total.masked_fill(total == -INF, 0).sum(), (out, lse)):
        assert (grad == 0).all()


@pytest.mark.parametrize("lse", [-80.0, -200.0, -1e30, 1e30])
def test_gradients_beside_an_empty_part_are_those_of_the_other(lse):
    """Where exp(-lse) overflows too."""
    empty = [draw(1, 1, 3), torch.full((1, 1), -INF)]
    leaves = [x.requires_grad_() for x in (*empty, draw(1, 1, 3, seed=1), torch.full((1, 1), lse))]
    for order in ((0, 1, 2, 3), (2, 3, 0, 1)):
        out, total = merge_states(*(leaves[n] for n in order))
        grads = torch.autograd.grad(out.sum() + 2 * total.sum(), leaves)
        for grad, wanted in zip(grads, (0, 0, 1, 2), strict=True):
            assert (grad == wanted).all()


def test_shapes_that_do_not_fit_raise():
    out, lse = draw(1, 2, 3, 4), draw(1, 2, 3)
    with pytest.raises(ValueError, match="merge_states: out_a .* must have the same shapes"):
        merge_states(out, lse, out[:, :1], lse)
    with pytest.raises(ValueError, match="merge_states: .* must have the same shapes"):
        merge_states(out, lse, out, lse[..., :2])
    with pytest.raises(ValueError, match="lse_a has shape .* wants that of out_a without its last dimension"):
        merge_states(out, lse.unsqueeze(-1), out, lse.unsqueeze(-1))


def test_states_of_two_dtypes_do_not_merge():
    out, lse = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3)
    with pytest.raises(ValueError, match="merge_states: out_b is Double with lse_b Double, wants Float and Float"):
        merge_states(out, lse, out.double(), lse.double())


def test_states_of_two_devices_do_not_merge():
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    for place in range(1, 4):
        states = [out, lse, out, lse]
        states[place] = states[place].to("meta")
        with pytest.raises(
            ValueError, match="merge_states: out_a is on cpu, lse_a on .*meta.*: move them to one device"
        ):
            merge_states(*states)
