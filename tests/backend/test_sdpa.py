"""F.scaled_dot_product_attention on the operator: torch's meaning, gradients, layouts and errors."""

import pytest
import torch
import torch.nn.functional as F
from attnpack import backend
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def draw(*shape, layout="contiguous", seed=0):
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if layout == "heads inside" and x.dim() == 4:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "columns outside" and x.dim() >= 2:
        return x.mT.contiguous().mT
    if layout == "sliced":
        return torch.cat([x, x], -2)[..., : x.size(-2), :]
    return x


def lower(*shape):
    return torch.ones(*shape, dtype=torch.bool).tril()


def first_row_empty(*shape):
    mask = torch.ones(*shape, dtype=torch.bool)
    mask[..., 0, :] = False
    return mask


# name: shapes of query, key, value, and keywords (a function makes those with tensors)
CASES = {
    "plain": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), dict),
    "causal, more keys": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), lambda: {"is_causal": True}),
    "causal, more rows": ((2, 4, 9, 8), (2, 4, 7, 8), (2, 4, 7, 8), lambda: {"is_causal": True}),
    "scale": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), lambda: {"scale": 0.7}),
    "negative scale": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), lambda: {"scale": -0.7}),
    "width of values": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 3), dict),
    "long": ((1, 2, 70, 16), (1, 2, 300, 16), (1, 2, 300, 16), lambda: {"is_causal": True}),
    "one row": ((3, 4, 1, 8), (3, 4, 7, 8), (3, 4, 7, 8), dict),
    "2 dims": ((5, 8), (7, 8), (7, 4), dict),
    "2 dims, mask": ((5, 8), (7, 8), (7, 8), lambda: {"attn_mask": lower(5, 7)}),
    "3 dims": ((4, 5, 8), (4, 7, 8), (4, 7, 8), lambda: {"is_causal": True}),
    "3 dims, mask": ((4, 5, 8), (4, 7, 8), (4, 7, 8), lambda: {"attn_mask": draw(4, 5, 7)}),
    "3 dims, one mask": ((4, 5, 8), (4, 7, 8), (4, 7, 8), lambda: {"attn_mask": draw(1, 1, 7)}),
    "3 dims, grouped": ((4, 5, 8), (2, 7, 8), (2, 7, 8), lambda: {"enable_gqa": True, "attn_mask": draw(4, 5, 7)}),
    "5 dims": ((3, 2, 4, 5, 8), (3, 2, 4, 7, 8), (3, 2, 4, 7, 8), lambda: {"attn_mask": draw(3, 1, 4, 5, 7)}),
    "5 dims, mask of 4": ((3, 2, 4, 5, 8), (3, 2, 4, 7, 8), (3, 2, 4, 7, 8), lambda: {"attn_mask": draw(2, 1, 5, 7)}),
    "5 dims, mask of 3": ((3, 2, 4, 5, 8), (3, 2, 4, 7, 8), (3, 2, 4, 7, 8), lambda: {"attn_mask": draw(4, 5, 7)}),
    "5 dims, broadcast": ((3, 2, 4, 5, 8), (1, 2, 4, 7, 8), (3, 1, 1, 7, 8), dict),
    "batch of keys": ((1, 4, 5, 8), (3, 4, 7, 8), (3, 4, 7, 8), dict),
    "batch of queries": ((3, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 8), lambda: {"is_causal": True}),
    "query of 3 dims": ((4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), dict),
    "keys of 3 dims": ((2, 4, 5, 8), (4, 7, 8), (4, 7, 8), lambda: {"attn_mask": draw(2, 1, 5, 7)}),
    "keys of 2 dims": ((2, 4, 5, 8), (7, 8), (1, 7, 8), lambda: {"is_causal": True}),
    "one kv head": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8), dict),
    "one key head": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 4, 7, 8), dict),
    "one query head": ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), dict),
    "grouped": ((2, 8, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), lambda: {"enable_gqa": True, "is_causal": True}),
    "grouped, mask": ((2, 8, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), lambda: {"enable_gqa": True, "attn_mask": lower(5, 7)}),
    "bool mask": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), lambda: {"attn_mask": lower(2, 1, 5, 7)}),
    "mask of keys": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), lambda: {"attn_mask": lower(7, 7)[2:4, None, None]}),
    "float mask": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), lambda: {"attn_mask": draw(2, 4, 5, 7)}),
    "fp32 mask": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), lambda: {"attn_mask": draw(4, 5, 7).float()}),
    "mask of heads": ((2, 1, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8), lambda: {"attn_mask": draw(1, 5, 7)}),
    "row without keys": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), lambda: {"attn_mask": first_row_empty(5, 7)}),
    "no keys": ((2, 4, 5, 8), (2, 4, 0, 8), (2, 4, 0, 8), dict),
    "no rows": ((2, 4, 0, 8), (2, 4, 7, 8), (2, 4, 7, 8), dict),
    "no batch": ((0, 4, 5, 8), (0, 4, 7, 8), (0, 4, 7, 8), dict),
}


