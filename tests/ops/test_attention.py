"""The operator's forward: values against the reference, what each argument means, layouts, memory."""

import pytest
import torch
import torch.nn.functional as F
from attnpack import attention, attention_scores, reference
from op_cases import (
    COVERING,
    DTYPES,
    EMPTY,
    INF,
    check_against_reference,
    compute_results,
    describe,
    draw,
    laid_out,
    make_empty,
    make_inputs,
)
from processes import run_python
from torch.testing import assert_close

LAYOUTS = ["heads inside", "sliced", "offset", "columns outside"]


@pytest.mark.parametrize("case", COVERING, ids=describe)
def test_error_is_at_most_twice_plain_pytorchs(case):
    check_against_reference(make_inputs(**case), gradients=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "lengths, dims",
    [
        ((40, 8300), (4, 4)),  # more keys than can stay packed between tiles
        ((40, 300), (200, 100)),  # heads too wide for blocks of 256 keys,
        ((40, 300), (300, 260)),  # and of 128
        ((1, 513), (128, 128)),  # one key in the second range of a decode
        ((2, 1537), (256, 40)),
        ((100, 1), (8, 8)),
    ],
)
def test_sizes_at_which_the_kernels_work_otherwise(lengths, dims, dtype):
    check_against_reference(make_inputs(dtype, "mqa", lengths, dims, positions={"q_offset": 8200, "causal": True}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 100), (33, 272)], ids=str)
def test_each_number_of_rows_that_stream_the_keys(dims, dtype):
    for rows in range(1, 27):
        inputs = make_inputs(dtype, "mha", (rows, 530), dims, positions={"causal": True, "q_offset": 510})
        check_against_reference(inputs, gradients=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [(2, 70), (50, 70)], ids=["decode", "prefill"])
def test_layout_changes_no_bit(layout, lengths, dtype):
    inputs = make_inputs(dtype, "gqa", lengths, (24, 17), scores={"softcap": 3.0})
    expected = compute_results(attention, inputs)
    for name in ("query", "key", "value"):
        setattr(inputs, name, laid_out(getattr(inputs, name), layout))
    for name, got in compute_results(attention, inputs).items():
        assert torch.equal(got, expected[name]), name


@pytest.mark.parametrize("repeated", ["expanded batch", "expanded heads"])
def test_stride_zero_changes_no_bit(repeated):
    inputs = make_inputs(layout=repeated, lengths=(40, 70))
    expected = attention(*(x.contiguous() for x in (inputs.query, inputs.key, inputs.value)))
    assert inputs.key.stride()[0 if repeated == "expanded batch" else 1] == 0
    assert torch.equal(attention(inputs.query, inputs.key, inputs.value), expected)


def test_offsets_beyond_32_bits():
    """Rows lie 2^31 elements apart; the memory between them is not touched, so the system does not provide it."""
    far = torch.empty(2**31 + 1024, dtype=torch.bfloat16)
    small = make_inputs(torch.bfloat16, "one", (2, 2), (8, 8), batch=1)
    for axis in ("row", "batch"):
        spread = []
        for n, x in enumerate((small.query, small.key, small.value)):
            x = x if axis == "row" else x.transpose(0, 2)  # [2, 1, 1, 8]
            strides = (0, 0, 2**31, 1) if axis == "row" else (2**31, 0, 0, 1)
            spread.append(far.as_strided(x.shape, strides, 64 * n).copy_(x))
        assert torch.equal(attention(*spread), attention(*(x.contiguous() for x in spread)))


