"""torch.func transforms and forward mode: derivatives by the kernels and by the plain formula. vmap: test_vmap.py."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from attnpack import apply_rope, attention, reference
from op_cases import INF, NAN, draw, make_inputs
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.testing import assert_close

FEATURES = {
    "plain": {},
    "mha": {"heads": "mha"},
    "uneven": {"heads": "uneven"},
    "empty group": {"heads": "empty_group"},
    "causal": {"positions": {"causal": True, "q_offset": "end"}},
    "window": {"positions": {"window": (1, 1), "q_offset": "tensor"}},
    "kv_lens": {"kv_lens": torch.int64},
    "bool mask": {"mask": "bool"},
    "float mask": {"mask": "own -inf"},
    "sinks": {"scores": {"sinks": True}},
    "all scores": {"scores": {"softcap": 0.7, "sinks": True, "alibi": True}},
}


def differentiated(attend, inputs):
    """A function of query, key, value, float mask and sinks that gives one number, and these tensors."""
    settings = dict(inputs.settings)
    sinks = settings.pop("sinks", None)
    leaves = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    if inputs.mask is not None and inputs.mask.is_floating_point():
        leaves["mask"] = inputs.mask
    elif inputs.mask is not None:
        settings["mask"] = inputs.mask
    if sinks is not None:
        leaves["sinks"] = sinks

    def number(*tensors):
        out, lse = attend(**dict(zip(leaves, tensors, strict=True)), return_lse=True, **settings)
        lse = torch.where(lse == -INF, 0, lse)
        return (out * inputs.grad_out).sum() + (lse * inputs.grad_lse).sum()

    return number, tuple(leaves.values())


def both(inputs):
    (ours, leaves), (theirs, _) = (differentiated(attend, inputs) for attend in (attention, reference.attention))
    return ours, theirs, leaves


@pytest.mark.parametrize("feature", FEATURES)
def test_grad_and_vjp(feature):
    ours, theirs, leaves = both(make_inputs(torch.float64, **FEATURES[feature]))
    places = tuple(range(len(leaves)))
    expected = torch.autograd.grad(theirs(*(roots := [x.clone().requires_grad_() for x in leaves])), roots)
    assert_close(grad(ours, places)(*leaves), expected)
    value, pull = vjp(ours, *leaves)
    assert_close(value, theirs(*leaves))
    assert_close(pull(torch.ones_like(value)), expected)


@pytest.mark.parametrize("feature", FEATURES)
def test_jvp(feature):
    ours, theirs, leaves = both(make_inputs(torch.float64, **FEATURES[feature]))
    tangents = tuple(draw(*x.shape, dtype=x.dtype, seed=20) for x in leaves)
    assert_close(jvp(ours, leaves, tangents), jvp(theirs, leaves, tangents))


@pytest.mark.parametrize("feature", ["plain", "uneven", "causal", "all scores"])
def test_hessian(feature):
    inputs = make_inputs(torch.float64, lengths=(2, 3), dims=(2, 2), batch=1, **FEATURES[feature])
    ours, theirs, leaves = both(inputs)
    for place in range(len(leaves)):
        assert_close(hessian(ours, place)(*leaves), hessian(theirs, place)(*leaves))


def test_forward_mode_by_dual_numbers():
    inputs = make_inputs(torch.float64, positions={"causal": True})
    tangent = draw(*inputs.query.shape, dtype=torch.float64, seed=20)
    with forward_ad.dual_level():
        out = attention(forward_ad.make_dual(inputs.query, tangent), inputs.key, inputs.value, causal=True)
        moved = forward_ad.unpack_dual(out).tangent
    expected = jvp(
        lambda q: reference.attention(q, inputs.key, inputs.value, causal=True), (inputs.query,), (tangent,)
    )[1]
    assert_close(moved, expected)


def test_per_sample_gradients():
    inputs = make_inputs(torch.float64, batch=3)

    def loss(q, k, v):
        return attention(q[None], k[None], v[None], causal=True).square().sum()

    got = vmap(grad(loss, (0, 1, 2)))(inputs.query, inputs.key, inputs.value)
    leaves = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    assert_close(got, torch.autograd.grad(attention(*leaves, causal=True).square().sum(), leaves))


def test_jacobians_forward_and_reverse_agree():
    inputs = make_inputs(torch.float64, lengths=(2, 3), dims=(2, 2), batch=1)

    def call(q):
        return attention(q, inputs.key, inputs.value, causal=True)

    assert_close(jacfwd(call)(inputs.query), jacrev(call)(inputs.query))


def test_rope():
    x, angle = draw(2, 3, 5, 8, dtype=torch.float64), draw(5, 3, dtype=torch.float64)
    tangent = draw(2, 3, 5, 8, dtype=torch.float64, seed=1)

    def call(x, rotate=apply_rope):
        return rotate(x, angle.cos(), angle.sin())

    assert_close(jvp(call, (x,), (tangent,))[1], call(tangent))
    assert_close(grad(lambda x: call(x).square().sum())(x), 2 * x)
    assert_close(vmap(call)(x), call(x))


def test_functional_call_of_a_layer():
    class Layer(torch.nn.Linear):
        def forward(self, x):
            x = super().forward(x).view(1, 2, -1, 4)
            return attention(x, x, x)

    layer, x = Layer(4, 4), draw(6, 4)
    weights = dict(layer.named_parameters())
    got = grad(lambda w: functional_call(layer, w, x).square().sum())(weights)
    layer(x).square().sum().backward()
    assert_close(got, {name: p.grad for name, p in layer.named_parameters()})


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("feature", ["causal", "kv_lens", "float mask", "all scores"])
def test_excluded_keys_stay_unread(feature, bad):
    inputs = make_inputs(torch.float64, **FEATURES[feature])
    inputs.settings |= {"kv_lens": torch.tensor([4, 3])}
    good, leaves = differentiated(attention, inputs)
    places = tuple(range(len(leaves)))
    expected = grad(good, places)(*leaves)
    inputs.key[0, :, 4:], inputs.value[0, :, 4:] = bad, bad
    inputs.key[1, :, 3:], inputs.value[1, :, 3:] = bad, bad
    number, leaves = differentiated(attention, inputs)
    assert_close(grad(number, places)(*leaves), expected)


def test_a_row_without_keys_may_hold_nan():
    inputs = make_inputs(
        torch.float64, heads="mha", positions={"causal": True, "q_offset": -2}, scores={"softcap": 2.0}
    )
    number, leaves = differentiated(attention, inputs)
    expected = grad(number, (0, 1, 2))(*leaves)
    inputs.query[:, :, :2] = NAN
    number, leaves = differentiated(attention, inputs)
    assert_close(grad(number, (0, 1, 2))(*leaves), expected)


@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "sinks"])
def test_forward_gradients_without_a_transform(name):
    shapes = {"query": (1, 2, 3, 4), "key": (1, 2, 5, 4), "value": (1, 2, 5, 4), "mask": (3, 5), "sinks": (2,)}
    torch.manual_seed(0)
    inputs = {each: torch.randn(shape, dtype=torch.float64) for each, shape in shapes.items()}
    tangent = torch.randn(shapes[name], dtype=torch.float64)

    def out_of(x):
        return attention(**inputs | {name: x})

    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(out_of(forward_ad.make_dual(inputs[name], tangent))).tangent
    step = 1e-5 * tangent
    assert_close(got, (out_of(inputs[name] + step) - out_of(inputs[name] - step)) / 2e-5)


def test_forward_mode_sees_the_draw_of_dropout():
    inputs = make_inputs(torch.float64, batch=3, lengths=(9, 11))
    tangent = draw(*inputs.query.shape, dtype=torch.float64, seed=20)

    def call(q):
        torch.manual_seed(4)
        return attention(q, inputs.key, inputs.value, dropout_p=0.3)

    value, moved = jvp(call, (inputs.query,), (tangent,))
    assert_close(value, call(inputs.query))
    step = 1e-5 * tangent
    assert_close(moved, (call(inputs.query + step) - call(inputs.query - step)) / 2e-5)


def test_an_allowed_nan_reaches_the_rows_that_attend_it():
    inputs = make_inputs(torch.float64, lengths=(5, 7))
    inputs.value[:, 0, 2] = NAN

    def out_of(query):
        return attention(query, inputs.key, inputs.value, causal=True)

    expected = out_of(inputs.query).isnan()
    assert expected.any() and not expected.all()
    assert torch.equal(jvp(out_of, (inputs.query,), (inputs.query,))[0].isnan(), expected)
