"""key_index: the keys that each row may attend, by number or in blocks."""

from __future__ import annotations

import pytest
import torch
from attnpack import attention, attention_scores, reference
from attnpack.tools.threads import threads
from marks import grid, long
from op_cases import (
    AXES,
    DTYPES,
    INF,
    NAMES,
    NAN,
    at_names,
    check_against_reference,
    compute_results,
    covering,
    describe,
    draw,
    make_inputs,
)
from torch.testing import assert_close

NAMED = list(covering(AXES | {"names": NAMES}))


@pytest.mark.parametrize("case", NAMED, ids=describe)
def test_error_is_at_most_twice_that_of_a_dense_mask_in_plain_pytorch(case):
    check_against_reference(make_inputs(**case), gradients=case["dtype"].itemsize > 2)


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [
        (torch.bfloat16, (1, 600)),
        (torch.float16, (1, 600)),
        (torch.bfloat16, (70, 300)),
        long(torch.float16, (70, 300)),
        long(torch.bfloat16, (3, 9000)),
        long(torch.float16, (3, 9000)),
    ],
    ids=str,
)
def test_gradients_of_half_precision(dtype, lengths, names):
    check_against_reference(make_inputs(dtype, "gqa", lengths, (16, 24), names=names, positions={"causal": True,
                                        "q_offset": "end"}))  # fmt: skip


def rows_alone(inputs, gradients=True):
    """The results of each row as a call of its own for each kv head, over its allowed keys, gathered in rising order;
    and the sums of the gradients of keys and values over the rows, in their order."""
    s = dict(inputs.settings)
    index, block, window = s.pop("key_index"), s.pop("key_block"), s.pop("window", (-1, -1))
    causal, offset, lens = s.pop("causal", False), s.pop("q_offset", 0), s.pop("kv_lens", None)
    query, key, value, mask = inputs.query, inputs.key, inputs.value, inputs.mask
    batch, heads, q_len, _ = query.shape
    group, kv_len = heads // key.size(1), key.size(2)
    sinks = s.pop("sinks", None)
    wide = torch.promote_types(query.dtype, torch.float32)
    results = {"out": torch.zeros(*query.shape[:3], value.size(3), dtype=query.dtype)}
    results["lse"] = torch.zeros(batch, heads, q_len, dtype=wide)
    results["grad of query"] = torch.zeros_like(query)
    results |= {f"grad of {n}": torch.zeros(x.shape, dtype=wide) for n, x in (("key", key), ("value", value))}
    for b in range(batch):
        for h in range(key.size(1)):
            for i in range(q_len):
                at = i + (offset if isinstance(offset, int) else int(offset[b]))
                named = {int(n) for n in index[b, min(h, index.size(1) - 1), i] if n >= 0}
                keys = [
                    j
                    for j in range(kv_len if lens is None else int(lens[b]))
                    if j // block in named
                    and (not causal or j <= at)
                    and (window[0] < 0 or j >= at - window[0])
                    and (window[1] < 0 or j <= at + window[1])
                ]
                own = slice(h * group, h * group + group)
                row = [
                    query[b : b + 1, own, i : i + 1],
                    key[b : b + 1, h : h + 1, keys],
                    value[b : b + 1, h : h + 1, keys],
                ]
                row = [x.detach().requires_grad_(gradients) for x in row]
                rules = dict(s) if sinks is None else {**s, "sinks": sinks[own]}
                if mask is not None:
                    full = mask.expand(batch, heads, q_len, kv_len)
                    rules["mask"] = full[b : b + 1, own, i : i + 1][..., keys]
                out, lse = attention(*row, return_lse=True, **rules)
                results["out"][b, own, i], results["lse"][b, own, i] = out[0, :, 0].detach(), lse[0, :, 0].detach()
                if not gradients:
                    continue
                upstream = inputs.grad_out[b : b + 1, own, i : i + 1], inputs.grad_lse[b : b + 1, own, i : i + 1]
                grads = torch.autograd.grad((out, lse), row, upstream)
                results["grad of query"][b, own, i] = grads[0][0, :, 0]
                for name, grad in zip(("key", "value"), grads[1:], strict=True):
                    results[f"grad of {name}"][b, h, keys] += grad[0, 0]
    return results


RULES = {
    "no rule": {},
    "ranges": {"positions": {"causal": True, "q_offset": "tensor", "window": (150, -1)}, "kv_lens": torch.int64},
    "mask": {"mask": "own -inf", "scores": {"softcap": 2.0, "sinks": True}},
    "padding": {"mask": "bool padding", "scores": {"scale": -0.3}},
}


