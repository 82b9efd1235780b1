"""The short convolution against its formula and torch's conv1d: values and gradients, lengths, cuts, transforms."""

import attnpack
import pytest
import torch
from attnpack import causal_conv1d, reference
from attnpack.tools.threads import threads
from marks import grid
from op_cases import check, draw
from torch.library import opcheck
from torch.nn import functional as F
from torch.testing import assert_close

NAN = float("nan")
NAMES = ("x", "weight", "bias", "initial_state")


def make(dtype=torch.float32, taps=4, length=70, channels=20, batch=2, bias=True, state=True):
    wide = torch.promote_types(dtype, torch.float32)
    x = {"x": draw(batch, length, channels, dtype=dtype, seed=1), "weight": draw(channels, taps, dtype=wide, seed=2)}
    if bias:
        x["bias"] = draw(channels, dtype=wide, seed=3)
    if state:
        x["initial_state"] = draw(batch, channels, taps - 1, dtype=dtype, seed=4)
    return x


def call(function, x, **settings):
    x = dict(x)
    if function is causal_conv1d:
        settings["return_state"] = True
    return function(x.pop("x"), x.pop("weight"), **x, **settings)


def results(function, x, upstream, **settings):
    """out, state and all gradients; upstream: the gradients of out and of the state."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
    out, state = call(function, leaves, **settings)
    grads = torch.autograd.grad((out, state), list(leaves.values()), [u.to(y.dtype) for u, y in zip(
        upstream, (out, state), strict=True)], materialize_grads=True)  # fmt: skip
    named = {f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"out": out.detach(), "state": state.detach()} | named


def upstream_of(x):
    batch, length, channels = x["x"].shape
    taps, dtype = x["weight"].shape[1], x["x"].dtype
    return [draw(batch, length, channels, dtype=dtype, seed=8), draw(batch, channels, taps - 1, dtype=dtype, seed=9)]


def double(x):
    return {name: t.double() for name, t in x.items()}


def compare(x, **settings):
    """Errors against fp64 are at most twice those of plain PyTorch in the same dtype."""
    upstream = upstream_of(x)
    ours = results(causal_conv1d, x, upstream, **settings)
    plain = results(reference.causal_conv1d, x, upstream, **settings)
    truth = results(reference.causal_conv1d, double(x), [u.double() for u in upstream], **settings)
    for name, exact in truth.items():
        check({name: ours[name]}, {name: plain[name]}, {name: exact}, ours[name].dtype)


@grid(
    3,
    dtype=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    taps=(1, 2, 3, 4, 7),
    length=(1, 2, 5, 70, 300),
    activation=("silu", None),
)
def test_values_and_gradients(dtype, taps, length, activation):
    compare(make(dtype, taps, length, bias=length % 2 == 0, state=length != 5), activation=activation)


@pytest.mark.parametrize("channels", [1, 15, 16, 33, 256, 300])
def test_channels(channels):
    compare(make(channels=channels, length=9), activation="silu")


def test_it_is_torchs_convolution():
    x = make(torch.float64, state=False)
    out = causal_conv1d(x["x"], x["weight"], x["bias"])
    exact = F.conv1d(x["x"].mT, x["weight"].unsqueeze(1), x["bias"], padding=3, groups=20)[..., :70]
    assert_close(out, exact.mT, rtol=1e-12, atol=1e-12)


def test_large_numbers_do_not_overflow_in_silu():
    x = torch.tensor([[[-1e4, 1e4, -88.0, -104.0, 0.0, torch.inf]]]).requires_grad_()
    out = causal_conv1d(x, torch.ones(6, 1), activation="silu")
    assert_close(out, F.silu(x))
    assert_close(*(torch.autograd.grad(y.sum(), x)[0][..., :5] for y in (out, F.silu(x))))


@pytest.mark.parametrize("layout", ["across", "sliced", "expanded", "every other channel"])
def test_layouts(layout):
    plain = make(length=20)
    laid = dict(plain)
    if layout == "across":
        laid["x"] = plain["x"].mT.contiguous().mT
    elif layout == "sliced":
        laid["x"] = F.pad(plain["x"], (3, 5, 1, 1), value=NAN)[:, 1:-1, 3:-5]
    elif layout == "expanded":
        plain["x"] = laid["x"] = plain["x"][:, :1].expand(-1, 20, -1)
        plain["x"] = plain["x"].clone()
    else:
        laid["x"] = torch.stack([plain["x"], plain["x"] * NAN], -1).flatten(-2)[..., ::2]
    laid["initial_state"] = plain["initial_state"].mT.contiguous().mT
    laid["weight"] = plain["weight"].T.contiguous().T
    upstream = upstream_of(plain)
    out = call(causal_conv1d, laid)[0]
    assert out.mT.is_contiguous() if layout == "across" else out.is_contiguous()
    across = [u.mT.contiguous().mT for u in upstream]
    found = results(causal_conv1d, laid, across)
    for name, exact in results(causal_conv1d, plain, upstream).items():
        assert torch.equal(found[name], exact), name


@pytest.mark.parametrize(
    "lens", [torch.tensor([37, 12]), torch.tensor([0, 65], dtype=torch.int32), torch.tensor([2, 1])]
)
def test_padding_changes_nothing(lens):
    x = make(length=70)
    compare(x, kv_lens=lens, activation="silu")
    spoilt = x | {"x": x["x"].clone()}
    upstream = upstream_of(x)
    bad = [upstream[0].clone(), upstream[1]]
    for b, length in enumerate(lens.tolist()):
        spoilt["x"][b, length:] = NAN
        bad[0][b, length:] = NAN
    clean, found = (results(causal_conv1d, t, u, kv_lens=lens) for t, u in ((x, upstream), (spoilt, bad)))
    for name, t in found.items():
        assert torch.equal(t, clean[name]), name
    for b, length in enumerate(lens.tolist()):
        assert (found["out"][b, length:] == 0).all() and (found["grad of x"][b, length:] == 0).all()


def test_packed_and_nested_sequences_are_calls_of_their_own():
    ends = torch.tensor([0, 5, 5, 75, 77], dtype=torch.int32)
    x = make(length=77, batch=1) | {"initial_state": draw(4, 20, 3, seed=6)}
    upstream = [draw(1, 77, 20), draw(4, 20, 3, seed=7)]
    packed = results(causal_conv1d, x, upstream, cu_seqlens=ends, activation="silu")
    sums = {name: torch.zeros_like(packed[name]) for name in ("grad of weight", "grad of bias")}
    for n in range(4):
        rows = slice(int(ends[n]), int(ends[n + 1]))
        one = x | {"x": x["x"][:, rows], "initial_state": x["initial_state"][n : n + 1]}
        parts = [upstream[0][:, rows], upstream[1][n : n + 1]]
        for name, t in results(causal_conv1d, one, parts, activation="silu").items():
            if name in sums:
                sums[name] += t
            else:
                assert torch.equal(packed[name][n : n + 1] if "state" in name else packed[name][:, rows], t), (name, n)
    for name, t in sums.items():
        assert_close(packed[name], t)
    nested = torch.nested.nested_tensor_from_jagged(x["x"][0], ends.long())
    out, state = call(causal_conv1d, x | {"x": nested}, activation="silu")
    assert torch.equal(out.values(), packed["out"][0]) and torch.equal(state, packed["state"])


def test_no_packed_sequences():
    x = make(length=0, batch=1) | {"initial_state": torch.empty(0, 20, 3)}
    upstream = [torch.empty(1, 0, 20), torch.empty(0, 20, 3)]
    found = results(causal_conv1d, x, upstream, cu_seqlens=torch.tensor([0]), activation="silu")
    assert found["out"].shape == (1, 0, 20) and found["state"].shape == (0, 20, 3)
    assert all((grad == 0).all() for name, grad in found.items() if name.startswith("grad"))


@pytest.mark.parametrize("cuts", [[1] * 12, [64, 6], [3, 0, 50, 17]])
def test_a_sequence_in_parts(cuts):
    x = make(length=sum(cuts))
    whole, last = call(causal_conv1d, x, activation="silu")
    state, outs = x.pop("initial_state"), []
    for part in x["x"].split(cuts, 1):
        out, state = call(causal_conv1d, x | {"x": part, "initial_state": state}, activation="silu")
        outs.append(out)
    assert torch.equal(torch.cat(outs, 1), whole) and torch.equal(state, last)


def test_bits_do_not_depend_on_threads_or_batch():
    x = make(length=400, batch=5, channels=300)
    upstream = upstream_of(x)
    found = results(causal_conv1d, x, upstream, activation="silu")
    with threads(1):
        again = results(causal_conv1d, x, upstream, activation="silu")
    assert all(torch.equal(t, found[name]) for name, t in again.items())
    one = x | {name: x[name][3:4] for name in ("x", "initial_state")}
    alone = results(causal_conv1d, one, [u[3:4] for u in upstream], activation="silu")
    for name in ("out", "state", "grad of x", "grad of initial_state"):
        assert torch.equal(alone[name], found[name][3:4]), name


def test_gradients_of_gradients():
    x = make(torch.float64, length=5, channels=2, taps=3)
    for settings in ({"activation": "silu"}, {"kv_lens": torch.tensor([5, 1])}):
        function = lambda *t: call(causal_conv1d, dict(zip(NAMES, t, strict=True)), **settings)  # noqa: B023, E731
        leaves = [t.detach().requires_grad_() for t in x.values()]
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


def test_the_formula_is_the_kernel():
    """Forward mode runs the formula that CUDA runs, with lengths and packed sequences."""
    x = make(torch.float64)
    packed = x | {"x": x["x"][:1]}
    for t, settings in (
        (x, {"activation": "silu"}),
        (x, {"kv_lens": torch.tensor([70, 2], dtype=torch.int32)}),
        (packed, {"cu_seqlens": torch.tensor([0, 2, 70])}),
    ):
        tangents = {name: torch.zeros_like(v) for name, v in t.items()}
        found, _ = torch.func.jvp(lambda v: call(causal_conv1d, v, **settings), (t,), (tangents,))  # noqa: B023
        assert_close(found, call(causal_conv1d, t, **settings), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("inner", ["rows", "weights", "packed"])
def test_transforms(inner):
    x = make(length=12, batch=3)
    rows = {name: x[name] for name in ("x", "initial_state")}
    others = {name: torch.stack([x[name], -x[name], 2 * x[name]]) for name in ("weight", "bias")}
    ends = torch.tensor([0, 4, 12])
    settings = {"activation": "silu"} | ({"cu_seqlens": ends} if inner == "packed" else {})
    shared = {} if inner == "weights" else {name: x[name] for name in others}
    mapped = (rows if inner == "rows" else {"x": x["x"]}) | (others if inner == "weights" else {})

    def one(t):
        given = {"x": t["x"][None]} | ({"initial_state": t["initial_state"][None]} if "initial_state" in t else {})
        return call(causal_conv1d, {**given, **{n: t.get(n, shared.get(n)) for n in others}}, **settings)

    def loss(t):
        return sum(y.square().sum() for y in one(t))

    samples = [{name: t[b] for name, t in mapped.items()} for b in range(3)]
    loop = [torch.stack(parts) for parts in zip(*[one(t) for t in samples], strict=True)]
    assert_close(list(torch.func.vmap(one)(mapped)), loop, rtol=0, atol=0)
    found = torch.func.vmap(torch.func.grad(loss))(mapped)
    for name, t in found.items():
        assert_close(t, torch.stack([torch.func.grad(loss)(s)[name] for s in samples]))


def test_gradients_of_shared_weights_for_each_sample():
    x = make(length=6, batch=3, state=False)

    def loss(weight, row):
        return causal_conv1d(row[None], weight, x["bias"]).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(x["weight"], x["x"])
    assert_close(found, torch.stack([torch.func.grad(loss)(x["weight"], row) for row in x["x"]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    x = {name: t.requires_grad_() for name, t in make(dtype, length=5).items()}
    arguments = (x["x"], x["weight"], x["bias"], x["initial_state"])
    opcheck(torch.ops.attnpack.causal_conv1d, (*arguments, torch.tensor([5, 2]), None, True))
    opcheck(torch.ops.attnpack.causal_conv1d, (x["x"].mT.contiguous().mT, x["weight"]))
    plain = [t.detach() for t in arguments]
    grads = [u.detach() for u in upstream_of(x)]
    opcheck(torch.ops.attnpack.causal_conv1d_backward, (*grads, *plain, None, None, True))
    opcheck(torch.ops.attnpack.causal_conv1d_backward, (grads[0], None, *plain[:2]))


def test_autocast():
    x = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = causal_conv1d(x["x"], x["weight"], x["bias"])
    assert torch.equal(out, causal_conv1d(x["x"].bfloat16(), x["weight"], x["bias"]))


def test_it_compiles_to_one_graph():
    x = make(length=20)
    compiled = torch.compile(
        lambda t: call(causal_conv1d, t, activation="silu"), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for length in (20, 11):
        part = x | {"x": x["x"][:, :length]}
        leaves = {name: t.detach().clone().requires_grad_() for name, t in part.items()}
        upstream = upstream_of(part)
        out, state = compiled(leaves)
        grads = torch.autograd.grad((out, state), list(leaves.values()), upstream)
        direct = results(causal_conv1d, part, upstream, activation="silu")
        assert_close([out, state, *grads], list(direct.values()), rtol=0, atol=0)
    with pytest.raises(ValueError, match="activation: got 'gelu', want 'silu', or none"):
        torch.compile(causal_conv1d, backend="eager")(x["x"], x["weight"], activation="gelu")


@pytest.mark.parametrize("shape", [{"length": 0}, {"batch": 0}, {"channels": 0}, {"taps": 1, "length": 0}])
def test_empty_tensors(shape):
    x = make(**{"length": 5, **shape})
    out, state = call(causal_conv1d, x)
    assert out.shape == x["x"].shape and torch.equal(state, x["initial_state"] if not x["x"].size(1) else state)
    for grad in results(causal_conv1d, x, [out, state]).values():
        assert grad.isfinite().all()


X, W = torch.ones(2, 9, 6), torch.ones(6, 4)
WRONG = {
    r"x: got \[9, 6\], want \[B, L, C\]": dict(x=X[0]),
    r"x: got Long, want float64, float32, bfloat16 or float16": dict(x=X.long()),
    r"weight: got \[5, 4\], want \[C, K\] = \[6, 4\]": dict(weight=W[:5]),
    r"weight: got \[6, 1, 4\], want \[C, K\] with K of at least 1: that of a Conv1d is one by .squeeze": dict(
        weight=W.unsqueeze(1)
    ),
    r"weight: got \[6, 0\], want \[C, K\] with K of at least 1": dict(weight=W[:, :0]),
    r"bias: got \[4\], want \[C\] = \[6\]": dict(bias=W[0]),
    r"bias: got Long, want a float dtype": dict(bias=W[:, 0].long()),
    r"activation: got 'relu', want 'silu', or none": dict(activation="relu"),
    r"initial_state: got \[2, 3, 6\], want \[sequences, C, K - 1\] = \[2, 6, 3\]": dict(
        initial_state=torch.ones(2, 3, 6)
    ),
    r"kv_lens: got \[3\], want \[B\] = \[2\]": dict(kv_lens=torch.ones(3).long()),
    r"kv_lens\[1\]: got 10, want 0 to 9, the tokens of x": dict(kv_lens=torch.tensor([0, 10])),
    r"cu_seqlens: got a batch of 2, want packed sequences": dict(cu_seqlens=torch.tensor([0, 9])),
    r"cu_seqlens: got 8 at the end, want 9, the tokens of x": dict(x=X[:1], cu_seqlens=torch.tensor([0, 8])),
    r"weight is 3 \(int\), wants a tensor": dict(weight=3),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    given = {"x": X, "weight": W} | WRONG[message]
    with pytest.raises((ValueError, TypeError), match="attnpack: " + message):
        causal_conv1d(given.pop("x"), given.pop("weight"), **given)


def test_backward_keeps_only_the_inputs():
    x = {name: t.requires_grad_() for name, t in make().items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call(causal_conv1d, x, activation="silu")
    assert sum(t.numel() for t in saved) == sum(t.numel() for t in x.values())
    assert attnpack.causal_conv1d is attnpack.ops.causal_conv1d