def make_case(name, dtype=torch.float64, layout="contiguous"):
    *shapes, make = CASES[name]
    inputs = [draw(*shape, layout=layout, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    keywords = make()
    mask = keywords.get("attn_mask")
    if mask is not None and mask.dtype == torch.float64:
        keywords["attn_mask"] = mask.to(dtype)
    return inputs, keywords


def run(inputs, keywords, leaves=()):
    """The result and the gradients of the leaves."""
    out = F.scaled_dot_product_attention(*inputs, **keywords)
    if not leaves:
        return [out]
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out) + torch.arange(out.size(-1)).to(out))]


def taken():
    return backend.report()["sdpa"]["taken"]


@pytest.fixture(autouse=True)
def nothing_counted():
    backend.reset_report()


@pytest.mark.parametrize("layout", ["contiguous", "heads inside", "sliced", "columns outside"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_layout_are_torchs(name, dtype, layout):
    inputs, keywords = make_case(name, dtype, layout)
    mask = keywords.get("attn_mask")
    leaves = [*inputs, mask] if mask is not None and mask.is_floating_point() else inputs
    leaves = [leaf.requires_grad_() for leaf in leaves]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_keywords = keywords | ({"attn_mask": exact[3]} if len(exact) > 3 else {})
    reference = run(exact[:3], exact_keywords, exact)
    torchs = run(inputs, keywords, leaves)
    with backend.sdpa():
        ours = run(inputs, keywords, leaves)
    assert taken() == 1
    for got, theirs, right in zip(ours, torchs, reference, strict=True):
        assert got.shape == theirs.shape and got.dtype == theirs.dtype
        if not right.numel():
            continue
        rounding = torch.finfo(dtype).eps * (1 + right.abs().max())
        # In fp64 torch's result is the reference itself.
        allowed = 2 * (theirs.double() - right).abs().max() + (64 if dtype == torch.float64 else 2) * rounding
        assert (got.double() - right).abs().max() <= allowed
    assert ours[0].stride() == torchs[0].stride() or ours[0].numel() < 2 or same_places(ours[0], torchs[0])


def same_places(a, b):
    """Strides of dims of one element do not matter."""
    return all(s == t for s, t, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size > 1)


def test_a_row_without_keys_is_zero_and_has_no_gradient():
    q, k, v = (draw(1, 2, 4, 8, seed=i).float().requires_grad_() for i in range(3))
    with backend.sdpa():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=first_row_empty(4, 4))
    out.sum().backward()
    assert torch.equal(out[:, :, 0], torch.zeros(1, 2, 8)) and torch.equal(q.grad[:, :, 0], torch.zeros(1, 2, 8))
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_causality_is_top_left():
    q, k = draw(1, 1, 3, 8).float(), draw(1, 1, 5, 8, seed=1).float()
    value = torch.eye(5).view(1, 1, 5, 5)
    with backend.sdpa():
        weights = F.scaled_dot_product_attention(q, k, value, is_causal=True)[0, 0]
    assert torch.equal(weights != 0, lower(3, 5))


@pytest.mark.parametrize("p", [0.25, 0.9])
def test_dropout(p):
    q, k, v = (torch.ones(4, 8, 64, 16).requires_grad_() for _ in range(3))
    with backend.sdpa():
        torch.manual_seed(1)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        torch.manual_seed(1)
        assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, dropout_p=p))
        assert not torch.equal(out, F.scaled_dot_product_attention(q, k, v, dropout_p=p))
    rows = out[..., 0]  # the kept share of 64 equal weights, over 1 - p
    assert abs(rows.mean() - 1) < 0.05 and rows.unique().numel() > 8
    out.sum().backward()
    assert torch.allclose(v.grad.sum(), out.sum(), rtol=1e-4)


# ---- what is passed on -----------------------------------------------------------------

