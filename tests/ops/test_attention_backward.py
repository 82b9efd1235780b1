"""The operator's backward against the reference's autograd and finite differences, for all inputs with a gradient."""

import pytest
import torch
import torch.utils.checkpoint
from attnpack import attention, attention_scores, reference
from op_cases import COVERING, DTYPES, NAN, check_against_reference, compute_results, describe, draw, make_inputs
from torch.testing import assert_close


@pytest.mark.parametrize("case", COVERING, ids=describe)
def test_error_is_at_most_twice_plain_pytorchs(case):
    check_against_reference(make_inputs(**case))


@pytest.mark.parametrize("names", [None, "keys", "blocks of 3"])
@pytest.mark.parametrize("heads", ["mha", "uneven"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(1, 600), (7, 17), (97, 257), (129, 127)])
def test_chunks_with_every_rule(lengths, dtype, heads, names):
    """Against fp64, with gradients; alone, and beside what else says which keys count."""
    alone = {"chunk": 70, "q_offset": -3}
    for positions in (alone, {"chunk": 50, "window": (30, 3), "causal": True, "q_offset": "end"}):
        scores = {} if positions is alone else {"softcap": 0.7, "sinks": True, "alibi": True}
        check_against_reference(make_inputs(dtype, heads, lengths, (17, 10), positions=positions, scores=scores,
                                            kv_lens=torch.int64, names=names))  # fmt: skip


@pytest.mark.parametrize("heads", ["mha", "gqa", "uneven"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [(1, 129), (40, 40)])
def test_few_keys_beside_a_sink(lengths, dtype, heads):
    """There dS = P (dP - delta) nearly cancels, and shows how delta is rounded."""
    for window in ((0, 0), (1, 0)):
        check_against_reference(make_inputs(dtype, heads, lengths, (65, 17), mask="float64 rows", layout="offset",
                                            positions={"window": window}, scores={"sinks": True}))  # fmt: skip


FEATURES = {
    "plain": {},
    "causal": {"positions": {"causal": True, "q_offset": 1}},
    "window": {"positions": {"window": (1, 1), "q_offset": "tensor"}},
    "chunk": {"positions": {"chunk": 3, "q_offset": "tensor"}},
    "kv_lens": {"kv_lens": torch.int64},
    "float mask": {"mask": "own"},
    "broadcast mask": {"mask": "float64 rows"},
    "mask with -inf": {"mask": "own -inf"},
    "softcap": {"scores": {"softcap": 0.8}},
    "sinks": {"scores": {"sinks": True}},
    "alibi": {"scores": {"alibi": True}},
    "scale": {"scores": {"scale": -0.6}},
    "uneven heads": {"heads": "uneven"},
    "empty group": {"heads": "empty_group"},
    "all": {"mask": "own", "positions": {"causal": True, "window": (3, -1)}, "scores": {"softcap": 1.5, "sinks": True}},
}


@pytest.mark.parametrize("dims, keys", [((8, 8), 256), ((8, 8), 512), ((100, 60), 128), ((300, 260), 64)])
def test_keys_that_end_with_a_block(dims, keys):
    """Blocks of the backward pass hold 256, 128 or 64 keys, by the heads' width."""
    check_against_reference(make_inputs(lengths=(3, keys), dims=dims))


@pytest.mark.parametrize("lengths", [(2, 5), (18, 4)], ids=["decode", "prefill"])
@pytest.mark.parametrize("feature", FEATURES)
def test_gradients_by_finite_differences(feature, lengths):
    """Gradients of out and lse with respect to query, key, value, mask and sinks."""
    inputs = make_inputs(**{"dtype": torch.float64, "lengths": lengths, "dims": (3, 2)} | FEATURES[feature])
    settings = dict(inputs.settings)
    leaves = {name: getattr(inputs, name) for name in ("query", "key", "value", "mask")}
    leaves["sinks"] = settings.pop("sinks", None)
    leaves = {name: x.clone().requires_grad_() for name, x in leaves.items() if x is not None}

    def call(*tensors):
        out, lse = attention(return_lse=True, **dict(zip(leaves, tensors, strict=True)), **settings)
        return out, lse.masked_fill(lse == -float("inf"), 0)  # a difference quotient has no meaning here

    assert torch.autograd.gradcheck(call, tuple(leaves.values()), fast_mode=lengths[0] > 4)


def test_dropouts_gradient_by_finite_differences():
    inputs = make_inputs(torch.float64, dims=(3, 2))

    def call(*tensors):
        torch.manual_seed(0)
        return attention(*tensors, dropout_p=0.4)

    leaves = tuple(x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value))
    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("alone", ["query", "key", "value", "mask", "sinks"])