@grid(4, dtype=DTYPES, lengths=[(1, 40), (3, 1300), (40, 70)], names=NAMES, rules=RULES)
def test_each_row_has_the_bits_of_a_call_over_its_gathered_keys(dtype, lengths, names, rules):
    inputs = make_inputs(dtype, "gqa", lengths, (24, 17), names=names, **RULES[rules])
    expected = rows_alone(inputs)
    got = compute_results(attention, inputs)
    for name in ("out", "lse", "grad of query"):
        assert torch.equal(got[name], expected[name]), name
    for name in ("grad of key", "grad of value"):
        if dtype.itemsize > 2:  # else each row's part is rounded only in the calls, and not in the one call
            assert torch.equal(got[name], expected[name]), name
        else:
            assert_close(got[name].float(), expected[name], atol=0.05, rtol=0.05)


def test_all_kv_heads_together_have_the_bits_of_one_call():
    query, key, value = draw(1, 8, 1, 64), draw(1, 8, 20000, 64, seed=1), draw(1, 8, 20000, 64, seed=2)
    index = torch.randperm(20000, generator=torch.Generator().manual_seed(0))[:9000]
    out = attention(query, key, value, key_index=index.view(1, 1, 1, -1))
    index = index.sort().values
    assert torch.equal(out, attention(query, key[:, :, index], value[:, :, index]))


