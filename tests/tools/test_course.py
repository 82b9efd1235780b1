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
    query = query.unflatten(1, (key.shape[1], -1))  # [B, G, H / G, L, D]
    weights = (query @ key.unsqueeze(2).mT / math.sqrt(query.shape[-1])).softmax(-1)
    return (weights @ value.unsqueeze(2)).flatten(1, 2)


def repeated(query, key, value):
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    return grouped(query, key, value)


def head_by_head(query, key, value):
    group = query.shape[1] // key.shape[1]
    heads = [grouped(query[:, h : h + 1], *(each[:, h // group, None] for each in (key, value)))
             for h in range(query.shape[1])]  # fmt: skip
    return torch.cat(heads, 1)


def group_by_group(query, key, value):
    parts = zip(query.chunk(key.shape[1], 1), key.split(1, 1), value.split(1, 1), strict=True)
    return torch.cat([grouped(*part) for part in parts], 1)


def text_by_text(query, key, value):
    return torch.cat([grouped(*part) for part in zip(*(each.split(1) for each in (query, key, value)), strict=True)])


def step_by_library(layer, token, past):
    (q, _, _), (_, pair) = layer.project(token), step(layer, token, past)
    return layer.o_proj(attnpack.attention(q, *pair).transpose(1, 2).flatten(2)), pair


def step_by_cache(layer, token, past):
    cache = attnpack.DynamicCache()
    if past is not None:
        layer(torch.zeros(2, past[0].shape[2], 12), cache=cache)
        for held, wanted in zip((cache.k, cache.v), past, strict=True):
            held.copy_(wanted)
    return layer(token, cache=cache), (cache.k.clone(), cache.v.clone())


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


def absorbed(q_nope, q_rope, latents, k_rope, w_uk, w_uv):
    mapped = q_nope @ w_uk  # [B, H, 1, C]
    scores = mapped @ latents.unsqueeze(1).mT + q_rope @ k_rope.unsqueeze(1).mT
    weights = (scores / math.sqrt(q_nope.shape[-1] + q_rope.shape[-1])).softmax(-1)
    return weights @ latents.unsqueeze(1) @ w_uv.mT


def expanded(q_nope, q_rope, latents, k_rope, w_uk, w_uv):
    key, value = (torch.einsum("bkc,hdc->bhkd", latents, each) for each in (w_uk, w_uv))
    scores = q_nope @ key.mT + q_rope @ k_rope.unsqueeze(1).mT
    return (scores / math.sqrt(q_nope.shape[-1] + q_rope.shape[-1])).softmax(-1) @ value


def padded(query, key, value, lens):
    real = torch.arange(key.shape[2]) < lens[:, None, None, None]
    scores = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(~real, -math.inf)
    return scores.softmax(-1) @ value


def blocks(query, key, block, count, earlier=lambda of_key, of_query: of_key < of_query):
    numbers = torch.arange(len(query)) // block
    scores = query @ key.unflatten(0, (-1, block)).mean(1).T  # [L, blocks]
    past = earlier(torch.arange(scores.shape[1]), numbers[:, None])
    best = scores.masked_fill(~past, -math.inf).topk(min(count - 1, scores.shape[1]), dim=-1).indices
    named = torch.zeros_like(past).scatter(1, best, True) & past
    named |= torch.arange(scores.shape[1]) == numbers[:, None]
    return named.repeat_interleave(block, dim=1) & torch.ones(len(query), len(query), dtype=torch.bool).tril()


def delta_rule(q, k, v, beta, corrects=True):
    state, rows = torch.zeros(q.shape[1], v.shape[1]), []
    for t in range(len(q)):
        missing = v[t] - state.T @ k[t] if corrects else v[t]
        state = state + torch.outer(k[t], beta[t] * missing)
        rows.append(state.T @ q[t])
    return torch.stack(rows)


def least(num_heads, num_kv_heads, head_dim, keys, size, flops, read):
    return max(4 * num_heads * head_dim * keys / flops, 2 * num_kv_heads * head_dim * keys * size / read)


def is_right(attend, length=6, batch=2):
    q, k, v = torch.randn(3, batch, length, 16).unbind(0)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    heads = [each.unflatten(-1, (4, 4)).transpose(1, 2) for each in (q, k, v)]
    wanted = attnpack.attention(*heads, mask).transpose(1, 2).flatten(2)
    return torch.allclose(attend(q, k, v, 4, mask), wanted, atol=1e-4)


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
    "absorbed": (course.check_absorbed, absorbed),
    "padded source": (course.check_padded_source, padded),
    "blocks": (course.check_blocks, blocks),
    "delta rule": (course.check_delta_rule, delta_rule),
    "least seconds": (course.check_least_seconds, least),
    "finds mistakes": (course.check_finds_mistakes, is_right),
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
    "attention by the library": (
        course.check_attention,
        lambda q, k, v: attnpack.attention(q, k, v, causal=True),
        "right numbers, but of attnpack::attention",
    ),
    "rotation by the library": (
        course.check_rotation,
        lambda x, positions: attnpack.RotaryEmbedding(8)(x, positions),
        "right numbers, but of attnpack::",
    ),
    "padding by the library": (
        course.check_padded_source,
        lambda q, k, v, lens: attnpack.attention(q, k, v, kv_lens=lens),
        "right numbers, but of attnpack::attention",
    ),
    "delta rule by the library": (
        course.check_delta_rule,
        lambda q, k, v, beta: attnpack.linear_attention(
            q[None, None], k[None, None], v[None, None], beta=beta[None, None], scale=1.0
        )[0, 0],
        "right numbers, but of attnpack::linear_attention",
    ),
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
    "attention of the library": (course.check_decode, step_by_library, "right numbers, but of attnpack::attention"),
    "a cache of the library": (course.check_decode, step_by_cache, "right numbers, but of attnpack::"),
    "True is hidden": (course.check_chunk_mask, lambda new, past: ~mask(new, past), "may attend"),
    "the past forgotten": (course.check_chunk_mask, lambda new, past: mask(new + past, 0)[:new], "of mask(1, 4)"),
    "numbers": (course.check_chunk_mask, lambda new, past: mask(new, past).float(), "torch.bool"),
    "other order": (
        course.check_groups,
        lambda q, k, v: grouped(q, k.repeat(1, 6 // k.shape[1], 1, 1), v.repeat(1, 6 // v.shape[1], 1, 1)),
        "with 3 key-value heads differs",
    ),
    "repeated heads": (course.check_groups, repeated, "right numbers, but repeat_interleave was called"),
    "head by head": (course.check_groups, head_by_head, "a loop: the calls of torch for (B, H, G) are"),
    "group by group": (course.check_groups, group_by_group, "a loop: the calls of torch for (B, H, G) are"),
    "text by text": (course.check_groups, text_by_text, "a loop: the calls of torch for (B, H, G) are"),
    "groups of the library": (course.check_groups, attnpack.attention, "right numbers, but of attnpack::attention"),
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
    "keys of all heads": (course.check_absorbed, expanded, "a tensor (2, 3, 40, 16) was made"),
    "scale of N": (
        course.check_absorbed,
        lambda q, *others: absorbed(q * math.sqrt(20 / 16), *others),
        "attend(...) differs",
    ),
    "padding is read": (
        course.check_padded_source,
        lambda q, k, v, lens: attnpack.attention(q, k, v),
        "with lens 6, 2 and 5 differs",
    ),
    "no scale over the source": (
        course.check_padded_source,
        lambda q, k, v, lens: padded(2 * q, k, v, lens),
        "without padding differs",
    ),
    "its own block only": (
        course.check_blocks,
        lambda q, k, block, count: blocks(q, k, block, 1),
        "row 4 of choose(query, key, 4, 3)",
    ),
    "the future": (
        course.check_blocks,
        lambda q, k, block, count: torch.ones(24, 24, dtype=torch.bool),
        "row 0 of choose(query, key, 4, 1)",
    ),
    "all of the past": (
        course.check_blocks,
        lambda q, k, block, count: torch.ones(24, 24, dtype=torch.bool).tril() if count > 1 else blocks(q, k, 4, 1),
        "row 12 of choose(query, key, 4, 3)",
    ),
    "only a sum": (course.check_delta_rule, lambda *inputs: delta_rule(*inputs, corrects=False), "differs"),
    "the state before the token": (
        course.check_delta_rule,
        lambda q, k, v, beta: torch.cat([torch.zeros(1, 3), delta_rule(q.roll(-1, 0), k, v, beta)[:-1]]),
        "differs",
    ),
    "both limits after one another": (
        course.check_least_seconds,
        lambda *sizes: least(*sizes) + least(*sizes[:5], 1e99, sizes[6]),
        "32 heads on 32 is",
    ),
    "no arithmetic": (
        course.check_least_seconds,
        lambda *sizes: least(*sizes[:5], 1e99, sizes[6]),
        "32 heads on 1 is",
    ),
    "keys of every head": (
        course.check_least_seconds,
        lambda heads, groups, *others: least(heads, heads, *others),
        "32 heads on 8 is",
    ),
    "looks at shapes": (
        course.check_finds_mistakes,
        lambda attend: attend(*torch.randn(3, 2, 6, 16), 4, torch.ones(6, 6).bool()).shape == (2, 6, 16),
        "does not find the view without a transpose",
    ),
    "one token per text": (
        course.check_finds_mistakes,
        lambda attend: is_right(attend, length=1),
        "does not find",
    ),
    "trusts nobody": (course.check_finds_mistakes, lambda attend: False, "refuses an attention that is right"),
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
