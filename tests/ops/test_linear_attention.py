"""Linear attention and the delta rule against the plain recurrence: values and gradients, lengths, cuts, transforms."""

import attnpack
import pytest
import torch
from attnpack import linear_attention, reference
from attnpack.tools.threads import threads
from marks import grid
from op_cases import check, draw, laid_out
from recurrent_cases import DECAYS, NAMES, make
from torch.library import opcheck
from torch.testing import assert_close

NAN = float("nan")


def call(function, x, **settings):
    """out and state, by attnpack or the reference."""
    x = dict(x)
    tensors = [x.pop(name) for name in NAMES[:3]]
    if function is linear_attention:
        settings["return_state"] = True
    return function(*tensors, **x, **settings)


def results(function, x, upstream=None, **settings):
    """out, state and all gradients; upstream: the gradients of out and of the state."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
    out, state = call(function, leaves, **settings)
    found = {"out": out.detach(), "state": state.detach()}
    if upstream:
        grads = torch.autograd.grad((out, state), list(leaves.values()), [u.to(out.dtype) if i == 0 else u.to(
            state.dtype) for i, u in enumerate(upstream)])  # fmt: skip
        found |= {f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return found


def double(x):
    return {name: t.double() for name, t in x.items()}


def compare(x, gradients=True, **settings):
    """Errors against fp64 are at most twice those of plain PyTorch in the same dtype."""
    dtype = x["query"].dtype
    out, state = (t.detach() for t in call(reference.linear_attention, x, **settings))
    upstream = [draw(*out.shape, dtype=dtype, seed=8), draw(*state.shape, seed=9)] if gradients else None
    ours = results(linear_attention, x, upstream, **settings)
    with threads(1):
        plain = results(reference.linear_attention, x, upstream, **settings)
        truth = results(reference.linear_attention, double(x), upstream and [u.double() for u in upstream], **settings)
    for name, exact in truth.items():
        kind = ours[name].dtype
        check({name: ours[name]}, {name: plain[name]}, {name: exact}, kind)
    return ours


@grid(
    4,
    dtype=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    decay=DECAYS,
    beta=(True, False),
    length=(1, 2, 3, 17, 64, 70, 131),
)
def test_values_and_gradients(dtype, decay, beta, length):
    compare(make(dtype, decay, beta, length, state=length % 2 == 0))


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (1, 5), (2, 6)])
@pytest.mark.parametrize("dims", [(1, 1), (5, 17), (33, 8), (40, 40)])
def test_heads_and_dims(heads, dims):
    for decay in ("per head", "per channel"):
        compare(make(decay=decay, heads=heads, dims=dims, length=37))


@pytest.mark.parametrize("decay", ["none", "strong per head", "per channel"])
def test_value_heads_that_share_a_key_head_have_the_bits_of_their_own(decay):
    """One unit of work computes several of them, as many as leave each thread enough units."""
    x = make(decay=decay, heads=(2, 24), length=70)
    x["value"][0, 3, 5] = NAN  # its head goes on token by token
    apart = {name: t.repeat_interleave(12, 1) if name in ("query", "key") else t for name, t in x.items()}
    with threads(1):
        together, single = call(linear_attention, x), call(linear_attention, apart)
    for found, wanted in zip(together, single, strict=True):
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert together[0][0, 4].isfinite().all() and together[0][0, 3, :5].isfinite().all()
    x["value"] = x["value"].nan_to_num(0.5)
    with threads(1):
        compare(x)


def test_a_model_sized_call():
    for dtype, decay in ((torch.float32, "per head"), (torch.bfloat16, "per channel")):
        compare(make(dtype, decay, length=200, heads=(1, 2), dims=(128, 128), batch=1))


@pytest.mark.parametrize("layout", ["heads inside", "sliced", "columns outside", "expanded heads", "reversed"])
@pytest.mark.parametrize("decay", ["per head", "per channel"])
def test_layouts(layout, decay):
    x = make(decay=decay, length=20)
    plain = call(linear_attention, {name: laid_out(t, layout).clone() if t.dim() == 4 else t for name, t in x.items()})
    for name, t in x.items():
        x[name] = laid_out(t, layout if t.dim() == 4 else "stepped")
    assert_close(call(linear_attention, x), plain, rtol=0, atol=0)
    upstream = [laid_out(draw(2, 4, 20, 6), layout), draw(2, 4, 8, 6)]
    ours = results(linear_attention, x, upstream)
    exact = results(reference.linear_attention, double(x), [u.double() for u in upstream])
    for name in exact:
        assert_close(ours[name].double(), exact[name], rtol=1e-4, atol=1e-4)


def test_scale_and_dtypes_of_decay_beta_and_state():
    x = make(torch.bfloat16, length=30)
    x = {name: t.half() if name in ("log_decay", "beta", "initial_state") else t for name, t in x.items()}
    out, state = call(linear_attention, x, scale=0.3)
    exact, last = call(reference.linear_attention, x, scale=0.3)
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert_close(out, exact, rtol=1e-2, atol=1e-2)
    assert_close(state, last, rtol=1e-4, atol=1e-4)
    grads = results(linear_attention, x, [torch.ones_like(out), torch.ones_like(state)])
    assert {name: grads[f"grad of {name}"].dtype for name in x} == {name: t.dtype for name, t in x.items()}


@pytest.mark.parametrize("decay", ["per head", "per channel"])
def test_a_decay_of_minus_infinity_forgets_exactly(decay):
    x = make(decay=decay, length=90)
    x["log_decay"][:, :, 40] = -torch.inf
    out, state = call(linear_attention, x)
    after = {name: t[:, :, 41:] if name not in ("initial_state",) else t for name, t in x.items()}
    first = {name: t[:, :, 40:41] for name, t in x.items() if name not in ("initial_state", "log_decay")}
    after["initial_state"] = call(linear_attention, first)[1]
    assert_close((out[:, :, 41:], state), call(linear_attention, after), rtol=1e-5, atol=1e-5)
    assert all(t.isfinite().all() for t in results(linear_attention, x, [torch.ones_like(out), state]).values())
    tangents = {name: t if name == "query" else torch.zeros_like(t) for name, t in x.items()}
    formula = torch.func.jvp(lambda t: call(linear_attention, t)[0], (x,), (tangents,))
    assert_close(formula, (out, out), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES[:5])
def test_a_nan_does_not_reach_tokens_before_it(name):
    x = make(length=100)
    clean = call(linear_attention, x)[0]
    x[name] = x[name].clone()
    x[name][:, :, 70] = NAN
    out = call(linear_attention, x)[0]
    assert_close(out[:, :, :70], clean[:, :, :70], rtol=1e-5, atol=1e-5)
    assert out[:, :, 70].isnan().all()


@pytest.mark.parametrize("lens", [torch.tensor([37, 12]), torch.tensor([0, 65], dtype=torch.int32)])
@pytest.mark.parametrize("decay", ["per head", "per channel"])
def test_padding_changes_nothing(lens, decay):
    x = make(decay=decay, length=70)
    compare(x, kv_lens=lens)
    spoilt = {name: t.clone() for name, t in x.items()}
    for b, length in enumerate(lens.tolist()):
        for name in NAMES[:5]:
            spoilt[name][b, :, length:] = NAN
    upstream = [draw(2, 4, 70, 6), draw(2, 4, 8, 6)]
    clean, found = (results(linear_attention, t, upstream, kv_lens=lens) for t in (x, spoilt))
    for name, t in found.items():
        assert torch.equal(t, clean[name]), name
    for b, length in enumerate(lens.tolist()):
        assert (found["out"][b, :, length:] == 0).all() and (found["grad of value"][b, :, length:] == 0).all()


@pytest.mark.parametrize("decay", ["none", "per head", "per channel"])
def test_packed_and_nested_sequences_are_calls_of_their_own(decay):
    lengths, ends = [5, 0, 70, 2], torch.tensor([0, 5, 5, 75, 77], dtype=torch.int32)
    x = make(decay=decay, length=77, batch=1)
    x["initial_state"] = draw(4, 4, 8, 6, seed=6)
    upstream = [draw(1, 4, 77, 6), draw(4, 4, 8, 6)]
    packed = results(linear_attention, x, upstream, cu_seqlens=ends)
    for n, length in enumerate(lengths):
        rows = slice(int(ends[n]), int(ends[n]) + length)
        one = {name: t[n : n + 1] if name == "initial_state" else t[:, :, rows] for name, t in x.items()}
        alone = results(linear_attention, one, [upstream[0][:, :, rows], upstream[1][n : n + 1]])
        for name, t in alone.items():
            part = packed[name][n : n + 1] if "state" in name else packed[name][:, :, rows]
            assert torch.equal(part, t), (name, n)

    def nested(t):  # [1, H, T, ...] -> [B, H, L*, ...]
        rows = t[0].transpose(0, 1).contiguous()
        return torch.nested.nested_tensor_from_jagged(rows, ends.long()).transpose(1, 2)

    out, state = call(linear_attention, {name: t if "state" in name else nested(t) for name, t in x.items()})
    assert torch.equal(out.transpose(1, 2).values(), packed["out"][0].transpose(0, 1))
    assert torch.equal(state, packed["state"])


@pytest.mark.parametrize("decay", ["per head", "per channel"])
@pytest.mark.parametrize("cuts", [[1] * 20, [64, 6], [3, 0, 50, 17]])
def test_a_sequence_in_parts(decay, cuts):
    x = make(torch.float64, decay, length=sum(cuts))
    whole, last = call(linear_attention, x)
    state, outs, begin = x.pop("initial_state"), [], 0
    for count in cuts:
        part = {name: t[:, :, begin : begin + count] for name, t in x.items()}
        out, state = call(linear_attention, part | {"initial_state": state})
        outs.append(out)
        begin += count
    assert_close((torch.cat(outs, 2), state), (whole, last), rtol=1e-12, atol=1e-12)


def test_bits_do_not_depend_on_threads_or_batch():
    x = make(length=130, batch=5)
    upstream = [draw(5, 4, 130, 6), draw(5, 4, 8, 6)]
    found = results(linear_attention, x, upstream)
    with threads(1):
        assert all(torch.equal(t, found[name]) for name, t in results(linear_attention, x, upstream).items())
    one = results(linear_attention, {name: t[3:4] for name, t in x.items()}, [u[3:4] for u in upstream])
    assert all(torch.equal(t, found[name][3:4]) for name, t in one.items())


def test_gradients_of_gradients():
    x = make(torch.float64, length=5, dims=(3, 2), heads=(1, 2), batch=1)
    leaves = [t.requires_grad_() for t in x.values()]
    for decay in ("per head", "per channel"):
        leaves[3] = make(torch.float64, decay, length=5, dims=(3, 2), heads=(1, 2), batch=1)["log_decay"] - 0.1
        leaves[3].requires_grad_()
        function = lambda *t: call(linear_attention, dict(zip(x, t, strict=True)))  # noqa: E731
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("decay", ["per head", "per channel"])
def test_the_formula_is_the_kernel(decay):
    """Forward mode runs the formula that CUDA runs, with lengths and packed sequences."""
    x = make(torch.float64, decay, length=70)
    for settings in ({}, {"kv_lens": torch.tensor([70, 9])}):
        exact = call(linear_attention, x, **settings)
        tangents = {name: torch.zeros_like(t) for name, t in x.items()}
        found, _ = torch.func.jvp(lambda t: call(linear_attention, t, **settings), (x,), (tangents,))  # noqa: B023
        assert_close(found, exact, rtol=1e-10, atol=1e-10)
    packed = {name: t[:1] for name, t in x.items()} | {"initial_state": draw(2, 4, 8, 6, dtype=torch.float64)}
    ends = torch.tensor([0, 3, 70])
    found, _ = torch.func.jvp(lambda t: call(linear_attention, t, cu_seqlens=ends), (packed,),
                              ({name: torch.zeros_like(t) for name, t in packed.items()},))  # fmt: skip
    assert_close(found, call(linear_attention, packed, cu_seqlens=ends), rtol=1e-10, atol=1e-10)


def test_transforms():
    x = make(length=12, batch=3)
    whole = call(linear_attention, x)
    mapped = torch.func.vmap(lambda t: call(linear_attention, {n: v[None] for n, v in t.items()}))(x)
    assert_close(tuple(t[:, 0] for t in mapped), whole, rtol=0, atol=0)
    ends = torch.tensor([0, 4, 12])
    single = {name: t for name, t in x.items() if name != "initial_state"}

    def packed(t):
        return call(linear_attention, {n: v[None] for n, v in t.items()}, cu_seqlens=ends)[0]

    loop = torch.stack([packed({n: v[b] for n, v in single.items()}) for b in range(3)])
    assert torch.equal(torch.func.vmap(packed)(single), loop)

    def loss(t):
        out, state = call(linear_attention, {n: v[None] for n, v in t.items()})
        return out.square().sum() + state.square().sum()

    grads = torch.func.vmap(torch.func.grad(loss))(x)
    out, state = whole
    direct = results(linear_attention, x, [2 * out, 2 * state])
    for name, grad in grads.items():
        assert_close(grad, direct[f"grad of {name}"], rtol=1e-5, atol=1e-5)


def test_autocast_casts_query_key_and_value():
    x = make(length=20)
    with torch.autocast("cpu", torch.bfloat16):
        out, state = call(linear_attention, x)
    low = {name: t.bfloat16() if name in NAMES[:3] else t for name, t in x.items()}
    assert out.dtype == torch.bfloat16 and torch.equal(out, call(linear_attention, low)[0])
    assert state.dtype == torch.float32


@pytest.mark.parametrize("layout", ["contiguous", "heads inside"])
@pytest.mark.parametrize("decay, settings", [("per head", {}), ("per channel", {}), ("none", {}),
                         ("per head", {"kv_lens": torch.tensor([4, 0])}),
                         ("per channel", {"cu_seqlens": torch.tensor([0, 2, 2, 6])})])  # fmt: skip
def test_opcheck(decay, settings, layout):
    packed = "cu_seqlens" in settings
    x = make(decay=decay, beta=decay != "none", length=6, batch=1 if packed else 2, state=not packed)
    x = {name: (laid_out(t, layout) if t.dim() == 4 else t).detach().requires_grad_() for name, t in x.items()}
    tensors, rest = [x.pop(name) for name in NAMES[:3]], {**x, **settings}
    opcheck(torch.ops.attnpack.linear_attention.default, tensors, rest)
    out, state = torch.ops.attnpack.linear_attention(*tensors, **rest)
    tensors, rest = ([t.detach() for t in tensors], {n: t.detach() for n, t in rest.items()})
    opcheck(torch.ops.attnpack.linear_attention_backward.default, (out.detach(), state.detach(), *tensors), rest)
    opcheck(torch.ops.attnpack.linear_attention_backward.default, (out.detach(), None, *tensors), rest)


def test_it_compiles_to_one_graph():
    x = make(length=20)
    compiled = torch.compile(lambda t: call(linear_attention, t), fullgraph=True, backend="aot_eager", dynamic=True)
    upstream = [draw(2, 4, 20, 6), draw(2, 4, 8, 6)]
    for length in (20, 11):
        part = {name: t if "state" in name else t[:, :, :length] for name, t in x.items()}
        leaves = {name: t.detach().clone().requires_grad_() for name, t in part.items()}
        out, state = compiled(leaves)
        grads = torch.autograd.grad((out, state), list(leaves.values()), [upstream[0][:, :, :length], upstream[1]])
        direct = results(linear_attention, part, [upstream[0][:, :, :length], upstream[1]])
        assert_close([out, state, *grads], list(direct.values()), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [{"length": 0}, {"batch": 0}, {"dims": (0, 4)}, {"dims": (4, 0)}, {"heads": (0, 0)}])
def test_empty_tensors(shape):
    x = make(**{"length": 5, **shape})
    out, state = call(linear_attention, x)
    exact, last = call(reference.linear_attention, x, scale=1.0)
    assert_close((out, state), (exact, last))
    for grad in results(linear_attention, x, [out, state]).values():
        assert grad.isfinite().all()


X, G = torch.ones(2, 2, 37, 8), torch.zeros(2, 4, 37)
V = torch.ones(2, 4, 37, 6)
WRONG = {
    r"beta: got \[2, 4, 36\], want \[B, Hv, L\] = \[2, 4, 37\]": dict(beta=G[..., :36]),
    r"log_decay: got \[2, 4, 36\], want \[B, Hv, L\] = \[2, 4, 37\]": dict(log_decay=G[..., :36]),
    r"log_decay: got \[2, 4, 37, 6\], want \[B, Hv, L, D\], or without D, = \[2, 4, 37, 8\]": dict(log_decay=V),
    r"beta: got Long, want a float dtype": dict(beta=G.long()),
    r"initial_state: got \[2, 4, 6, 8\], want \[sequences, Hv, D, Dv\] = \[2, 4, 8, 6\]": dict(
        initial_state=torch.ones(2, 4, 6, 8)
    ),
    r"kv_lens: got \[3\], want \[B\] = \[2\]": dict(kv_lens=torch.ones(3).long()),
    r"kv_lens: got Float, want int32 or int64": dict(kv_lens=torch.ones(2)),
    r"kv_lens\[1\]: got 38, want 0 to 37, the tokens of query": dict(kv_lens=torch.tensor([0, 38])),
    r"cu_seqlens: got a batch of 2, want packed sequences": dict(cu_seqlens=torch.tensor([0, 37])),
    r"value: got \[2, 4, 36, 6\], want \[B, Hv, L, Dv\] = \[2, Hv, 37, Dv\]": dict(value=V[:, :, :36]),
    r"value: got 3 heads, want a multiple of the 2 of query and key": dict(value=V[:, :3]),
    r"key: got \[2, 2, 37, 7\], want \[2, 2, 37, 8\] as query": dict(key=X[..., :7]),
    r"key: got Double, want Float as query": dict(key=X.double()),
    r"query: got \[2, 37, 8\], want 4 dimensions": dict(query=X[:, 0]),
    r"query: got Long, want float64, float32, bfloat16 or float16": dict(query=X.long()),
    r"log_decay: got 0.5, want at most 0, the log of what is kept of the state": dict(log_decay=G + 0.5),
    r"log_decay: got 0.25, want at most 0": dict(log_decay=torch.eye(8)[0].expand(2, 4, 37, 8) / 4),
    r"beta is 3 \(int\), wants a float tensor \[batch, heads, length\], or None": dict(beta=3),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    given = {"query": X, "key": X, "value": V} | WRONG[message]
    with pytest.raises((ValueError, TypeError), match="attnpack: " + message):
        linear_attention(given.pop("query"), given.pop("key"), given.pop("value"), **given)


PACKED = {
    r"cu_seqlens\[0\]: got 1, want 0": [1, 37],
    r"cu_seqlens\[2\]: got 3 after 5, want numbers that never fall": [0, 5, 3, 37],
    r"cu_seqlens: got 36 at the end, want 37, the tokens of query": [0, 36],
}


@pytest.mark.parametrize("message", PACKED)
def test_wrong_ends_are_named(message):
    with pytest.raises(ValueError, match="attnpack: " + message):
        linear_attention(X[:1], X[:1], V[:1], cu_seqlens=torch.tensor(PACKED[message]))


def test_positive_decays_of_padding_are_no_mistake():
    g = G.clone()
    g[0, :, 30:] = 1.0
    lens = torch.tensor([30, 37])
    assert linear_attention(X, X, V, log_decay=g, kv_lens=lens).isfinite().all()
    with pytest.raises(ValueError, match="log_decay: got 1, want at most 0"):
        linear_attention(X, X, V, log_decay=g)


def test_memory_is_linear_in_the_length_and_kept_for_no_token():
    """What backward keeps is the inputs alone."""
    x = {name: t.requires_grad_() for name, t in make(length=64).items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call(linear_attention, x)
    assert sum(t.numel() for t in saved) == sum(t.numel() for t in x.values())
    assert attnpack.linear_attention is attnpack.ops.linear_attention