FOUR = (2, 4, 5, 8)
WRONG = {
    "integers": (lambda: ([torch.ones(FOUR, dtype=torch.long)] * 3, {}), "dtypes differ"),
    "two dtypes": (lambda: ([torch.randn(FOUR), torch.randn(FOUR).double(), torch.randn(FOUR)], {}), "dtypes differ"),
    "head_dim": (lambda: ([torch.randn(FOUR), torch.randn(2, 4, 5, 7), torch.randn(FOUR)], {}), "sizes do not fit"),
    "lengths": (lambda: ([torch.randn(4, 5, 8), torch.randn(4, 5, 8), torch.randn(4, 6, 8)], {}), "sizes do not fit"),
    "batches": (lambda: ([torch.randn(FOUR), torch.randn(3, 4, 5, 8), torch.randn(3, 4, 5, 8)], {}), "sizes do not"),
    "dims": (lambda: ([torch.randn(8)] * 3, {}), "sizes do not fit"),
    "groups": (lambda: ([torch.randn(FOUR)] + [torch.randn(2, 3, 5, 8)] * 2, {"enable_gqa": True}), "heads do not fit"),
    "heads": (lambda: ([torch.randn(FOUR)] + [torch.randn(2, 2, 5, 8)] * 2, {}), "heads do not fit"),
    "mask's size": (lambda: ([torch.randn(FOUR)] * 3, {"attn_mask": torch.ones(5, 6).bool()}), "mask does not fit"),
    "mask's dtype": (lambda: ([torch.randn(FOUR)] * 3, {"attn_mask": torch.ones(5, 5).long()}), "mask does not fit"),
    "mask and causality": (
        lambda: ([torch.randn(2, 4, 5, 8)] * 3, {"attn_mask": lower(5, 5), "is_causal": True}),
        "there is causality too",
    ),
    "dropout": (lambda: ([torch.randn(FOUR)] * 3, {"dropout_p": 1.5}), "dropout_p is outside"),
    "quantized": (lambda: ([torch.quantize_per_tensor(torch.randn(FOUR), 0.1, 0, torch.qint8)] * 3, {}), "quantized"),
}


def outcome(inputs, keywords):
    """("error", its class, its words) or ("result", the tensor)."""
    try:
        return "result", F.scaled_dot_product_attention(*inputs, **keywords)
    except Exception as error:
        return "error", type(error), str(error).split("\n")[0]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_gets_torchs_answer_and_a_reason(name):
    make, reason = WRONG[name]
    torch.manual_seed(0)
    inputs, keywords = make()
    torchs = outcome(inputs, keywords)
    with backend.sdpa():
        ours = outcome(inputs, keywords)
    assert ours[0] == torchs[0]
    if ours[0] == "error":
        assert ours == torchs
    elif inputs[1].size(-2) == inputs[2].size(-2):  # else torch 2.14 reads past the keys, and no two answers are equal
        assert torch.equal(ours[1], torchs[1])
    (found,) = backend.report()["sdpa"]["passed_on"]
    assert reason in found and taken() == 0


def test_the_users_choice_of_a_backend_counts():
    q = draw(*FOUR).float()
    with backend.sdpa():
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q, q, q)
        assert taken() == 0
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(q, q, q)
            assert taken() == 1
            with pytest.raises(RuntimeError, match="No available kernel"):
                F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    assert list(backend.report()["sdpa"]["passed_on"].values()) == [2]


def test_transforms_are_passed_on():
    q = draw(3, *FOUR).float()
    expected = F.scaled_dot_product_attention(q, q, q)
    with backend.sdpa():
        assert torch.allclose(torch.vmap(F.scaled_dot_product_attention)(q, q, q), expected, atol=1e-5)
        gradient = torch.func.grad(lambda x: F.scaled_dot_product_attention(x, x, x).sum())(q)
        tangent = torch.func.jvp(lambda x: F.scaled_dot_product_attention(x, x, x), (q,), (q,))[1]
    assert gradient.isfinite().all() and tangent.isfinite().all()


class Tagged(torch.Tensor):
    """A class that sees each op of torch."""

    seen: list[str] = []

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function.namespace)
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))


def test_a_class_of_its_own_keeps_its_rules():
    q = torch.Tensor._make_subclass(Tagged, draw(*FOUR).float())
    with backend.sdpa():
        F.scaled_dot_product_attention(q, q, q)
    assert taken() == 0 and "attnpack" not in Tagged.seen


def test_grouped_keys_are_not_repeated():
    ops = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            ops.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k = draw(2, 8, 5, 8).float(), draw(2, 2, 7, 8).float()
    with backend.sdpa(), Record():
        F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    assert ops == ["attnpack.attention.default"]


# ---- other ways to call it -------------------------------------------------------------