@pytest.mark.parametrize("change", ["order", "twice", "twice in a row", "-1", "int32"])
@pytest.mark.parametrize("key_block", [1, 7])
@pytest.mark.parametrize("kv_len", [300, 60000], ids=["sorted by bits", "sorted"])
def test_order_repetition_and_minus_one_change_no_bit(kv_len, key_block, change):
    query, key, value = draw(1, 4, 3, 16), draw(1, 2, kv_len, 16, seed=1), draw(1, 2, kv_len, 16, seed=2)
    score = draw(1, 2, 3, kv_len // key_block, seed=3)
    index = score.topk(40, dim=-1).indices.sort(-1).values
    expected = attention(query, key, value, key_index=index, key_block=key_block)
    if change == "order":
        index = index.flip(-1)
    if change == "twice":
        index = torch.cat([index, index[..., ::3]], -1)
    if change == "twice in a row":
        index = index.repeat_interleave(2, -1)
    if change == "-1":
        index = torch.cat([torch.full_like(index, -1), index], -1)[..., torch.arange(80).view(2, 40).T.flatten()]
    if change == "int32":
        index = index.int()
    assert torch.equal(attention(query, key, value, key_index=index, key_block=key_block), expected)


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("lengths", [(1, 1300), (40, 200)], ids=["decode", "prefill"])
@pytest.mark.parametrize("poison", [NAN, INF], ids=str)
def test_a_key_that_no_row_names_is_never_read(poison, lengths, names):
    inputs = make_inputs(torch.float32, "gqa", lengths, (24, 17), names=names, scores={"sinks": True})
    index, block = inputs.settings["key_index"], inputs.settings["key_block"]
    index[index == 2] = -1
    named = torch.zeros(2, 2, -(-lengths[1] // block) + 1, dtype=torch.bool)
    named.scatter_(-1, index.long().flatten(2).expand(-1, 2, -1) % named.size(-1), True)
    named = named[..., :-1].repeat_interleave(block, -1)[..., : lengths[1]].unsqueeze(-1)
    assert not named.all()
    clean = compute_results(attention, inputs)
    inputs.key, inputs.value = (x.masked_fill(~named, poison) for x in (inputs.key, inputs.value))
    for name, got in compute_results(attention, inputs).items():
        assert torch.equal(got, clean[name]), name
        if name in ("grad of key", "grad of value"):
            assert not got.masked_select(~named).any()


def test_a_named_nan_reaches_the_rows_that_name_it():
    query, key, value = draw(1, 2, 4, 8), draw(1, 2, 9, 8, seed=1), draw(1, 2, 9, 8, seed=2)
    value[0, 1, 5] = NAN
    index = torch.tensor([[[[1, 5], [5, 8], [2, 3], [-1, 5]]]])
    out = attention(query, key, value, key_index=index, causal=True, q_offset=5)
    assert out[0, 1].isnan().any(-1).tolist() == [True, True, False, True] and out[0, 0].isfinite().all()
    assert attention(query, key, value, key_index=index, causal=True).isfinite().all()  # the key lies ahead


def test_a_row_without_names_gives_zero_and_its_sink():
    query, key = draw(1, 2, 3, 8).requires_grad_(), draw(1, 1, 5, 8, seed=1).requires_grad_()
    for index in (torch.full((1, 1, 3, 4), -1), torch.empty(1, 1, 3, 0, dtype=torch.int64)):
        out, lse = attention(query, key, key, key_index=index, sinks=torch.tensor([0.5, 2.0]), return_lse=True)
        assert not out.any() and torch.equal(lse, torch.tensor([0.5, 2.0]).view(1, 2, 1).expand(1, 2, 3))
        assert not any(g.any() for g in torch.autograd.grad(out.sum(), (query, key)))


@pytest.mark.parametrize("stage", ["scaled", "capped", "masked", "probs"])
@pytest.mark.parametrize("names", NAMES)
def test_attention_scores_honours_it(names, stage):
    inputs = make_inputs(torch.float64, "uneven", (7, 150), names=names, positions={"causal": True, "q_offset": 140})
    ours, truth = (f(inputs.query, inputs.key, stage=stage, **inputs.settings)
                   for f in (attention_scores, reference.attention_scores))  # fmt: skip
    assert_close(ours, truth)
    excluded = {"masked": -INF, "probs": 0.0}.get(stage)
    assert excluded is None or (ours == excluded).float().mean() > 0.3


NAMED_RULES = [
    {"positions": {"causal": True, "q_offset": 140}, "scores": {"sinks": True, "softcap": 2.0}},
    {"positions": {"causal": True, "q_offset": "tensor"}, "scores": {"alibi": True}},
    {"positions": {"window": (9, 3), "q_offset": 140}, "mask": "own"},
    {"positions": {"causal": True, "q_offset": 2**63 - 1}, "mask": "bool"},
]


@grid(2, names=NAMES, rules=NAMED_RULES, length=[7, 1200])
def test_probabilities_at_the_names_alone(names, rules, length):
    """The scores of 1,200 rows take more than a piece: each of them has the numbers that it has among 7."""
    if rules["positions"].get("q_offset") == 140:  # so that the last 7 rows stand among the keys
        rules = rules | {"positions": rules["positions"] | {"q_offset": 147 - length}}
    inputs = make_inputs(torch.float64, "uneven", (length, 150), names=names, **rules)
    few = slice(length - 7, length)
    ours = attention_scores(inputs.query, inputs.key, inputs.mask, stage="named", **inputs.settings)
    probs = reference.attention_scores(inputs.query, inputs.key, inputs.mask, **inputs.settings)
    inputs.settings["key_index"] = inputs.settings["key_index"][:, :, few]
    assert_close(ours[:, :, few], at_names(probs[:, :, few], inputs))
    assert 0 < (ours > 0).sum() < ours.numel()


@pytest.mark.parametrize("names", ["keys", "blocks of 64, of heads"])
@pytest.mark.parametrize("lengths", [(1, 2500), (33, 260)], ids=["decode", "prefill"])
def test_bits_do_not_depend_on_threads_or_the_batch(lengths, names):
    inputs = make_inputs(torch.bfloat16, "gqa", lengths, (64, 64), names=names, batch=3)
    with threads(1):
        expected = compute_results(attention, inputs)
    with threads(3):
        several = compute_results(attention, inputs)
    alone = make_inputs(torch.bfloat16, "gqa", lengths, (64, 64), names=names, batch=3)
    for name in ("query", "key", "value", "grad_out", "grad_lse"):
        setattr(alone, name, getattr(inputs, name)[2:])
    alone.settings["key_index"] = inputs.settings["key_index"][2:]
    third = compute_results(attention, alone)
    for name, x in expected.items():
        assert torch.equal(several[name], x) and torch.equal(third[name], x[2:]), name
    without = compute_results(attention, inputs, gradients=False)
    assert torch.equal(without["out"], expected["out"])


@pytest.mark.parametrize("names", ["keys", "blocks of 3"])
def test_dropout_draws_as_with_a_dense_mask(names):
    inputs = make_inputs(torch.float64, "gqa", (5, 60), names=names)
    index, block = inputs.settings["key_index"].long(), inputs.settings["key_block"]
    dense = (index.unsqueeze(-1) == torch.arange(60) // block).any(-2)

    def results(**rules):
        torch.manual_seed(3)
        leaves = [x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
        out = attention(*leaves, dropout_p=0.4, **rules)
        return [out, *torch.autograd.grad(out, leaves, inputs.grad_out)]

    for got, expected in zip(results(**inputs.settings), results(mask=dense), strict=True):
        assert_close(got, expected)


def test_double_backward_and_forward_mode():
    inputs = make_inputs(torch.float64, "gqa", (3, 9), (4, 3), names="blocks of 3", scores={"softcap": 2.0})
    tensors = tuple(x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value))

    def attend(*heads):
        return attention(*heads, return_lse=True, **inputs.settings)

    lse = attend(*tensors)[1].detach()
    empty = lse == -INF

    def finite(*heads):
        out, lse = attend(*heads)
        return out, lse.masked_fill(empty, 0)

    assert torch.autograd.gradcheck(finite, tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(finite, tensors, fast_mode=True)


def test_memory_grows_with_the_names_and_not_with_the_keys():
    query, key = draw(1, 8, 64, 64), draw(1, 1, 1, 64, seed=1).expand(1, 1, 2_000_000, 64)
    index = torch.randint(2_000_000, (1, 1, 64, 32), generator=torch.Generator().manual_seed(0))
    with torch.profiler.profile(profile_memory=True) as profile:
        attention(query, key, key, key_index=index)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert 0 < allocated < 1 << 20, allocated  # a dense mask would take 128 MB
