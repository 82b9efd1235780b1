"""NaN and Inf in excluded keys, and in rows that attend nothing, change no bit of any result."""

import pytest
import torch
from attnpack import attention, attention_scores, reference
from op_cases import DTYPES, INF, NAN, compute_results, draw, make_inputs

POISON = [NAN, INF, -INF]
LENGTHS = {
    "decode": (3, 70),
    "split decode": (3, 1100),
    "many rows": (14, 1100),
    "prefill": (60, 300),
    "square": (130, 130),
}


def excluded_keys(rule, inputs):
    """The settings of a rule that hides the keys from `edge` on from every row, and that edge."""
    q_len, kv_len = inputs.query.shape[2], inputs.key.shape[2]
    edge = kv_len // 2 + 1
    visible = torch.arange(kv_len) < edge
    if rule == "causality":
        inputs.settings |= {"causal": True, "q_offset": edge - q_len}
    elif rule == "window":
        inputs.settings |= {"window": (-1, 3), "q_offset": torch.tensor([edge - 3 - q_len] * 2)}
    elif rule == "chunk":
        inputs.settings |= {"chunk": edge, "q_offset": edge - q_len}
    elif rule == "kv_lens":
        inputs.settings["kv_lens"] = torch.tensor([edge, edge])
    elif rule == "bool mask":
        inputs.mask = visible
    else:
        mask = draw(q_len, kv_len, dtype=torch.float64 if rule == "fp64 mask" else inputs.query.dtype)
        inputs.mask = mask.masked_fill(~visible, -INF)
    return edge


RULES = ["causality", "window", "chunk", "kv_lens", "bool mask", "float mask", "fp64 mask"]


def poisoned(x, value, edge):
    x = x.clone()
    x[:, :, edge:] = value
    return x


def assert_same(got, expected):
    for name, x in expected.items():
        assert torch.equal(got[name], x), name


