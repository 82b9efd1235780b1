"""Settings of any size: offsets saturate, a softcap of any size caps, and no sink makes a row wrong."""

import pytest
import torch
from attnpack import attention, attention_scores, reference
from op_cases import DTYPES, INF, NAN, compute_results, make_inputs
from torch.testing import assert_close

LENGTHS = [(2, 70), (60, 70)]  # decode, prefill
MOST64 = 2**63 - 1
LOOSE = {"rtol": 1e-2, "atol": 1e-2}  # of bf16
MOST = {torch.int64: MOST64, torch.int32: 2**31 - 1}
FAR = 1000  # beyond all keys of this test, so the extremes mean the same


def formula(query, key, value, mask=None, **settings):
    """attention as ATen's formula computes it, which is what torch.func's transforms run."""
    return torch.func.vmap(lambda q: attention(q, key, value, mask, **settings))(query.unsqueeze(0))


@pytest.mark.parametrize("kind", ["int", torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{"causal": True}, {"window": (3, -1)}, {"window": (-1, 2)}, {"window": (3, 2), "causal": True}],
    ids=str,
)
@pytest.mark.parametrize("lengths", LENGTHS, ids=["decode", "prefill"])
def test_offsets_saturate(lengths, settings, kind):
    for off in (0, 1, 60):
        for sign in (1, -1):
            most = MOST.get(kind, MOST64)
            extreme, far = (most - off if sign > 0 else -most - 1 + off), sign * FAR
            inputs = make_inputs(lengths=lengths)
            inputs.settings = settings | {"q_offset": far}
            expected = compute_results(attention, inputs)
            scores = attention_scores(inputs.query, inputs.key, **inputs.settings)
            inputs.settings["q_offset"] = extreme if kind == "int" else torch.tensor([extreme] * 2, dtype=kind)
            for name, got in compute_results(attention, inputs).items():
                assert torch.equal(got, expected[name]), name
            assert torch.equal(attention_scores(inputs.query, inputs.key, **inputs.settings), scores)
            arguments = inputs.query, inputs.key, inputs.value
            assert_close(formula(*arguments, **inputs.settings)[0], expected["out"])
            assert_close(reference.attention(*arguments, **inputs.settings), expected["out"])


# Offset, left and right window; a window that is shorter or longer by one changes the attended keys.
EDGES = [
    (MOST64, 2**62, 0),
    (-MOST64 - 1, 0, 2**62),
    (MOST64, MOST64, 0),
    (MOST64, MOST64 - 3, 2),
    (-MOST64, 1, MOST64),
    (-MOST64 - 1, 1, MOST64),
    (2**61 + 3, 2**61 + 1, -1),
    (-(2**61) - 3, -1, 2**61 + 40),
    (2**60, 2**62, 2**62),
    (2**60 + 5, 2**60 + 2, 2**60),
    (2**59 + 1, 2**62, 0),
    (-(2**59) - 1, 0, 2**62),
    (5, 2**62, MOST64),
    (-3, MOST64, 2),
]


@pytest.mark.parametrize("edge", EDGES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=["decode", "prefill"])
def test_offsets_and_windows_are_numbers_of_any_size(lengths, edge):
    """Against Python's integers."""
    offset, left, right = edge
    inputs = make_inputs(lengths=lengths)
    arguments = inputs.query, inputs.key, inputs.value
    rows, columns = (range(length) for length in lengths)
    allowed = torch.tensor(
        [
            [(left < 0 or offset + i - j <= left) and (right < 0 or j - i - offset <= right) for j in columns]
            for i in rows
        ]
    )
    expected = reference.attention(*arguments, allowed)
    for q_offset in (offset, torch.tensor([offset] * 2)):
        settings = {"q_offset": q_offset, "window": (left, right)}
        for attend in (attention, reference.attention, lambda *a, **s: formula(*a, **s)[0]):
            assert_close(attend(*arguments, **settings), expected)
        assert torch.equal(attention_scores(*arguments[:2], **settings) > 0, allowed.expand(2, 4, -1, -1))
    mixed = attention(*arguments, q_offset=torch.tensor([offset, 0]), window=(left, right))
    assert_close(mixed[0], expected[0])
    assert_close(mixed[1], attention(*arguments, window=(left, right))[1])