def test_a_gradient_does_not_depend_on_which_others_are_asked_for(alone):
    inputs = make_inputs(lengths=(40, 70), mask="own", scores={"sinks": True})
    expected = compute_results(attention, inputs)[f"grad of {alone}"]
    tensors = {name: getattr(inputs, name) for name in ("query", "key", "value", "mask")} | inputs.settings
    tensors[alone] = tensors[alone].clone().requires_grad_()
    out, lse = attention(**tensors, return_lse=True)
    (grad,) = torch.autograd.grad((out, lse), tensors[alone], (inputs.grad_out, inputs.grad_lse))
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("part", ["out", "lse"])
def test_out_alone_and_lse_alone(part):
    inputs = make_inputs(torch.float64, lengths=(40, 70), mask="own", scores={"sinks": True})
    unused = "grad_lse" if part == "out" else "grad_out"
    setattr(inputs, unused, torch.zeros_like(getattr(inputs, unused)))
    expected = compute_results(attention, inputs)
    tensors = {name: getattr(inputs, name) for name in ("query", "key", "value", "mask")} | inputs.settings
    tensors = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    out, lse = attention(**tensors, return_lse=True)
    result, grad = (out, inputs.grad_out) if part == "out" else (lse, inputs.grad_lse)
    for name, got in zip(tensors, torch.autograd.grad(result, list(tensors.values()), grad), strict=True):
        assert_close(got, expected[f"grad of {name}"])


@pytest.mark.parametrize("layout", ["columns outside", "sliced", "expanded batch", "offset"])
@pytest.mark.parametrize("lengths", [(2, 9), (40, 70)], ids=["decode", "prefill"])
def test_any_layout_of_the_incoming_gradient(layout, lengths):
    inputs = make_inputs(torch.float64, lengths=lengths, layout=layout)
    assert not inputs.grad_out.is_contiguous() or layout == "offset"
    got = compute_results(attention, inputs)
    inputs.grad_out = inputs.grad_out.contiguous()
    for name, expected in compute_results(attention, inputs).items():
        assert_close(got[name], expected)


def test_sum_sends_one_number_expanded():
    inputs = make_inputs(torch.float64)
    q = inputs.query.clone().requires_grad_()
    attention(q, inputs.key, inputs.value).sum().backward()
    (expected,) = torch.autograd.grad(attention(q, inputs.key, inputs.value), q, torch.ones(2, 4, 5, 6).double())
    assert_close(q.grad, expected)


@pytest.mark.parametrize("lengths", [(2, 7), (50, 7)], ids=["decode", "prefill"])
def test_a_row_without_keys_gives_zero_gradients(lengths):
    inputs = make_inputs(lengths=lengths, mask="own", scores={"sinks": True})
    inputs.settings |= {"causal": True, "q_offset": torch.tensor([-100, -100])}
    results = compute_results(attention, inputs)
    for name in ("query", "key", "value", "mask"):
        assert (results[f"grad of {name}"] == 0).all(), name
    # In such a row lse is the sink itself.
    assert_close(results["grad of sinks"], inputs.grad_lse.sum((0, 2)))


def test_without_keys_the_query_has_no_gradient_whatever_lay_in_its_memory():
    query, none = draw(1, 2, 70, 24).requires_grad_(), torch.zeros(1, 2, 0, 24)
    out, incoming = attention(query, none, none), torch.ones(1, 2, 70, 24)
    used = [torch.full((1, 2, 70, 24), NAN) for _ in range(16)]
    del used  # the next tensors of this size get this memory
    (grad,) = torch.autograd.grad(out, query, incoming)
    assert (grad == 0).all()


def test_a_sink_of_minus_infinity_has_no_gradient():
    inputs = make_inputs(kv_lens=torch.int64, scores={"sinks": True})
    inputs.settings |= {"kv_lens": torch.tensor([7, 0]), "sinks": torch.full((4,), -float("inf"))}
    assert (compute_results(attention, inputs)["grad of sinks"] == 0).all()


def test_backward_runs_twice_only_if_asked():
    inputs = make_inputs()
    q = inputs.query.clone().requires_grad_()
    out = attention(q, inputs.key, inputs.value)
    first, second = (torch.autograd.grad(out.sum(), q, retain_graph=again)[0] for again in (True, False))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out.sum(), q)


@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "kv_lens", "sinks"])
def test_an_input_changed_before_backward_is_noticed(name):
    inputs = make_inputs(mask="own", kv_lens=torch.int64, scores={"sinks": True})
    tensors = {n: getattr(inputs, n).clone() for n in ("query", "key", "value", "mask")} | inputs.settings
    leaf = tensors["query"].requires_grad_()
    tensors["query"] = leaf * 1
    out = attention(**tensors)
    tensors[name].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), leaf)


