"""query_scale, a factor on the scores of each query: every surface against the formula, and its gradient."""

import attnpack
import pytest
import torch
from attnpack import attention, attention_scores, attention_varlen, reference
from op_cases import check, draw
from torch.testing import assert_close

RULES = {
    "plain": {},
    "causal, capped": {"causal": True, "softcap": 2.0},
    "window, sinks": {"window": (3, 1), "sinks": draw(4, seed=9)},
    "ALiBi, lengths": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "kv_lens": torch.tensor([7, 0])},
    "map, scale": {"head_map": [1, 0, 0, 1], "scale": -0.4},
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def heads(dtype=torch.float64, q_len=5, kv_len=7):
    return [draw(2, n, length, 8, dtype=dtype, seed=n) for n, length in ((4, q_len), (2, kv_len), (2, kv_len))]


def factors(*shape, dtype=torch.float32):
    return (draw(*shape, seed=4) + 1.5).to(dtype)


@pytest.mark.parametrize("shape", [(5,), (2, 5)], ids=str)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_operator(dtype, rules, shape):
    tensors, scale = heads(dtype), factors(*shape)
    got = attention(*tensors, query_scale=scale, return_lse=True, **rules)
    plain, truth = (
        reference.attention(*[x.to(t) for x in tensors], query_scale=scale.to(t), return_lse=True, **rules)
        for t in (dtype, torch.float64)
    )
    check(*[dict(zip(("out", "lse"), each, strict=True)) for each in (got, plain, truth)], dtype)


@pytest.mark.parametrize("stage", ["scaled", "capped", "masked", "probs"])
def test_the_scores(stage):
    query, key, _ = heads()
    rules = {"causal": True, "softcap": 2.0, "query_scale": factors(2, 5, dtype=torch.float64), "stage": stage}
    assert_close(attention_scores(query, key, **rules), reference.attention_scores(query, key, **rules))


def test_gradients_of_all_four_and_the_second():
    def call(query, key, value, scale):
        return attention(query, key, value, causal=True, softcap=3.0, q_offset="end", query_scale=scale)

    leaves = [x.requires_grad_() for x in (*heads(q_len=3, kv_len=4), factors(2, 3, dtype=torch.float64))]
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, check_backward_ad=False)


def test_a_factor_of_zero_has_a_gradient():
    tensors = heads()
    scale = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    attention(*tensors, query_scale=scale).square().sum().backward()
    step = 1e-6
    for row in range(5):
        moved = [attention(*tensors, query_scale=scale.detach() + by * torch.eye(5)[row]).square().sum()
                 for by in (step, -step)]  # fmt: skip
        assert_close(scale.grad[row], (moved[0] - moved[1]) / (2 * step), atol=1e-6, rtol=1e-5)


def test_rows_without_keys_have_no_gradient():
    tensors = [x.requires_grad_() for x in (*heads(), factors(5, dtype=torch.float64))]
    out = attention(*tensors[:3], query_scale=tensors[3], kv_lens=torch.tensor([0, 0]))
    assert out.eq(0).all()
    for gradient in torch.autograd.grad(out.sum(), tensors):
        assert gradient.eq(0).all()


@pytest.mark.parametrize("lengths", [[(3, 3), (4, 9)], [(0, 2), (5, 5), (1, 4)]], ids=str)
def test_packed_sequences(lengths):
    ends = [torch.tensor([0, *n]).cumsum(0) for n in zip(*lengths, strict=True)]
    tokens, keys = (int(x[-1]) for x in ends)
    query, key, value = draw(tokens, 4, 8), draw(keys, 2, 8, seed=1), draw(keys, 2, 8, seed=2)
    scale = factors(tokens).requires_grad_()
    out = attention_varlen(query, key, value, *ends, causal=True, query_scale=scale)
    for a, b, c, d in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
        one = [x.transpose(0, 1).unsqueeze(0) for x in (query[a:b], key[c:d], value[c:d])]
        expected = attention(*one, causal=True, q_offset="end", query_scale=scale[a:b])
        assert torch.equal(out[a:b], expected[0].transpose(0, 1))
    assert torch.autograd.grad(out.square().sum(), scale)[0].abs().sum() > 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_one_graph(dynamic):
    compiled = torch.compile(
        lambda q, k, v, s: attention(q, k, v, causal=True, query_scale=s), fullgraph=True, dynamic=dynamic,
        backend="aot_eager",
    )  # fmt: skip
    tensors = [x.requires_grad_() for x in (*heads(torch.float32), factors(5))]
    outs = compiled(*tensors), attention(*tensors[:3], causal=True, query_scale=tensors[3])
    assert torch.equal(*outs)
    assert_close(*[torch.autograd.grad(out.sum(), tensors) for out in outs])


def test_vmap():
    query, key, value = heads()
    scales = factors(3, 5, dtype=torch.float64)
    got = torch.vmap(lambda s: attention(query, key, value, query_scale=s))(scales)
    assert_close(got, torch.stack([attention(query, key, value, query_scale=s) for s in scales]))


def test_a_layer_scales_before_it_rotates():
    tensors, scale = heads(torch.float64, 5, 5), factors(2, 5, dtype=torch.float64)
    rope = attnpack.RotaryEmbedding(8).settings
    out, weights = attnpack.ops.attend(*tensors, rope=rope, causal=True, query_scale=scale, need_weights=True)
    cos, sin = attnpack.ops.rope_table(torch.arange(5), rope.numbers()[0])
    query, key = (reference.apply_rope(x, cos.double(), sin.double()) for x in tensors[:2])
    expected = reference.attention(query, key, tensors[2], causal=True, query_scale=scale)
    assert_close(out, expected.transpose(1, 2).flatten(2), atol=1e-6, rtol=1e-6)
    assert_close(weights, reference.attention_scores(query, key, causal=True, query_scale=scale), atol=1e-6, rtol=1e-6)


WRONG = {
    "three rows": (torch.ones(3), r"query_scale has shape \[3\], wants \[q_len\] or \[batch, q_len\] beside query"),
    "of heads": (torch.ones(4, 5), r"query_scale has shape \[4, 5\], wants"),
    "integers": (torch.ones(5, dtype=torch.int64), "query_scale has dtype Long, wants a float dtype"),
    "elsewhere": (torch.ones(5, device="meta"), "query_scale is on meta, query on cpu: move one of them"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors(case):
    scale, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        attention(*heads(), query_scale=scale)
    with pytest.raises(TypeError, match=r"query_scale is 2.0 \(float\), wants"):
        attention(*heads(), query_scale=2.0)
    with pytest.raises(ValueError, match=r"query_scale has shape \[2, 5\], wants \[tokens\]"):
        packed = [draw(5, 2, 8)] * 3
        attention_varlen(*packed, torch.tensor([0, 5]), query_scale=torch.ones(2, 5))