@pytest.mark.parametrize("chunk", [1, 7, 2**31 + 1, 2**58 + 3, 2**59])
@pytest.mark.parametrize("lengths", LENGTHS, ids=["decode", "prefill"])
def test_offsets_and_chunks_are_numbers_of_any_size(lengths, chunk):
    """Against Python's integers."""
    inputs = make_inputs(lengths=lengths)
    arguments = inputs.query, inputs.key, inputs.value
    for offset in (0, -3, chunk - 2, -chunk - 2, chunk, 2**59 - 2, -(2**59) - 2, 2**61 + 1, MOST64, -MOST64 - 1):
        rows = [min(offset, MOST64 - lengths[0]) + i for i in range(lengths[0])]
        allowed = torch.tensor([[row // chunk == j // chunk for j in range(lengths[1])] for row in rows])
        expected = reference.attention(*arguments, allowed)
        for q_offset in (offset, torch.tensor([offset] * 2)):
            settings = {"q_offset": q_offset, "chunk": chunk}
            for attend in (attention, lambda *a, **s: formula(*a, **s)[0]):
                assert_close(attend(*arguments, **settings), expected)
            assert torch.equal(attention_scores(*arguments[:2], **settings) > 0, allowed.expand(2, 4, -1, -1))


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1.7e38), (torch.bfloat16, -1.7e38), (torch.float64, 1e300)]
)
@pytest.mark.parametrize("lengths", LENGTHS, ids=["decode", "prefill"])
def test_the_greatest_scales_keep_finite_scores_finite(lengths, dtype, scale):
    """Scores of 0, and one finite score far above them."""
    inputs = make_inputs(dtype, lengths=lengths)
    query, key = torch.zeros_like(inputs.query), torch.zeros_like(inputs.key)
    mean = inputs.value.double().mean(2, keepdim=True).repeat_interleave(2, 1)
    assert_close(
        attention(query, key, inputs.value, scale=scale).double(), mean.expand(-1, -1, lengths[0], -1), **LOOSE
    )
    query[..., 0], key[:, :, 3, 0] = 1, 0.5 if scale > 0 else -0.5
    chosen = inputs.value[:, :, 3:4].repeat_interleave(2, 1).expand(-1, -1, lengths[0], -1)
    assert_close(attention(query, key, inputs.value, scale=scale), chosen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=["decode", "prefill"])
def test_huge_scores_choose_the_largest(lengths, dtype):
    """Products that are rounded: a score minus its rounded maximum would be far above 0."""
    inputs = make_inputs(dtype, lengths=lengths)
    query, key = torch.zeros_like(inputs.query), torch.zeros_like(inputs.key)
    query[..., 0], key[:, :, 3, 0], key[:, :, 5, 0] = 1.3, 0.7, 0.4
    chosen = inputs.value[:, :, 3:4].repeat_interleave(2, 1).expand(-1, -1, lengths[0], -1)
    for scale in (1.1e10, 3.3e12, 7.7e15):
        assert torch.equal(attention(query, key, inputs.value, scale=scale), chosen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 3, 70])
def test_weights_in_gradients_of_huge_scores_are_1_at_most(length, dtype):
    """The backward pass forms the scores anew. Where they are huge, the rounding of one may exceed lse by thousands."""
    torch.manual_seed(0)
    given = [torch.randn(1, 2, n, 64).to(dtype).requires_grad_() for n in (length, 700, 700)]
    for scale in (1e5, 1e9, 1e15):
        out = attention(*given, scale=scale)
        grads = torch.autograd.grad(out, given, torch.ones_like(out))
        assert dtype == torch.float16 or all(grad.isfinite().all() for grad in grads)  # fp16 ends at 65504
        assert grads[2].max() <= length * 1.01