def test_self_attention_on_one_tensor_sums_its_three_roles():
    x = draw(2, 3, 9, 8, dtype=torch.float64).requires_grad_()
    three = [x.detach().clone().requires_grad_() for _ in range(3)]
    (together,) = torch.autograd.grad(attention(x, x, x).square().sum(), x)
    apart = torch.autograd.grad(attention(*three).square().sum(), three)
    assert_close(together, sum(apart))


def test_checkpointing_gives_the_same_gradients():
    inputs = make_inputs()
    leaves = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    direct = torch.autograd.grad(attention(*leaves).square().sum(), leaves)
    out = torch.utils.checkpoint.checkpoint(attention, *leaves, use_reentrant=False)
    for a, b in zip(direct, torch.autograd.grad(out.square().sum(), leaves), strict=True):
        assert torch.equal(a, b)


# ---- dropout -------------------------------------------------------------------------


def dropped_probs(inputs, p, seed=0):
    """The weights that multiply the values, found with unit vectors as values: [B, Hq, Lq, Lkv]."""
    batch, num_kv_heads, kv_len, _ = inputs.key.shape
    torch.manual_seed(seed)
    unit = torch.eye(kv_len, dtype=inputs.key.dtype).expand(batch, num_kv_heads, kv_len, kv_len)
    return attention(inputs.query, inputs.key, unit, inputs.mask, dropout_p=p, **inputs.settings)


DROPOUT = {
    "decode": {"lengths": (3, 90)},
    "split decode": {"lengths": (2, 1100), "heads": "one"},
    "prefill": {"lengths": (40, 90), "positions": {"causal": True, "q_offset": 50}},
    "all": {"lengths": (40, 300), "heads": "uneven", "mask": "own -inf", "scores": {"softcap": 2.0, "sinks": True}},
}


@pytest.mark.parametrize("case", DROPOUT)
def test_dropout_keeps_or_zeroes_each_probability(case):
    inputs = make_inputs(torch.float64, **DROPOUT[case])
    probs = attention_scores(inputs.query, inputs.key, inputs.mask, **inputs.settings)
    dropped = dropped_probs(inputs, 0.25)
    kept = dropped != 0
    assert_close(dropped, torch.where(kept, probs / 0.75, 0))
    rate = 1 - kept[probs > 0].double().mean().item()
    count = (probs > 0).sum().item()
    assert abs(rate - 0.25) < 4 * (0.25 * 0.75 / count) ** 0.5
    # No two heads, rows or sequences share a draw.
    for dim in range(3):
        if kept.shape[dim] > 1:
            assert not torch.equal(kept.select(dim, 0), kept.select(dim, 1))


@pytest.mark.parametrize("case", DROPOUT)
def test_dropouts_backward_sees_the_draw_of_its_forward(case):
    inputs = make_inputs(torch.float64, **DROPOUT[case])
    kept = dropped_probs(inputs, 0.4) != 0

    def plain(query, key, value, mask=None, return_lse=True, **settings):
        heads = settings.get("head_map") or [h * key.shape[1] // query.shape[1] for h in range(query.shape[1])]
        probs = reference.attention_scores(query, key, mask, **settings)
        lse = reference.attention(query, key, value, mask, return_lse=True, **settings)[1]
        return (probs * kept / 0.6) @ value[:, heads], lse

    def ours(*tensors, **settings):
        torch.manual_seed(0)
        return attention(*tensors, dropout_p=0.4, **settings)

    expected = compute_results(plain, inputs)
    for name, x in compute_results(ours, inputs).items():
        assert_close(x, expected[name], msg=lambda text, name=name: f"{name}: {text}")


def test_dropout_follows_torchs_seed():
    inputs = make_inputs(lengths=(40, 90))
    first, again, other = (dropped_probs(inputs, 0.5, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    torch.manual_seed(1)
    in_a_row = [attention(inputs.query, inputs.key, inputs.value, dropout_p=0.5) for _ in range(2)]
    assert not torch.equal(*in_a_row)


def test_dropout_leaves_lse_and_scores_alone():
    inputs = make_inputs(lengths=(40, 90))
    arguments = inputs.query, inputs.key, inputs.value
    dropped, plain = (attention(*arguments, dropout_p=p, return_lse=True) for p in (0.5, 0.0))
    assert torch.equal(dropped[1], plain[1]) and not torch.equal(dropped[0], plain[0])
    scores = [attention_scores(inputs.query, inputs.key, dropout_p=p) for p in (0.5, 0.0)]
    assert torch.equal(*scores)
