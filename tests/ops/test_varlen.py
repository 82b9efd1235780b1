"""Packed sequences: the bits of one `attention` call per sequence, whatever stands around a sequence."""

from itertools import accumulate

import attnpack
import pytest
import torch
from attnpack import attention, attention_varlen, reference
from attnpack.tools.threads import threads
from op_cases import DTYPES, HEADS, draw
from torch.testing import assert_close

NAN = float("nan")
# Query and key lengths of each sequence: decode rows and prefill tiles, several blocks of keys, none at all.
LENGTHS = {
    "one": [(33, 33)],
    "short": [(1, 1), (5, 5), (0, 0), (17, 17), (2, 2)],
    "tiles": [(97, 97), (300, 300), (1, 1), (65, 65)],
    "decode": [(1, 600), (1, 3), (2, 1100), (1, 0), (1, 64)],
    "uneven": [(7, 17), (17, 7), (0, 5), (5, 0), (130, 260), (3, 700)],
    "empty": [(0, 0), (0, 0)],
    "none": [],
}
SETTINGS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "sliding": {"causal": True, "window": (40, 0)},
    "chunk": {"causal": True, "chunk": 30},
    "scores": {"softcap": 0.7, "sinks": True, "alibi": True, "causal": True, "scale": 0.4},
    "sinks": {"sinks": True, "window": (2, 0)},
}


def ends(lengths, dtype=torch.int32):
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def make(lengths, heads="gqa", dtype=torch.float32, settings=None, dims=(16, 12), margin=0):
    """q, k, v, cu_seqlens_q, cu_seqlens_k, settings. margin: rows of NaN around the packed tensors."""
    num_heads, num_kv_heads, head_map = HEADS[heads]
    queries, keys = sum(q for q, _ in lengths), sum(k for _, k in lengths)
    tensors = []
    for n, shape in enumerate([(queries, num_heads, dims[0]), (keys, num_kv_heads, dims[0]),
                               (keys, num_kv_heads, dims[1])]):  # fmt: skip
        room = torch.full((shape[0] + 2 * margin, *shape[1:]), NAN, dtype=dtype)
        tensors.append(room[margin : margin + shape[0]].copy_(draw(*shape, dtype=dtype, seed=n)))
    made = dict(settings or {})
    if made.pop("alibi", False):
        made["alibi_slopes"] = draw(num_heads).abs()
    if made.get("sinks"):
        made["sinks"] = draw(num_heads, seed=7)
    if head_map:
        made["head_map"] = head_map
    return *tensors, ends([q for q, _ in lengths]), ends([k for _, k in lengths]), made