def test_out_is_contiguous_if_query_is_and_else_stored_with_heads_inside():
    inputs = make_inputs()
    query, key, value = (x.contiguous() for x in (inputs.query, inputs.key, inputs.value))
    assert attention(query, key, value).is_contiguous()
    for laid in (query.transpose(1, 2).contiguous().transpose(1, 2), query.transpose(2, 3).contiguous().mT):
        assert attention(laid, key, value).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_of_out_and_lse(dtype):
    inputs = make_inputs(dtype)
    out, lse = attention(inputs.query, inputs.key, inputs.value, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("size", [1.0, 2.0**-22], ids=["normal", "subnormal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [(1, 4), (50, 4)], ids=["decode", "prefill"])
def test_out_is_rounded_to_nearest_even(lengths, dtype, size):
    """The mean of four values of one size is exact in fp32, and often halfway between two numbers of the low dtype."""
    value = ((1 + torch.rand(1, 1, 4, 500, generator=torch.Generator().manual_seed(0))) * size).to(dtype)
    q, k = torch.zeros(1, 1, lengths[0], 8, dtype=dtype), torch.zeros(1, 1, 4, 8, dtype=dtype)
    expected = value.float().mean(2, True).to(dtype)
    assert torch.equal(attention(q, k, value), expected.expand(-1, -1, lengths[0], -1))


# ---- heads ---------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(3, 600), (40, 70)], ids=["decode", "prefill"])
@pytest.mark.parametrize("head_map", [[0, 0, 1, 1], [1, 0, 1, 0], [2, 2, 2, 2], [0, 2, 2, 1]])
def test_head_map_equals_heads_repeated_by_it(head_map, lengths):
    q, k, v = draw(2, 4, lengths[0], 8), draw(2, 3, lengths[1], 8, seed=1), draw(2, 3, lengths[1], 5, seed=2)
    assert_close(attention(q, k, v, head_map=head_map), attention(q, k[:, head_map], v[:, head_map]))


def test_consecutive_query_heads_share_a_kv_head():
    q, k, v = draw(1, 6, 5, 8), draw(1, 2, 7, 8, seed=1), draw(1, 2, 7, 8, seed=2)
    assert torch.equal(attention(q, k, v), attention(q, k, v, head_map=[0, 0, 0, 1, 1, 1]))


# ---- masks ---------------------------------------------------------------------------

SHAPES = [(), (1,), (11,), (9, 1), (9, 11), (4, 1, 1), (4, 9, 11)]
SHAPES += [(1, 1, 1, 11), (2, 1, 1, 11), (2, 1, 9, 1), (2, 4, 9, 11)]


@pytest.mark.parametrize("dtype", [torch.bool, *DTYPES], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mask_broadcasts_from_the_right(shape, dtype):
    inputs = make_inputs(torch.float32, lengths=(9, 11))
    mask = draw(*shape, seed=3)
    mask = mask > -1 if dtype == torch.bool else mask.to(dtype)
    whole = mask.expand(2, 4, 9, 11).contiguous()
    arguments = inputs.query, inputs.key, inputs.value
    out = attention(*arguments, mask)
    assert torch.equal(out, attention(*arguments, whole))
    assert_close(out, reference.attention(*arguments, mask))
    if dtype == torch.bool:
        return
    mask.requires_grad_(), whole.requires_grad_()
    (grad,), (whole_grad,) = (torch.autograd.grad(attention(*arguments, m).square().sum(), m) for m in (mask, whole))
    assert grad.shape == mask.shape and grad.dtype == dtype
    tolerance = 0.02 if dtype in (torch.bfloat16, torch.float16) else 1e-5
    assert_close(grad, whole_grad.sum_to_size(mask.shape), atol=tolerance, rtol=tolerance)


def test_true_means_may_attend():
    q, k, v = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 3, 2), torch.tensor([1.0, 10, 100]).view(1, 1, 3, 1)
    assert attention(q, k, v, torch.tensor([True, False, True])).item() == 50.5


def test_the_smallest_finite_number_does_not_exclude():
    inputs = make_inputs(lengths=(2, 5))
    mask = torch.full((2, 5), torch.finfo(torch.float32).min)
    out = attention(inputs.query, inputs.key, inputs.value, mask)
    assert_close(out[:, 0], inputs.value[:, 0].mean(1, True).expand(2, 2, 6))


def test_mask_is_read_in_the_accumulation_dtype():
    """-1e300 is -inf in fp32, so it excludes a key in fp32 but not in fp64."""
    mask = torch.full((5, 7), -1e300, dtype=torch.float64)
    for dtype, lse in ((torch.float32, -INF), (torch.float64, -1e300)):
        inputs = make_inputs(dtype)
        assert (attention(inputs.query, inputs.key, inputs.value, mask, return_lse=True)[1] == lse).all()


# ---- positions -----------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (40, 70)])
def test_causal_is_top_left_as_in_sdpa(lengths):
    inputs = make_inputs(heads="mha", lengths=lengths)
    arguments = inputs.query, inputs.key, inputs.value
    assert_close(attention(*arguments, causal=True), F.scaled_dot_product_attention(*arguments, is_causal=True))


def test_causal_composes_with_a_mask():
    inputs = make_inputs(lengths=(40, 70))
    mask = draw(40, 70) > 0
    lower = torch.ones(40, 70, dtype=torch.bool).tril(3)
    arguments = inputs.query, inputs.key, inputs.value
    assert torch.equal(attention(*arguments, mask, causal=True, q_offset=3), attention(*arguments, mask & lower))


@pytest.mark.parametrize("kv_lens", [None, torch.tensor([7, 3]), torch.tensor([9, 0], dtype=torch.int32)])
def test_end_puts_the_last_row_at_the_last_valid_key(kv_lens):
    inputs = make_inputs(lengths=(4, 9))
    valid = torch.tensor([9, 9]) if kv_lens is None else kv_lens
    settings = {"causal": True, "window": (2, -1), "kv_lens": kv_lens}
    arguments = inputs.query, inputs.key, inputs.value
    end = attention(*arguments, q_offset="end", **settings)
    assert torch.equal(end, attention(*arguments, q_offset=valid - 4, **settings))
    for b in range(2):  # and each sequence as an int
        one = {**settings, "kv_lens": None if kv_lens is None else kv_lens[b : b + 1]}
        alone = attention(*(x[b : b + 1] for x in arguments), q_offset=int(valid[b]) - 4, **one)
        assert torch.equal(end[b : b + 1], alone)


def test_a_window_of_w_tokens_with_self_is_left_w_minus_1():
    inputs = make_inputs(lengths=(12, 12))
    probs = attention_scores(inputs.query, inputs.key, causal=True, window=(3, -1))
    assert ((probs > 0).sum(-1) == torch.arange(1, 13).clamp(max=4)).all()


@pytest.mark.parametrize("lengths", [(2, 1100), (64, 300)], ids=["decode", "prefill"])
@pytest.mark.parametrize("window", [(0, 0), (5, 0), (0, 5), (1, 2), (600, 600)])
@pytest.mark.parametrize("q_offset", [-60, 0, 130, 255, 256, 511, 512, 1098, 2000])
def test_window_edges_wherever_it_stands(q_offset, window, lengths):
    inputs = make_inputs(heads="mqa", lengths=lengths, positions={"q_offset": q_offset, "window": window})
    ours, theirs = (compute_results(attend, inputs, gradients=False) for attend in (attention, reference.attention))
    assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [(2, 1100), (64, 300)], ids=["decode", "prefill"])
@pytest.mark.parametrize("chunk", [1, 2, 100, 256, 257, 1024, 5000])
@pytest.mark.parametrize("q_offset", [-60, 0, 255, 256, 511, 1098, 2000])
@pytest.mark.parametrize("causal", [False, True])
def test_chunk_edges_wherever_they_stand(q_offset, chunk, lengths, causal):
    positions = {"q_offset": q_offset, "chunk": chunk, "causal": causal}
    inputs = make_inputs(heads="mqa", lengths=lengths, positions=positions)
    ours, theirs = (compute_results(attend, inputs, gradients=False) for attend in (attention, reference.attention))
    assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_window_as_wide_as_an_integer_is_no_window():
    inputs = make_inputs(lengths=(40, 70))
    arguments = inputs.query, inputs.key, inputs.value
    widest = torch.iinfo(torch.int64).max
    assert torch.equal(attention(*arguments, window=(widest, widest), q_offset=3), attention(*arguments))


def test_keys_beyond_kv_lens_are_as_if_they_were_not_there():
    inputs = make_inputs(lengths=(40, 70))
    lens = torch.tensor([70, 33])
    out = attention(inputs.query, inputs.key, inputs.value, kv_lens=lens)
    for b, n in enumerate(lens):
        alone = attention(inputs.query[b, None], inputs.key[b, None, :, :n], inputs.value[b, None, :, :n])
        assert torch.equal(out[b, None], alone)


# ---- scores --------------------------------------------------------------------------


def test_scale_defaults_to_the_inverse_root_of_head_dim():
    inputs = make_inputs(dims=(9, 9))
    arguments = inputs.query, inputs.key, inputs.value
    assert torch.equal(attention(*arguments), attention(*arguments, scale=1 / 3))


@pytest.mark.parametrize("heads, lengths", [("gqa", (2, 1500)), ("gqa", (40, 700))], ids=["decode", "prefill"])
@pytest.mark.parametrize("order", ["rising", "falling", "late peak"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_maxima_that_move_from_block_to_block(dtype, order, heads, lengths):
    """The online softmax must rescale its sums: scores of +-200 would overflow otherwise."""
    inputs = make_inputs(dtype, heads, lengths, (1, 4), scores={"scale": 1.0})
    kv_len = lengths[1]
    scores = torch.linspace(-200, 200, kv_len) if order != "late peak" else torch.zeros(kv_len)
    scores = scores.flip(0) if order == "falling" else scores
    if order == "late peak":
        scores[-1] = 150.0
    inputs.query = torch.ones_like(inputs.query)
    inputs.key = scores.to(dtype).view(1, 1, -1, 1).expand(inputs.key.shape)
    check_against_reference(inputs)


def test_an_extreme_score_is_no_overflow():
    q = torch.tensor([[[[1e4]]]])
    out, lse = attention(
        q, torch.tensor([[[[1.0], [-1.0]]]]), torch.tensor([[[[3.0], [5.0]]]]), scale=1e3, return_lse=True
    )
    assert out.item() == 3 and lse.item() == 1e7


@pytest.mark.parametrize("lengths", [(2, 70), (200, 300)], ids=["decode", "prefill"])
def test_a_scale_below_zero_is_that_of_the_opposite_query(lengths):
    """With a negative scale the smallest product gives the largest score; the other products must not overflow."""
    q, k, v = draw(1, 2, lengths[0], 8) * 100, draw(1, 2, lengths[1], 8, seed=1), draw(1, 2, lengths[1], 8, seed=2)
    assert_close(attention(q, k, v, scale=-1.5), attention(-q, k, v, scale=1.5))


def test_lse_is_the_log_of_the_denominator():
    inputs = make_inputs(
        torch.float64, lengths=(40, 70), scores={"softcap": 2.0, "alibi": True}, positions={"causal": True}
    )
    settings = inputs.settings
    masked = attention_scores(inputs.query, inputs.key, stage="masked", **settings)
    lse = attention(inputs.query, inputs.key, inputs.value, return_lse=True, **settings)[1]
    assert_close(lse, masked.logsumexp(-1))
    sinks = draw(4, dtype=torch.float64)
    lse = attention(inputs.query, inputs.key, inputs.value, return_lse=True, sinks=sinks, **settings)[1]
    assert_close(lse, torch.logaddexp(masked.logsumexp(-1), sinks.view(4, 1)))


@pytest.mark.parametrize("lengths", [(2, 7), (50, 7)], ids=["decode", "prefill"])
def test_a_row_without_keys_gives_zero_and_minus_infinity_or_the_sink(lengths):
    inputs = make_inputs(lengths=lengths)
    sinks = torch.tensor([0.5, -INF, 3.0, -100.0])
    for settings in ({"kv_lens": torch.tensor([0, 7])}, {"causal": True, "q_offset": torch.tensor([-100, 0])}):
        for given, expected in ((None, torch.full((4,), -INF)), (sinks, sinks)):
            out, lse = attention(inputs.query, inputs.key, inputs.value, sinks=given, return_lse=True, **settings)
            assert (out[0] == 0).all() and out[1].abs().sum() > 0
            assert torch.equal(lse[0], expected.view(4, 1).expand(4, lengths[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks_and_slopes_of_any_float_dtype(dtype):
    inputs = make_inputs()
    arguments = inputs.query, inputs.key, inputs.value
    few = {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "alibi_slopes": torch.tensor([0.5, 0.25, 1.0, 0.0])}
    assert torch.equal(attention(*arguments, **few), attention(*arguments, **{k: x.to(dtype) for k, x in few.items()}))


@pytest.mark.parametrize("stage", ["scaled", "capped", "masked", "probs"])
@pytest.mark.parametrize("heads", ["gqa", "uneven"])
@pytest.mark.parametrize("mask", [None, "bool", "own -inf"])
def test_scores_at_each_stage(stage, heads, mask):
    scores = {"softcap": 0.7, "sinks": True, "alibi": True}
    inputs = make_inputs(
        torch.float64, heads, (5, 9), mask=mask, positions={"causal": True}, kv_lens=torch.int64, scores=scores
    )
    ours, theirs = (
        f(inputs.query, inputs.key, inputs.mask, stage=stage, **inputs.settings)
        for f in (attention_scores, reference.attention_scores)
    )
    assert_close(ours, theirs)


def test_probs_times_value_is_attention():
    inputs = make_inputs(torch.float64, "mha", (5, 9), mask="own", scores={"sinks": True})
    probs = attention_scores(inputs.query, inputs.key, inputs.mask, **inputs.settings)
    out = attention(inputs.query, inputs.key, inputs.value, inputs.mask, **inputs.settings)
    assert_close(out, probs @ inputs.value)
    assert (probs.sum(-1) < 1).all()  # the sink has the rest of the probability


# ---- edges ---------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("empty", EMPTY)
def test_empty_dimensions_forward_and_backward(empty, prefill):
    q, k, v = (x.requires_grad_() for x in make_empty(empty, q_len=50 if prefill else 3))
    mask = draw(*q.shape[:3], k.size(2)).requires_grad_()
    sinks = draw(q.size(1)).requires_grad_()
    leaves = (q, k, v, mask, sinks)
    settings = {"causal": True, "q_offset": 2, "kv_lens": torch.full((q.size(0),), k.size(2) // 2)}
    results = []
    for attend in (attention, reference.attention):
        out, lse = attend(q, k, v, mask, sinks=sinks, return_lse=True, scale=0.5, **settings)
        grads = torch.autograd.grad(out.sum() + lse.sum(), leaves, allow_unused=True)
        results.append(
            (out, lse, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)))
        )
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs)


def test_without_head_dim_all_scores_are_zero():
    v = draw(2, 2, 5, 6)
    out = attention(torch.empty(2, 4, 3, 0), torch.empty(2, 2, 5, 0), v)
    assert_close(out, v.mean(2, True).repeat_interleave(2, 1).expand(2, 4, 3, 6))


@pytest.mark.parametrize("backward", [False, True])
def test_prefill_holds_no_matrix_of_scores(backward):
    """Peak memory of a call with L = 8192, minus that of a small call: q, k, v and gradients take 4 MB, the scores
    would take 268."""
    code = f"""
import resource, torch, attnpack
torch.set_num_threads(2)
def peak(length):
    q, k, v = (torch.randn(1, 1, length, 16, requires_grad={backward}) for _ in range(3))
    out = attnpack.attention(q, k, v, causal=True)
    if {backward}:
        out.sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small = peak(256)
print(peak(8192) - small)
"""
    process = run_python(code)
    assert process.returncode == 0, process.text
    assert int(process.stdout) < 48 * 1024  # KiB


@pytest.mark.parametrize("q_len, backward", [(1, False), (128, False), (128, True)])
def test_shared_keys_and_values_are_not_repeated(q_len, backward):
    """Peak memory of 64 heads on one key-value head of 8 MB, minus that of one head: repeated they would take 1 GB."""
    code = f"""
import resource, torch, attnpack
torch.set_num_threads(2)
k, v = (torch.randn(1, 1, 32768, 64, requires_grad={backward}) for _ in range(2))
def peak(heads):
    out = attnpack.attention(torch.randn(1, heads, {q_len}, 64), k, v)
    if {backward}:
        out.sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
one = peak(1)
print(peak(64) - one)
"""
    process = run_python(code)
    assert process.returncode == 0, process.text
    assert int(process.stdout) < 48 * 1024  # KiB


def test_autocast_casts_query_key_and_value():
    inputs = make_inputs(mask="own", scores={"sinks": True})
    q = inputs.query.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, inputs.key.bfloat16(), inputs.value, inputs.mask, **inputs.settings)
        scores = attention_scores(inputs.query, inputs.key)
    expected = attention(*(x.bfloat16() for x in (q, inputs.key, inputs.value)), inputs.mask, **inputs.settings)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32
    assert_close(scores, attention_scores(inputs.query, inputs.key))  # scores for study are never in a low dtype


def test_inference_mode_and_no_grad():
    inputs = make_inputs()
    q = inputs.query.clone().requires_grad_()
    expected = attention(inputs.query, inputs.key, inputs.value)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            out = attention(q, inputs.key, inputs.value)
        assert torch.equal(out, expected) and not out.requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, width, v_width", [(5, 24, 20), (16, 80, 64), (100, 200, 160), (16, 32, 32)])
def test_values_may_be_columns_of_the_keys(dtype, heads, width, v_width):
    """Values are the first columns of the keys, as in absorbed latent attention; excluded keys hold NaN."""
    query, key = draw(2, heads, 1, width, dtype=dtype), draw(2, 1, 150, width, dtype=dtype)
    kv_lens = torch.tensor([150, 67])
    key[1, :, 67:] = float("nan")
    value = key[..., :v_width]
    out = attention(query, key, value, kv_lens=kv_lens)
    assert torch.equal(out, attention(query, key, value.clone(), kv_lens=kv_lens))
    assert not out.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_may_begin_where_the_keys_do_and_go_on_elsewhere(dtype):
    """In one memory, keys are every second row and values every row."""
    query, room = draw(2, 16, 1, 40, dtype=dtype), draw(2, 1, 300, 40, dtype=dtype)
    key, value = room[:, :, ::2], room[:, :, :150, :32]
    assert key.data_ptr() == value.data_ptr()
    assert torch.equal(attention(query, key, value), attention(query, key.clone(), value.clone()))


@pytest.mark.parametrize("q_len", [1, 200], ids=["decode", "prefill"])
def test_one_value_for_all_keys_comes_out_as_it_is(q_len):
    """If weights are rounded to bf16, the result is divided by the sum of the rounded weights. All but one of these
    weights round up by nearly half a bf16 epsilon; with the unrounded sum the result would keep this error."""
    weight = torch.full((1, 600), 0.5 * (1 + 2**-8 + 2**-12)).log()
    weight[0, 0] = 0
    q, k = (torch.zeros(1, 1, n, 16, dtype=torch.bfloat16) for n in (q_len, 600))
    v = torch.full((1, 1, 600, 16), 1.8984375, dtype=torch.bfloat16)
    assert (attention(q, k, v, weight) == v[0, 0, 0, 0]).all()