FIRST_THREE = (torch.arange(4) < 3).expand(4, 4)
PADDING = torch.arange(7) >= torch.tensor([7, 3, 5])[:, None]
CAUSAL = nn.Transformer.generate_square_subsequent_mask(7)
MODULES = {
    "attention": (lambda a, e, x: a(x, x, x, need_weights=False)[0], 1),
    "padded attention": (lambda a, e, x: a(x, x, x, need_weights=False, key_padding_mask=PADDING)[0], 1),
    "masked attention": (lambda a, e, x: a(x, x, x, need_weights=False, attn_mask=CAUSAL.bool())[0], 1),
    "cross-attention": (lambda a, e, x: a(x, x + 1, x + 1, need_weights=False)[0], 1),
    "attention with weights": (lambda a, e, x: torch.cat(a(x, x, x), -1), 0),
    "encoder": (lambda a, e, x: e(x), 2),
    "causal encoder": (lambda a, e, x: e(x, mask=CAUSAL, is_causal=True), 2),
    "padded encoder": (lambda a, e, x: e(x, src_key_padding_mask=PADDING), 2),  # nested tensors inside
    "layer with both masks": (lambda a, e, x: e.layers[0](x, CAUSAL, PADDING.float().where(~PADDING, -torch.inf)), 1),
    "training": (lambda a, e, x: e.train()(x), 2),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch_run_on_the_operator(name, dtype):
    """In eval mode they call fused functions of their own."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).to(dtype).eval()
    x, (call, count) = torch.randn(3, 7, 32, dtype=dtype), MODULES[name]
    with torch.set_grad_enabled(name == "training"):
        expected = call(encoder.layers[0].self_attn, encoder, x)
        with backend.sdpa():
            found = call(encoder.layers[0].self_attn, encoder, x)
    assert taken() == count and found.shape == expected.shape
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_what_torch_gives_as_nan():
    """An excluded key that holds NaN, and in torch's fused modules a row without keys."""
    torch.manual_seed(0)
    q = torch.randn(1, 2, 4, 8)
    value = q.clone()
    value[:, :, 3] = torch.nan
    attention, x = nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(1, 4, 32)
    with backend.sdpa(), torch.no_grad():
        assert F.scaled_dot_product_attention(q, q, value, attn_mask=FIRST_THREE).isfinite().all()
        padded = attention(x, x, x, key_padding_mask=torch.ones(1, 4).bool(), need_weights=False)[0]
    assert torch.allclose(padded, attention.out_proj.bias.expand_as(padded))


def test_autocast_inference_mode_and_script():
    q = draw(*FOUR).float()

    @torch.jit.script
    def scripted(x):
        return F.scaled_dot_product_attention(x, x, x)

    with backend.sdpa():
        with torch.autocast("cpu", torch.bfloat16):
            assert F.scaled_dot_product_attention(q, q, q).dtype == torch.bfloat16
        with torch.inference_mode():
            assert torch.allclose(F.scaled_dot_product_attention(q, q, q), scripted(q))
        torch.ops.aten.scaled_dot_product_attention(q, q, q)
    assert taken() == 4


def test_double_disable_and_nesting():
    q = draw(*FOUR).float()
    outer = backend.enable("sdpa")
    with backend.sdpa() as inner:
        assert inner.enabled and "enabled" in repr(inner)
        outer.disable()
        outer.disable()
        F.scaled_dot_product_attention(q, q, q)
    F.scaled_dot_product_attention(q, q, q)
    assert taken() == 1 and not backend.report()["sdpa"]["enabled"] and not inner.enabled
    with backend.enable("sdpa") as held:
        assert held.enabled
    assert not held.enabled


@pytest.mark.parametrize("name", ["flash", "SDPA", 3, None])
def test_unknown_names(name):
    with pytest.raises((ValueError, TypeError), match='attnpack: name is .*wants "sdpa"'):
        backend.enable(name)


def test_torchs_registry_knows_the_name():
    from torch.nn import attention

    q = draw(*FOUR).float()
    assert "attnpack" in attention.list_flash_attention_impls()
    attention.activate_flash_attention_impl("attnpack")
    try:
        F.scaled_dot_product_attention(q, q, q)
        assert taken() == 1 and attention.current_flash_attention_impl() == "attnpack"
    finally:
        attention.restore_flash_attention_impl()
    F.scaled_dot_product_attention(q, q, q)
    assert taken() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torchs_own_samples(dtype):
    """The samples of torch's OpInfo for this function: outputs, and in fp64 gradients by finite differences too."""
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]
    samples = list(info.sample_inputs("cpu", dtype, requires_grad=dtype == torch.float64))
    for sample in samples:
        inputs, keywords = [sample.input, *sample.args], dict(sample.kwargs)
        if keywords.get("dropout_p"):
            keywords["dropout_p"] = 0.0
        expected = F.scaled_dot_product_attention(*inputs, **keywords)
        with backend.sdpa():
            out = F.scaled_dot_product_attention(*inputs, **keywords)
            if dtype == torch.float64:
                gradients = torch.autograd.gradcheck(
                    lambda *x, keywords=keywords: F.scaled_dot_product_attention(*x, **keywords), inputs, fast_mode=True
                )
                assert gradients
        exact = F.scaled_dot_product_attention(*(x.double() for x in inputs), **in_fp64(keywords))
        rounding = torch.finfo(dtype).eps * (1 + exact.abs().max())
        assert (out - exact).abs().max() <= 2 * (expected - exact).abs().max() + 64 * rounding
    assert len(samples) > 20 and not backend.report()["sdpa"]["passed_on"]


def in_fp64(keywords):
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in keywords.items()
    }