@pytest.mark.parametrize("scores", [{}, {"softcap": 2.0, "sinks": True, "alibi": True}], ids=["plain", "all scores"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("rule", RULES)
def test_an_excluded_key_changes_no_bit(rule, lengths, scores):
    """An excluded key changes neither out nor lse nor any gradient; its own gradients are 0."""
    for n, dtype in enumerate(DTYPES):
        inputs = make_inputs(dtype, "gqa" if n % 2 else "uneven", LENGTHS[lengths], (17, 10), scores=scores)
        edge = excluded_keys(rule, inputs)
        key, value = inputs.key, inputs.value
        expected = compute_results(attention, inputs)
        assert not any(x.isnan().any() for x in expected.values())
        for name in ("key", "value"):
            assert (expected[f"grad of {name}"][:, :, edge:] == 0).all()
        for bad in POISON:
            for bad_key, bad_value in ((bad, bad), (bad, 1.0), (1.0, bad)):
                inputs.key, inputs.value = poisoned(key, bad_key, edge), poisoned(value, bad_value, edge)
                assert_same(compute_results(attention, inputs), expected)


@pytest.mark.parametrize("bad", POISON)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    "settings", [{"causal": True}, {"window": (5, 0)}, {"window": (0, 2), "softcap": 2.0}], ids=str
)
def test_rows_that_exclude_a_bad_key_are_as_with_a_good_one(settings, lengths, bad):
    inputs = make_inputs(lengths=LENGTHS[lengths])
    inputs.settings = settings
    good = compute_results(attention, inputs, gradients=False)
    spot = min(LENGTHS[lengths]) // 2
    attends = reference.attention_scores(inputs.query, inputs.key, **settings)[..., spot] > 0  # [B, Hq, Lq]
    assert attends.any() and not attends.all()
    inputs.key[:, :, spot], inputs.value[:, :, spot] = bad, bad
    for name, x in compute_results(attention, inputs, gradients=False).items():
        assert torch.equal(x[~attends], good[name][~attends]), name


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("lengths", [(5, 9), (3, 600), (50, 70)])
@pytest.mark.parametrize("case", [{"positions": {"causal": True}}, {"mask": "own -inf"}, {"kv_lens": torch.int64}])
def test_an_allowed_nan_reaches_exactly_the_rows_that_attend_it(case, lengths, where):
    """The forward pass breaks these rows; the backward pass breaks their queries, and the keys and values that they
    attend."""
    inputs = make_inputs(torch.float64, "gqa", lengths, (4, 3), **case)
    if case.get("kv_lens"):
        inputs.settings["kv_lens"] = torch.tensor([lengths[1], lengths[1] // 3])
    attends = reference.attention_scores(inputs.query, inputs.key, inputs.mask, **inputs.settings) > 0
    getattr(inputs, where)[:, 0, 2] = NAN
    if where == "query":
        bad = torch.zeros_like(attends[..., 0])  # [B, Hq, Lq]
        bad[:, 0, 2] = True
        bad &= attends.any(-1)
    else:
        bad = attends[..., 2] & (torch.arange(4) < 2).view(4, 1)  # query heads 0 and 1 read kv head 0
    reached = (attends & bad.unsqueeze(-1)).any(2).unflatten(1, (2, 2)).any(2)  # [B, Hkv, Lkv]
    assert bad.any() and not bad.all() and not reached.all()
    nowhere = torch.zeros((), dtype=torch.bool)
    expected = {
        "out": bad,
        "lse": nowhere if where == "value" else bad,
        "grad of query": bad,
        "grad of key": reached,
        "grad of value": nowhere if where == "value" else reached,
    }
    results = compute_results(attention, inputs)
    for name, nans in expected.items():
        got = results[name].isnan()
        nans = nans.unsqueeze(-1) if nans.dim() == 3 and got.dim() == 4 else nans
        assert torch.equal(got, nans.expand(got.shape)), name


@pytest.mark.parametrize("bad", POISON)
@pytest.mark.parametrize("lengths", [(6, 70), (60, 70), (130, 300)])
@pytest.mark.parametrize("where", ["query", "grad_out", "both"])
def test_a_row_without_keys_may_hold_anything(where, lengths, bad):
    """The query and the incoming gradient of such a row change no gradient of other rows."""
    inputs = make_inputs(lengths=lengths, mask="own", scores={"softcap": 3.0})
    inputs.settings |= {"causal": True, "q_offset": -3}  # rows 0, 1, 2 have no key
    expected = compute_results(attention, inputs)
    if where != "grad_out":
        inputs.query[:, :, :3] = bad
    if where != "query":
        inputs.grad_out[:, :, :3] = bad
        inputs.grad_lse[:, :, :3] = bad
    assert_same(compute_results(attention, inputs), expected)


@pytest.mark.parametrize("bad", POISON)
@pytest.mark.parametrize("lengths", [(6, 70), (60, 70), (130, 300)])
@pytest.mark.parametrize("where", ["query", "grad_out"])
def test_a_bad_row_reaches_only_the_keys_that_it_attends(where, lengths, bad):
    inputs = make_inputs(lengths=lengths)
    inputs.settings = {"window": (2, 0)}
    expected = compute_results(attention, inputs)
    row = 4
    getattr(inputs, where)[:, 0, row] = bad
    got = compute_results(attention, inputs)
    for name in ("grad of key", "grad of value"):
        far = torch.ones(lengths[1], dtype=torch.bool)
        far[row - 2 : row + 1] = False
        assert torch.equal(got[name][:, :, far], expected[name][:, :, far]), name
        assert not got[name][:, 0, row].isfinite().any(), name
        assert torch.equal(got[name][:, 1], expected[name][:, 1]), name  # the other kv head
    others = torch.ones(2, 4, lengths[0], dtype=torch.bool)
    others[:, 0, row] = False
    for name in ("out", "lse", "grad of query"):
        assert torch.equal(got[name][others], expected[name][others]), name


@pytest.mark.parametrize("lengths", [(6, 70), (60, 70)])
def test_nan_in_the_mask_at_an_excluded_pair(lengths):
    inputs = make_inputs(lengths=lengths, mask="own")
    inputs.settings = {"causal": True, "kv_lens": torch.tensor([70, 3])}
    expected = compute_results(attention, inputs)
    excluded = attention_scores(inputs.query, inputs.key, **inputs.settings) == 0
    inputs.mask = inputs.mask.masked_fill(excluded, NAN)
    assert_same(compute_results(attention, inputs), expected)


@pytest.mark.parametrize("stage", ["masked", "probs"])
@pytest.mark.parametrize("rule", RULES)
def test_scores_of_the_other_keys(rule, stage):
    inputs = make_inputs(lengths=(5, 9), scores={"softcap": 2.0})
    edge = excluded_keys(rule, inputs)
    scores = attention_scores(inputs.query, inputs.key, inputs.mask, stage=stage, **inputs.settings)
    for bad in POISON:
        key = poisoned(inputs.key, bad, edge)
        assert torch.equal(attention_scores(inputs.query, key, inputs.mask, stage=stage, **inputs.settings), scores)


@pytest.mark.parametrize("lengths", [(4, 70), (60, 70)])
def test_dropout_does_not_wake_excluded_keys(lengths):
    inputs = make_inputs(lengths=lengths)
    inputs.settings = {"kv_lens": torch.tensor([33, 5]), "dropout_p": 0.5}
    torch.manual_seed(0)
    expected = compute_results(attention, inputs)
    for b, n in enumerate((33, 5)):
        inputs.key[b, :, n:], inputs.value[b, :, n:] = NAN, INF
    torch.manual_seed(0)
    assert_same(compute_results(attention, inputs), expected)