@pytest.mark.parametrize("softcap", [1e-300, 1e-45, 1e-40, 1e-30, 1e30, 1e39, 1e300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=["decode", "prefill"])
def test_a_softcap_of_any_size(lengths, dtype, softcap):
    """Against fp64, in which these caps are ordinary numbers. Some scores are exactly 0, some are large."""
    inputs = make_inputs(dtype, lengths=lengths, scores={"softcap": softcap})
    inputs.query[:, :, 0] = 0
    inputs.query[:, :, 1] *= 8
    ours, truth = compute_results(attention, inputs), compute_results(reference.attention, inputs.to(torch.float64))
    bound = 32 * torch.finfo(dtype).eps
    for name, exact in truth.items():
        assert_close(ours[name].double(), exact, atol=bound * max(1, exact.abs().max().item()), rtol=0)
    arguments = inputs.query, inputs.key, inputs.value
    assert_close(formula(*arguments, softcap=softcap)[0], ours["out"], atol=4 * bound, rtol=4 * bound)
    capped = attention_scores(*arguments[:2], softcap=softcap, stage="capped").double()
    exact = reference.attention_scores(*(x.double() for x in arguments[:2]), softcap=softcap, stage="capped")
    assert_close(capped, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_softcap_far_below_the_scale(dtype):
    inputs = make_inputs(dtype, lengths=(60, 70))
    settings = {"softcap": 1e-25, "scale": 1e30}
    for x in (inputs.query, inputs.query * 0):
        out = attention(x, inputs.key, inputs.value, **settings)
        assert_close(out, attention(x * 0, inputs.key, inputs.value))


@pytest.mark.parametrize("softcap", [1e-40, 1e39])
def test_the_gradient_of_the_formula_under_a_softcap_of_any_size(softcap):
    inputs = make_inputs(torch.float32)
    inputs.query[:, :, 0] = 0

    def loss(query, attend, *others):
        return attend(query, *others, softcap=softcap).square().sum()

    others = inputs.key, inputs.value
    got = torch.func.grad(loss)(inputs.query, attention, *others)
    exact = torch.func.grad(loss)(inputs.query.double(), reference.attention, *(x.double() for x in others))
    assert_close(got.double(), exact, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=["decode", "prefill"])
def test_a_row_without_keys_is_zero_whatever_its_sink_is(lengths, dtype):
    sinks = torch.tensor([INF, NAN, -INF, 3.0], dtype=dtype)
    for settings in ({"kv_lens": torch.tensor([0, 0])}, {"causal": True, "q_offset": -1000}, {"mask": "none"}):
        inputs = make_inputs(dtype, lengths=lengths)
        if settings.pop("mask", None):
            inputs.mask = torch.full(lengths, -INF, dtype=dtype)
        inputs.settings = settings | {"sinks": sinks}
        results = compute_results(attention, inputs)
        expected = sinks.to(results["lse"].dtype).view(4, 1).expand(2, 4, lengths[0])
        assert_close(results["lse"], expected, equal_nan=True, atol=0, rtol=0)
        for name in results.keys() - {"lse", "grad of sinks"}:
            assert (results[name] == 0).all(), name
        arguments = inputs.query, inputs.key, inputs.value, inputs.mask
        assert (formula(*arguments, **inputs.settings) == 0).all()


@pytest.mark.parametrize("lengths", LENGTHS, ids=["decode", "prefill"])
def test_a_sink_gets_no_nan_from_rows_without_keys(lengths):
    """The sink's gradient is that of lse, because lse is the sink itself in such a row."""
    inputs = make_inputs(lengths=lengths)
    sinks = torch.tensor([INF, NAN, 0.0, 3.0], requires_grad=True)
    none = {"kv_lens": torch.tensor([0, 0])}
    out, lse = attention(inputs.query, inputs.key, inputs.value, sinks=sinks, return_lse=True, **none)
    assert torch.autograd.grad(out.sum(), sinks, retain_graph=True)[0].eq(0).all()
    assert_close(
        torch.autograd.grad(lse[:, [0, 2, 3]].sum(), sinks)[0], lengths[0] * torch.tensor([2.0, 0.0, 2.0, 2.0])
    )


def test_a_sink_of_nan_reaches_the_rows_that_have_keys():
    inputs = make_inputs()
    sinks = torch.tensor([0.0, NAN, 0.0, 0.0])
    out = attention(inputs.query, inputs.key, inputs.value, sinks=sinks, kv_lens=torch.tensor([7, 0]))
    assert out[0, 1].isnan().all() and out[0, ::2].isfinite().all() and (out[1] == 0).all()


@pytest.mark.parametrize("length", [1, 3, 40], ids="rows_{}".format)
@pytest.mark.parametrize("head_dim", [32, 40])
def test_subnormal_outputs_are_kept(head_dim, length):
    """The processor's own rounding to bf16 would write 0."""
    query, key = torch.zeros(1, 2, length, head_dim).bfloat16(), torch.zeros(1, 2, 2, head_dim).bfloat16()
    value = torch.zeros(1, 2, 2, head_dim).bfloat16()
    value[:, :, 0] = 1.5 * 2.0**-126
    value[:, 1, 0, 5:] = 3.0  # also beside normal numbers
    assert torch.equal(attention(query, key, value), (value.float().mean(2, keepdim=True)).expand_as(query).bfloat16())
