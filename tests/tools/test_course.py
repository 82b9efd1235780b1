"""The checks of the notebooks' exercises: a right answer passes, and each usual mistake is told."""

import math

import attnpack
import pytest
import torch
from attnpack.tools import course


def attend(query, key, value):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(-1) @ value


def step(layer, token, past):
    q, k, v = layer.project(token)
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    return layer.o_proj((weights @ v).transpose(1, 2).flatten(2)), (k, v)


def mask(new, past):
    return torch.ones(new, past + new, dtype=torch.bool).tril(past)


def grouped(query, key, value):
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    return (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1) @ value


def to_groups(layer, groups):
    made = attnpack.GroupedQueryAttention(layer.embed_dim, layer.num_heads, groups, causal=True)
    weights = layer.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        heads = weights[name].unflatten(0, (groups, layer.num_heads // groups, layer.head_dim))
        weights[name] = heads.mean(1).flatten(0, 1)
    made.load_state_dict(weights)
    return made


def rotate(x, positions):
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x.split(half, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def not_causal(layer):
    other = attnpack.MultiHeadAttention(layer.embed_dim, layer.num_heads)
    other.load_state_dict(layer.state_dict())
    return other


CHECKS = {
    "attention": (course.check_attention, attend),
    "decode": (course.check_decode, step),
    "mask": (course.check_chunk_mask, mask),
    "groups": (course.check_groups, grouped),
    "to groups": (course.check_to_groups, to_groups),
    "rotation": (course.check_rotation, rotate),
}


@pytest.mark.parametrize("check, answer", CHECKS.values(), ids=CHECKS)
def test_a_right_answer_passes(check, answer):
    assert check(answer) == "right"


@pytest.mark.parametrize("check, answer", CHECKS.values(), ids=CHECKS)
def test_an_empty_answer_is_told(check, answer):
    assert check(lambda *_: None).startswith("not yet: ") and "None" in check(lambda *_: None)


WRONG = {
    "no mask": (course.check_attention, attnpack.attention, "differs"),
    "no scale": (course.check_attention, lambda q, k, v: attend(2 * q, k, v), "differs"),
    "wrong sum": (course.check_attention, lambda q, k, v: attend(q, k, v).sum(1), "has the shape"),
    "cache of the last token": (course.check_decode, lambda layer, x, past: step(layer, x, None), "after step 2"),
    "no output projection": (
        course.check_decode,
        lambda layer, x, past: (x, step(layer, x, past)[1]),
        "five steps differs",
    ),
    "no output": (
        course.check_decode,
        lambda layer, x, past: (None, step(layer, x, past)[1]),
        "the output of step 1 returned NoneType",
    ),
    "True is hidden": (course.check_chunk_mask, lambda new, past: ~mask(new, past), "may attend"),
    "the past forgotten": (course.check_chunk_mask, lambda new, past: mask(new + past, 0)[:new], "of mask(1, 4)"),
    "numbers": (course.check_chunk_mask, lambda new, past: mask(new, past).float(), "torch.bool"),
    "other order": (
        course.check_groups,
        lambda q, k, v: grouped(q, k.repeat(1, 6 // k.shape[1], 1, 1), v.repeat(1, 6 // v.shape[1], 1, 1)),
        "with 3 key-value heads differs",
    ),
    "first head": (
        course.check_to_groups,
        lambda layer, groups: attnpack.convert.to_gqa(layer, groups, "first"),
        "k_proj.weight",
    ),
    "not causal": (
        course.check_to_groups,
        lambda layer, groups: attnpack.convert.to_gqa(not_causal(layer), groups),
        "the output of make(layer, 3) differs",
    ),
    "interleaved": (
        course.check_rotation,
        lambda x, p: attnpack.RotaryEmbedding(8, interleaved=True)(x, p),
        "differs",
    ),
    "the other way": (course.check_rotation, lambda x, p: rotate(x, -p), "differs"),
}


@pytest.mark.parametrize("check, answer, says", WRONG.values(), ids=WRONG)
def test_a_mistake_is_told(check, answer, says):
    assert check(answer).startswith("not yet: ") and says in check(answer)


def test_times_are_the_least_in_milliseconds(monkeypatch):
    ticks = iter([0.0, 0.001, 1.0, 1.004, 2.0, 2.003, 3.0, 3.004, 4.0, 4.002, 5.0, 5.004])
    monkeypatch.setattr(course.time, "perf_counter", lambda: next(ticks))
    order = []
    times = course.time_in_turn({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b"] * 3
    assert times == pytest.approx({"a": 1.0, "b": 4.0})