def one_by_one(q, k, v, cu_q, cu_k, settings, function=attention, **more):
    """out [T, Hq, Dv] and lse [Hq, T] of one call per sequence, each bottom-right."""
    outs, lses = [], []
    for (a, b), (c, d) in zip(zip(cu_q, cu_q[1:], strict=False), zip(cu_k, cu_k[1:], strict=False), strict=True):
        heads = [x.transpose(0, 1).unsqueeze(0) for x in (q[a:b], k[c:d], v[c:d])]
        out, lse = function(*heads, q_offset=int((d - c) - (b - a)), return_lse=True, **settings, **more)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def assert_same_bits(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype
    assert torch.equal(torch.nan_to_num(a, nan=12345.0), torch.nan_to_num(b, nan=12345.0))


def differentiate(function, tensors, grad_out, grad_lse):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = function(*leaves)
    return torch.autograd.grad([out, lse], leaves, [grad_out, grad_lse])


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("lengths", [name for name in LENGTHS if name != "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_one_call_per_sequence(dtype, lengths, settings):
    heads = list(HEADS)[(list(LENGTHS).index(lengths) + list(SETTINGS).index(settings)) % len(HEADS)]
    *tensors, cu_q, cu_k, made = make(LENGTHS[lengths], heads, dtype, SETTINGS[settings], margin=2)
    out, lse = attention_varlen(*tensors, cu_q, cu_k, return_lse=True, **made)
    expected_out, expected_lse = one_by_one(*tensors, cu_q, cu_k, made)
    assert_same_bits(out, expected_out)
    assert_same_bits(lse, expected_lse)
    assert out.is_contiguous() and lse.is_contiguous()
    grad_out, grad_lse = draw(*out.shape, dtype=dtype, seed=5), draw(*lse.shape, dtype=lse.dtype, seed=6)
    grad_lse = grad_lse.masked_fill(lse.isinf(), 0)
    got = differentiate(
        lambda *x: attention_varlen(*x, cu_q, cu_k, return_lse=True, **made), tensors, grad_out, grad_lse
    )
    expected = differentiate(lambda *x: one_by_one(*x, cu_q, cu_k, made), tensors, grad_out, grad_lse)
    for g, e in zip(got, expected, strict=True):
        assert_same_bits(g, e)


@pytest.mark.parametrize("other", [1, 3])
def test_bits_do_not_depend_on_threads(other):
    *tensors, cu_q, cu_k, made = make(LENGTHS["uneven"], settings=SETTINGS["scores"])
    results = []
    for count in (2, other):
        with threads(count):
            out, lse = attention_varlen(*tensors, cu_q, cu_k, return_lse=True, **made)
            grads = differentiate(
                lambda *x: attention_varlen(*x, cu_q, cu_k, return_lse=True, **made),
                tensors,
                torch.ones_like(out),
                lse.isfinite().float(),
            )
        results.append([out, lse, *grads])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_many_short_sequences_keep_their_packed_keys_apart():
    """Prefill keeps packed keys between units, so sequences of other lengths in turn must not read each other's."""
    lengths = [(n, n) for n in (300, 200, 300, 450, 200, 193, 1000, 300)]
    *tensors, cu_q, cu_k, made = make(lengths, "mha", settings={"causal": True})
    out, lse = attention_varlen(*tensors, cu_q, cu_k, return_lse=True, **made)
    for got, expected in zip((out, lse), one_by_one(*tensors, cu_q, cu_k, made), strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("lengths", ["short", "decode", "uneven"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_fp64_reference(dtype, lengths):
    *tensors, cu_q, cu_k, made = make(LENGTHS[lengths], "gqa", dtype, SETTINGS["scores"])
    wide = [x.double() for x in tensors]
    truth, truth_lse = one_by_one(*wide, cu_q, cu_k, made, reference.attention)
    plain, plain_lse = one_by_one(*tensors, cu_q, cu_k, made, reference.attention)
    out, lse = attention_varlen(*tensors, cu_q, cu_k, return_lse=True, **made)
    floor = 4 * torch.finfo(dtype).eps
    assert (out - truth).abs().max() <= 2 * (plain - truth).abs().max() + floor
    finite = truth_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert_close(lse[finite].double(), truth_lse[finite], atol=2e-2 if dtype.itemsize == 2 else 1e-4, rtol=1e-3)


def test_gradcheck():
    *tensors, cu_q, cu_k, made = make([(3, 4), (0, 2), (2, 0), (2, 2)], dtype=torch.float64, settings={"causal": True},
                                      dims=(3, 2))  # fmt: skip
    sinks = draw(4, dtype=torch.float64, seed=3).requires_grad_()
    tensors = [x.requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(
        lambda q, k, v, s: attention_varlen(q, k, v, cu_q, cu_k, sinks=s, softcap=2.0, return_lse=True, **made),
        (*tensors, sinks),
    )


def test_gradient_of_sinks():
    *tensors, cu_q, cu_k, made = make(LENGTHS["uneven"], dtype=torch.float64)
    grads = []
    for function in (attention_varlen, lambda *a, sinks, **s: one_by_one(*a, {"sinks": sinks, **s})[0]):
        sinks = draw(4, dtype=torch.float64, seed=3).requires_grad_()
        function(*tensors, cu_q, cu_k, sinks=sinks, **made).square().sum().backward()
        grads.append(sinks.grad)
    assert_close(*grads)


def test_views_of_packed_projections():
    """qkv in one tensor: rows are strided, and the values next to a row belong to others."""
    packed = draw(40, 3, 4, 16)
    cu = ends([11, 0, 29])
    q, k, v = packed.unbind(1)
    out, lse = attention_varlen(q, k, v, cu, causal=True, return_lse=True)
    for got, expected in zip((out, lse), one_by_one(q, k, v, cu, cu, {"causal": True}), strict=True):
        assert_same_bits(got, expected)
    columns = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert_same_bits(attention_varlen(columns, k, v, cu, causal=True), out)
    heads_outside = [x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in (q, k, v)]
    result = attention_varlen(*heads_outside, cu, causal=True)
    assert_same_bits(result, out)
    assert result.is_contiguous()


def test_what_is_not_attended_is_not_read():
    """NaN in one sequence reaches only that sequence."""
    *tensors, cu_q, cu_k, _ = make([(5, 5), (200, 200), (1, 7)])
    clean = attention_varlen(*tensors, cu_q, cu_k)
    for x in tensors[1:]:
        x[5:205] = NAN
    out = attention_varlen(*tensors, cu_q, cu_k)
    assert_same_bits(out[:5], clean[:5])
    assert_same_bits(out[205:], clean[205:])
    assert out[5:205].isnan().all()


def test_rows_without_keys():
    *tensors, cu_q, cu_k, _ = make([(3, 0), (5, 2)])
    sinks = torch.tensor([0.5, -1.0, float("inf"), 2.0])
    for given, expected in ((None, torch.full((4, 3), -float("inf"))), (sinks, sinks[:, None].expand(4, 3))):
        out, lse = attention_varlen(*tensors, cu_q, cu_k, causal=True, sinks=given, return_lse=True)
        assert (out[:6] == 0).all()  # bottom-right: 5 queries over 2 keys stand at -3 .. 1
        assert torch.equal(lse[:, :3], expected)
    q = tensors[0].requires_grad_()
    attention_varlen(q, *tensors[1:], cu_q, cu_k).sum().backward()
    assert (q.grad[:3] == 0).all()


def test_keys_default_to_the_queries_ends():
    q, k, v, cu_q, _, _ = make([(3, 3), (9, 9)])
    assert_same_bits(attention_varlen(q, k, v, cu_q), attention_varlen(q, k, v, cu_q, cu_q.long()))
    hinted = attention_varlen(q, k, v, cu_q, max_seqlen_q=1, max_seqlen_k=10**9)
    assert_same_bits(hinted, attention_varlen(q, k, v, cu_q))


def test_no_sequences():
    *tensors, cu_q, cu_k, _ = make([])
    out, lse = attention_varlen(*tensors, cu_q, cu_k, return_lse=True)
    assert out.shape == (0, 4, 12) and lse.shape == (4, 0)


def test_dropout_draws_for_each_sequence():
    length, count = 64, 3
    q = torch.zeros(length * count, 1, 4)
    v = torch.eye(length).repeat(count, 1).unsqueeze(1)
    cu = ends([length] * count)
    torch.manual_seed(3)
    out = attention_varlen(q, q, v, cu, dropout_p=0.3)
    kept = (out > 0).view(count, length, length)
    assert 0.65 < kept.float().mean() < 0.75
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert 0.4 < (kept[a] == kept[b]).float().mean() < 0.7
    torch.manual_seed(3)
    leaf = v.clone().requires_grad_()
    attention_varlen(q, q, leaf, cu, dropout_p=0.3).sum().backward()
    expected = kept.sum(1).flatten() / (0.7 * length)
    assert_close(leaf.grad[:, 0, 0], expected, atol=1e-5, rtol=1e-5)


def test_autocast_and_meta():
    q, k, v, cu_q, cu_k, _ = make([(3, 3), (9, 9)])
    with torch.autocast("cpu", torch.bfloat16):
        assert attention_varlen(q, k, v, cu_q, cu_k).dtype == torch.bfloat16
    out, lse = attention_varlen(*(x.to("meta") for x in (q, k, v)), cu_q, cu_k, return_lse=True)
    assert out.shape == (12, 4, 12) and lse.shape == (4, 12) and lse.dtype == torch.float32


@pytest.mark.parametrize("settings", ["plain", "scores"])
def test_transforms_run_the_formula(settings):
    *tensors, cu_q, cu_k, made = make([(5, 5), (2, 7), (3, 0)], dtype=torch.float64, settings=SETTINGS[settings])

    def loss(q, k, v):
        return attention_varlen(q, k, v, cu_q, cu_k, **made).square().sum()

    got = torch.func.grad(loss, (0, 1, 2))(*tensors)
    leaves = [x.clone().requires_grad_() for x in tensors]
    for g, e in zip(got, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        assert_close(g, e)
    tangents = [draw(*x.shape, dtype=torch.float64, seed=9) for x in tensors]
    value, derivative = torch.func.jvp(loss, tuple(tensors), tuple(tangents))
    assert_close(value, loss(*tensors))
    assert_close(derivative, sum((g * t).sum() for g, t in zip(got, tangents, strict=True)))


def test_second_derivative():
    q, k, v, cu_q, cu_k, _ = make([(3, 3), (0, 2), (2, 4)], dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradgradcheck(
        lambda *x: attention_varlen(*x, cu_q, cu_k, causal=True), leaves, fast_mode=True
    )
    first = torch.autograd.grad(attention_varlen(*leaves, cu_q, cu_k).square().sum(), leaves)
    again = torch.autograd.grad(attention_varlen(*leaves, cu_q, cu_k).square().sum(), leaves, create_graph=True)
    assert_same_bits(torch.cat([x.flatten() for x in first]), torch.cat([x.flatten() for x in again]).detach())


def test_vmap_over_samples():
    q, k, v, cu_q, cu_k, _ = make([(3, 3), (2, 4)])
    samples = [torch.stack([x, x.flip(0), 2 * x]) for x in (q, k, v)]

    def loss(q, k, v):
        return attention_varlen(q, k, v, cu_q, cu_k, causal=True).square().sum()

    found = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*samples)
    for n in range(3):
        alone = torch.func.grad(loss, (0, 1, 2))(*(x[n] for x in samples))
        for a, b in zip(found, alone, strict=True):
            assert_close(a[n], b)


def test_changed_ends_are_noticed():
    q, k, v, cu_q, cu_k, _ = make([(3, 3), (4, 4)])
    out = attention_varlen(q.requires_grad_(), k, v, cu_q, cu_k)
    cu_q[1] = 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_one_graph(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, a, b: attention_varlen(q, k, v, a, b, causal=True, max_seqlen_q=9), fullgraph=True,
        dynamic=dynamic,
    )  # fmt: skip
    for lengths in ([(3, 3), (9, 9)], [(4, 9), (1, 1), (0, 3)]):
        q, k, v, cu_q, cu_k, _ = make(lengths)
        q.requires_grad_()
        out = compiled(q, k, v, cu_q, cu_k)
        expected = attention_varlen(q, k, v, cu_q, cu_k, causal=True)
        assert_same_bits(out, expected)
        assert_same_bits(*(torch.autograd.grad(x.sum(), q)[0] for x in (out, expected)))


def test_torch_op_is_the_same():
    q, k, v, cu_q, cu_k, _ = make([(3, 3), (9, 9)])
    out, _ = torch.ops.attnpack.attention_varlen(q, k, v, cu_q, cu_k, causal=True)
    assert_same_bits(out, attention_varlen(q, k, v, cu_q, cu_k, causal=True))


@pytest.mark.parametrize("offset", [0, -2, 5, "tensor", 2**62, 2**63 - 1])
def test_offsets_of_the_op(offset):
    """q_offset as `attention` takes it, which nested tensors need."""
    q, k, v, cu_q, cu_k, _ = make([(3, 3), (9, 4)])
    given = torch.tensor([1, -1]) if offset == "tensor" else offset
    out = attnpack.ops.attend_packed(q, k, v, cu_q, cu_k, causal=True, q_offset=given)
    pieces = []
    for n, (a, b, c, d) in enumerate([(0, 3, 0, 3), (3, 12, 3, 7)]):
        heads = [x.transpose(0, 1).unsqueeze(0) for x in (q[a:b], k[c:d], v[c:d])]
        own = int(given[n]) if offset == "tensor" else offset
        pieces.append(attention(*heads, causal=True, q_offset=own)[0].transpose(0, 1))
    assert_same_bits(out, torch.cat(pieces))
