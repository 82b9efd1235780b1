"""Gradients of attention can be differentiated again: the kernel computes the first ones, the formula all others."""

import pytest
import torch
from attnpack import GroupedQueryAttention, RotaryEmbedding, attention, reference
from op_cases import INF, NAN, make_inputs
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.autograd.functional import hvp
from torch.func import functional_call
from torch.testing import assert_close

FEATURES = {
    "plain": {},
    "mha": {"heads": "mha"},
    "uneven": {"heads": "uneven"},
    "empty group": {"heads": "empty_group"},
    "causal": {"positions": {"causal": True, "q_offset": "end"}},
    "rows without keys": {"positions": {"causal": True, "q_offset": -2}},
    "window": {"positions": {"window": (1, 1), "q_offset": "tensor"}},
    "chunk": {"positions": {"chunk": 3, "q_offset": "tensor"}},
    "kv_lens": {"kv_lens": torch.int64},
    "bool mask": {"mask": "bool"},
    "float mask": {"mask": "own -inf"},
    "mask of rows": {"mask": "float64 rows"},
    "sinks": {"scores": {"sinks": True}},
    "all scores": {"mask": "own", "scores": {"softcap": 0.7, "sinks": True, "alibi": True, "scale": -0.3}},
    "dropout": {"mask": "own", "scores": {"dropout_p": 0.4, "sinks": True}},
}


def differentiated(attend, inputs):
    """A function of query, key, value, float mask and sinks that gives out and lse, and these tensors."""
    settings = dict(inputs.settings)
    leaves = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    if inputs.mask is not None:
        (leaves if inputs.mask.is_floating_point() else settings)["mask"] = inputs.mask
    if "sinks" in settings:
        leaves["sinks"] = settings.pop("sinks")

    def call(*tensors):
        torch.manual_seed(3)
        out, lse = attend(**dict(zip(leaves, tensors, strict=True)), return_lse=True, **settings)
        return out, torch.where(lse == -INF, 0, lse)

    return call, [x.clone().requires_grad_() for x in leaves.values()]


def numbers(call, leaves, power=2):
    """One number whose first gradients depend on everything."""
    out, lse = call(*leaves)
    return out.pow(power).sum() + lse.sin().sum()


@pytest.mark.parametrize("feature", FEATURES)
def test_by_finite_differences(feature):
    call, leaves = differentiated(
        attention, make_inputs(torch.float64, lengths=(3, 4), dims=(3, 2), **FEATURES[feature])
    )
    assert gradcheck(call, leaves)
    assert gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_create_graph_changes_no_bit_of_the_first_gradients(feature, dtype):
    call, leaves = differentiated(attention, make_inputs(dtype, lengths=(33, 40), **FEATURES[feature]))
    plain, again = (grad(numbers(call, leaves), leaves, create_graph=graph) for graph in (False, True))
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


def test_three_times_and_inputs_that_depend_on_each_other():
    inputs = make_inputs(torch.float64, heads="mha", lengths=(4, 4), dims=(4, 4))

    def third(attend):
        x = inputs.query.clone().requires_grad_()
        key = x.sin()
        (first,) = grad(attend(x, key, key * 2 + x, causal=True).square().sum(), x, create_graph=True)
        (second,) = grad(first.pow(3).sum(), x, create_graph=True)
        return first, second, grad(second.square().sum(), x)[0]

    for ours, theirs in zip(third(attention), third(reference.attention), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("which", ["query", "key", "value", "mask", "sinks"])
def test_one_input_alone(which):
    inputs = make_inputs(torch.float64, mask="own", scores={"sinks": True})
    tensors = {n: getattr(inputs, n) for n in ("query", "key", "value", "mask")} | inputs.settings
    tensors[which] = tensors[which].clone().requires_grad_()

    def second(attend):
        (first,) = grad(attend(**tensors).pow(3).sum(), tensors[which], create_graph=True)
        return grad(first.square().sum(), tensors[which])[0]

    assert_close(second(attention), second(reference.attention))


def test_hessian_vector_product():
    inputs = make_inputs(torch.float64, positions={"causal": True})
    vectors = tuple(torch.randn_like(x) for x in (inputs.query, inputs.key, inputs.value))

    def product(attend):
        return hvp(lambda *x: attend(*x, causal=True).square().sum(), (inputs.query, inputs.key, inputs.value), vectors)

    assert_close(product(attention), product(reference.attention))


def test_gradient_penalty_of_a_layer():
    """d |dL/dx|^2 / dw of a layer with RoPE, by finite differences of the penalty."""
    torch.manual_seed(0)
    layer = GroupedQueryAttention(16, 4, 2, causal=True, rope=RotaryEmbedding(4)).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    weights = {name: p.detach().clone() for name, p in layer.named_parameters()}

    def penalty(weights):
        (gradient,) = grad(functional_call(layer, weights, x).square().sum(), x, create_graph=True)
        return gradient.square().sum()

    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    got = grad(penalty(leaves), list(leaves.values()))
    for (name, w), gradient in zip(weights.items(), got, strict=True):
        step = 1e-5 * torch.randn_like(w)
        up, down = (penalty(weights | {name: w + sign * step}) for sign in (1, -1))
        assert_close((gradient * step).sum(), (up - down) / 2, rtol=1e-5, atol=1e-9, msg=name)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("scores", [{}, {"softcap": 0.7, "sinks": True}], ids=str)
def test_excluded_keys_stay_unread(bad, scores):
    inputs = make_inputs(torch.float64, scores=scores)
    inputs.settings |= {"kv_lens": torch.tensor([4, 3])}

    def second():
        call, leaves = differentiated(attention, inputs)
        first = grad(numbers(call, leaves, 3), leaves, create_graph=True)
        return grad(sum(x.square().sum() for x in first), leaves)

    expected = second()
    inputs.key[0, :, 4:], inputs.value[0, :, 4:] = bad, bad
    inputs.key[1, :, 3:], inputs.value[1, :, 3:] = bad, bad
    assert_close(second(), expected)


def test_half_precision_gives_rounded_second_gradients():
    def second(dtype):
        inputs = make_inputs(torch.float64, positions={"causal": True})
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
        first = grad(attention(*leaves, causal=True).sin().sum(), leaves, create_graph=True)
        return grad(sum(x.sin().sum() for x in first), leaves)

    for got, exact in zip(second(torch.bfloat16), second(torch.float64), strict=True):
        assert got.dtype == torch.bfloat16
        assert_close(got.double(), exact, rtol=0.05, atol=0.05)


def test_a_changed_input_is_noticed():
    inputs = make_inputs(torch.float64)
    query, key = inputs.query.clone().requires_grad_(), inputs.key.clone()
    (first,) = grad(attention(query, key, inputs.value).square().sum(), query, create_graph=True)
    key.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad(first.sum(), query)
