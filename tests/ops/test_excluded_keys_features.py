"""NaN and Inf in excluded keys, with features that test_excluded_keys.py does not combine: left edges of windows,
holes, dropout, gradients of float masks, sinks and slopes."""

import pytest
import torch
from attnpack import attention, reference
from op_cases import DTYPES, INF, NAN, compute_results, draw, make_inputs

POISON = [NAN, INF, -INF]
LENGTHS = {"decode": (3, 70), "split decode": (3, 1100), "prefill": (60, 300)}
FEATURES = {
    "plain": {},
    "softcap": {"scores": {"softcap": 2.0}},
    "sinks": {"scores": {"sinks": True}},
    "alibi": {"scores": {"alibi": True}},
    "float mask": {"mask": "own"},
    "one mask for all": {"mask": "bfloat16"},
    "all": {"mask": "own -inf", "scores": {"softcap": 2.0, "sinks": True, "alibi": True}},
}


def hide(inputs, rule) -> torch.Tensor:
    """Hides keys from every row by a rule: (settings, bool [Lkv], True where hidden)."""
    q_len, kv_len = inputs.query.shape[2], inputs.key.shape[2]
    columns = torch.arange(kv_len)
    if rule == "left of the window":
        inputs.settings |= {"window": (4, -1), "q_offset": kv_len // 2}
        return columns < kv_len // 2 - 4
    if rule == "both sides of the window":
        inputs.settings |= {"window": (4, 2), "q_offset": torch.tensor([kv_len // 2] * 2), "causal": True}
        return (columns < kv_len // 2 - 4) | (columns >= kv_len // 2 + q_len)
    hidden = draw(kv_len, seed=9) > 0.3
    if inputs.mask is None:
        inputs.mask = ~hidden.view(1, 1, 1, -1)
    else:
        inputs.mask = inputs.mask.masked_fill(hidden, -INF)
    return hidden


RULES = ["left of the window", "both sides of the window", "holes"]


def assert_same(got, expected):
    for name, x in expected.items():
        assert torch.equal(got[name], x), name


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_hidden_key_changes_no_bit(lengths, feature, rule, dropout_p):
    """A hidden key changes neither out nor lse nor any gradient; its own gradients, and those of its mask, are 0."""

    def attend(*tensors, **settings):
        torch.manual_seed(0)
        return attention(*tensors, dropout_p=dropout_p, **settings)

    for n, dtype in enumerate(DTYPES):
        heads = "gqa" if n % 2 else "uneven"
        inputs = make_inputs(dtype, heads, LENGTHS[lengths], (17, 10), **FEATURES[feature])
        hidden = hide(inputs, rule)
        assert hidden.any() and not hidden.all()
        expected = compute_results(attend, inputs)
        assert not any(x.isnan().any() for x in expected.values())
        for name in ("key", "value"):
            assert (expected[f"grad of {name}"][:, :, hidden] == 0).all()
        if "grad of mask" in expected:
            assert (expected["grad of mask"][..., hidden] == 0).all()
        for bad in POISON:
            for name in ("key", "value"):
                getattr(inputs, name)[:, :, hidden] = bad
            assert_same(compute_results(attend, inputs), expected)


@pytest.mark.parametrize("bad", POISON)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("lengths", [(6, 70), (60, 70), (130, 300)])
def test_gradients_of_rows_that_exclude_a_bad_key(lengths, feature, bad):
    """The key is visible to some rows and hidden from the others; it changes nothing in the others, forward and
    backward."""
    for dtype in DTYPES:
        inputs = make_inputs(dtype, lengths=lengths, **FEATURES[feature])
        inputs.settings |= {"window": (2, 1)}
        good = compute_results(attention, inputs)
        spot = 4
        settings = {k: x.double() if torch.is_tensor(x) else x for k, x in inputs.settings.items()}
        mask = None if inputs.mask is None else inputs.mask.double()
        attends = reference.attention_scores(inputs.query.double(), inputs.key.double(), mask, **settings) > 0
        attends = attends[..., spot]  # [B, Hq, Lq]
        assert attends.any() and not attends.all()
        inputs.key[:, :, spot], inputs.value[:, :, spot] = bad, bad
        got = compute_results(attention, inputs)
        for name in ("out", "lse", "grad of query"):
            assert torch.equal(got[name][~attends], good[name][~attends]), name
        # Keys that share no row with the key that holds NaN.
        for name in ("grad of key", "grad of value"):
            assert torch.equal(got[name][:, :, spot + 4 :], good[name][:, :, spot + 4 :]), name
        if "grad of mask" in got and got["grad of mask"].dim() == 4 and got["grad of mask"].shape[0] == 2:
            assert torch.equal(got["grad of mask"][~attends], good["grad of mask"][~attends])


ALLOWED = {
    "window": {"positions": {"window": (2, 1)}},
    "softcap": {"scores": {"softcap": 2.0}, "positions": {"causal": True}},
    "sinks": {"scores": {"sinks": True}, "positions": {"causal": True}},
    "alibi": {"scores": {"alibi": True}, "positions": {"window": (3, 0)}},
    "float mask": {"mask": "own", "positions": {"causal": True}},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", ALLOWED)
@pytest.mark.parametrize("lengths", [(5, 9), (50, 70)], ids=["decode", "prefill"])
def test_an_allowed_nan_is_never_lost(lengths, feature, dtype):
    """NaN in a key: out, lse and the query's gradient are NaN in exactly the rows that attend it."""
    inputs = make_inputs(dtype, "gqa", lengths, **ALLOWED[feature])
    spot = 3
    wide = inputs.to(torch.float64)
    attends = reference.attention_scores(wide.query, wide.key, wide.mask, **wide.settings)[..., spot] > 0
    inputs.key[:, 1, spot] = NAN
    reached = attends & (torch.arange(4) >= 2).view(4, 1)  # query heads 2 and 3 read kv head 1
    assert reached.any() and not reached.all()
    results = compute_results(attention, inputs)
    for name in ("out", "lse", "grad of query"):
        nans = results[name].isnan()
        expected = reached.unsqueeze(-1) if nans.dim() == 4 else reached
        assert torch.equal(nans, expected.expand(nans.shape)), name
    if feature == "sinks":
        assert torch.equal(results["grad of sinks"].isnan(), reached.any(2).any(0))


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
@pytest.mark.parametrize("lengths", [(3, 70), (60, 70)], ids=["decode", "prefill"])
def test_a_bad_number_of_one_head_reaches_no_other(lengths, name):
    inputs = make_inputs(lengths=lengths, scores={"sinks": True, "alibi": True})
    good = compute_results(attention, inputs)
    inputs.settings[name] = inputs.settings[name].clone()
    inputs.settings[name][1] = NAN
    got = compute_results(attention, inputs)
    others = [0, 2, 3]
    for result in ("out", "lse", "grad of query"):
        assert torch.equal(got[result][:, others], good[result][:, others]), result
        assert got[result][:, 1].isnan().any(), result
    assert torch.equal(got["grad of sinks"][others], good["grad of sinks"][others])
    for result in ("grad of key", "grad of value"):  # kv head 1 is read by heads 2 and 3
        assert torch.equal(got[result][:, 1], good[result][:, 1]), result


@pytest.mark.parametrize("lengths", [(3, 70), (60, 70)], ids=["decode", "prefill"])
def test_nan_in_a_float_mask_reaches_its_row_alone(lengths):
    inputs = make_inputs(lengths=lengths, mask="own")
    good = compute_results(attention, inputs)
    inputs.mask = inputs.mask.clone()
    inputs.mask[0, 1, 2, 5] = NAN
    got = compute_results(attention, inputs)
    rows = torch.ones(2, 4, lengths[0], dtype=torch.bool)
    rows[0, 1, 2] = False
    for name in ("out", "lse", "grad of query", "grad of mask"):
        assert torch.equal(got[name][rows], good[name][rows]), name
        assert got[name][0, 1, 2].isnan().all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_gradient_reaches_a_sink_from_a_row_without_keys(dtype):
    query, key, value = (torch.randn(1, 2, n, 8, dtype=dtype) for n in (3, 5, 5))
    allowed = torch.tensor([[True] * 5, [False] * 5, [True] * 5])
    sinks = torch.zeros(2, requires_grad=True)
    out = attention(query, key, value, allowed, sinks=sinks)
    grad = torch.ones_like(out)
    (clean,) = torch.autograd.grad(out, sinks, grad, retain_graph=True)
    grad[:, :, 1] = float("nan")
    assert torch.equal(torch.autograd.grad(out, sinks, grad)[0], clean) and clean.abs().min() > 0
