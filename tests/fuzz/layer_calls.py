"""Valid calls of the ops that layers have beside attention: gates, differences of heads, shared caches, experts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random

import attnpack
import torch
from attnpack import reference
from op_cases import draw
from schemas import in_order
from torch.testing import assert_close

WIDE = [torch.float64, torch.float32]
DTYPES = [*WIDE, torch.bfloat16, torch.float16]
Call = tuple[str, list, Callable]


def _no_check(result: object) -> None:
    """For results that nothing here knows."""


def gate_heads(pick: Random) -> Call:
    heads, dim, dtype = pick.randint(1, 4), pick.randint(1, 6), pick.choice(WIDE)
    rows, activation = (pick.randint(1, 3), pick.randint(0, 4)), pick.choice(["sigmoid", "softplus"])
    joined = draw(*rows, heads * dim, dtype=dtype)
    gate = draw(*rows, pick.choice([heads, heads * dim]), dtype=dtype, seed=1)

    def right(result):
        assert_close(result, reference.gate_heads(joined, gate, heads, activation), atol=1e-4, rtol=1e-4)

    return "gate_heads", [joined, gate, heads, activation], right


def attend_shared(pick: Random) -> Call:
    batch, kv_heads, dtype = pick.randint(1, 3), pick.randint(1, 2), pick.choice(WIDE)
    length, capacity = pick.randint(0, 4), 9
    lengths = torch.tensor([pick.randint(length, capacity) for _ in range(batch)])
    q, k, v = (
        draw(batch, n, rows, dim, dtype=dtype)
        for n, rows, dim in ((2 * kv_heads, length, 8), (kv_heads, capacity, 8), (kv_heads, capacity, 6))
    )
    rope, sinks = pick.choice([None, [1.0, 0.1]]), pick.choice([None, draw(2 * kv_heads)])

    def right(result):
        if rope is None:
            offset, settings = lengths - length, {"kv_lens": lengths, "sinks": sinks}
            expected = reference.attention(q, k, v, causal=True, q_offset=offset, **settings).transpose(1, 2).flatten(2)
            assert_close(result if torch.is_tensor(result) else result[0], expected, atol=1e-4, rtol=1e-4)

    name = pick.choice(["attend_shared", "attend_shared_with_weights"])
    rest = {"rope_inv_freq": rope, "causal": True, "sinks": sinks}
    return name, in_order(name, q, k, v, lengths, **rest), right


def pair_values(pick: Random) -> Call:
    value = draw(pick.randint(1, 3), 2 * pick.randint(1, 3), pick.randint(0, 4), pick.randint(1, 5))

    def right(result):
        half = value.size(1) // 2
        for head in range(value.size(1)):
            assert torch.equal(result[:, head], torch.cat([value[:, head % half], value[:, half + head % half]], -1))

    return "pair_values", [value], right


def subtract_halves(pick: Random) -> Call:
    heads, width, dim, dtype = 2 * pick.randint(1, 3), pick.randint(1, 6), pick.randint(1, 4), pick.choice(WIDE)
    joined = draw(pick.randint(1, 3), pick.randint(0, 4), heads * width, dtype=dtype)
    lambdas = [draw(dim, dtype=dtype, seed=n) for n in range(4)]

    def right(result):
        q1, k1, q2, k2 = lambdas
        factor = (q1 @ k1).exp() - (q2 @ k2).exp() + 0.3
        first, second = joined.unflatten(-1, (heads, width)).chunk(2, -2)
        difference = first - factor * second
        normed = difference / (difference.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        assert_close(result, (0.7 * normed).flatten(-2), atol=1e-4, rtol=1e-4)

    return "subtract_halves", [joined, heads, *lambdas, 0.3, 1e-5], right


def subtract_pairs(pick: Random) -> Call:
    heads, rows, dtype = pick.randint(1, 3), (pick.randint(1, 3), pick.randint(0, 4)), pick.choice(WIDE)
    joined, lambdas = draw(*rows, 2 * heads * 5, dtype=dtype), draw(*rows, heads, dtype=dtype, seed=1)

    def right(result):
        pairs = joined.unflatten(-1, (2 * heads, 5))
        expected = pairs[..., 0::2, :] - lambdas.sigmoid().unsqueeze(-1) * pairs[..., 1::2, :]
        assert_close(result, expected.flatten(-2), atol=1e-5, rtol=1e-5)

    return "subtract_pairs", [joined, lambdas], right


def route_experts(pick: Random) -> Call:
    logits, top_k = draw(pick.randint(0, 4), 6, dtype=torch.float32), pick.randint(1, 6)
    scores, normalize = pick.choice(["softmax", "sigmoid"]), pick.random() < 0.5
    correction = pick.choice([None, torch.zeros(6)])

    def right(result):
        expected, chosen = (logits.softmax(-1) if scores == "softmax" else logits.sigmoid()).topk(top_k)
        expected = expected / expected.sum(-1, keepdim=True) if normalize else expected
        assert_close(result[0].sort(-1).values, expected.sort(-1).values)
        assert torch.equal(result[1].sort(-1).values, chosen.sort(-1).values)

    return "route_experts", [logits, correction, scores, top_k, normalize, 1.0, 1, 1], right


def select(pick: Random) -> Call:
    batch, kv_heads, length, kv_len = pick.randint(1, 3), pick.randint(1, 2), pick.randint(0, 4), pick.randint(0, 9)
    causal, offsets = pick.random() < 0.5, torch.tensor([pick.randint(0, 9) for _ in range(batch)])
    lens = torch.tensor([pick.randint(0, kv_len) for _ in range(batch)])
    keys = pick.random() < 0.5
    heads = 2 * kv_heads
    query = draw(batch, heads, length, 5, dtype=pick.choice(WIDE))
    key = draw(batch, 1 if keys else kv_heads, kv_len, 5, dtype=query.dtype)
    block, most = 1 if keys else pick.randint(1, 4), pick.randint(1, 12)

    mask = torch.rand(pick.choice([1, batch]), pick.choice([1, heads]), length, kv_len) < pick.choice([0.3, 1])
    mask = pick.choice([None, mask, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)])

    def right(index):
        """The named blocks differ, and each has a key that some head of its kv head may attend."""
        assert index.dtype == torch.int32 and index.size(-1) == min(most, -(-kv_len // block))
        allowed = torch.ones(batch, heads, length, kv_len, dtype=torch.bool)
        if mask is not None:
            allowed &= mask if mask.dtype == torch.bool else mask == 0
        allowed = allowed.unflatten(1, (key.size(1), -1)).any(2)
        for b, head, i in itertools.product(range(batch), range(key.size(1)), range(length)):
            end = min(int(lens[b]), int(offsets[b]) + i + 1) if causal else int(lens[b])
            blocks = {n // block for n in range(end)}
            open_blocks = {n for n in blocks if allowed[b, head, i, n * block : min((n + 1) * block, end)].any()}
            named = [n for n in index[b, head, i].tolist() if n >= 0]
            assert len(set(named)) == len(named) == min(most, len(open_blocks)) and set(named) <= open_blocks

    place = [causal, offsets, lens, mask]
    if keys:
        local = pick.randint(0, most)
        return "select_keys", [query, key, draw(batch, length, heads), most, *place, local], right
    scorer, sums = pick.choice(["mean", "max"]), None
    if scorer == "mean" and kv_len and pick.random() < 0.5:
        valid = key * (torch.arange(kv_len) < lens.view(-1, 1, 1)).unsqueeze(-1)
        sums = torch.stack([part.sum(2) for part in valid.split(block, 2)], 2)
    return "select_blocks", [query, key, block, most, 1, scorer, *place, sums], right


def index_keys(pick: Random) -> Call:
    """With a cache that has room, or without one: the numbers and the cache's new rows are those of the formula."""
    batch, heads, length, past, dtype = pick.randint(1, 3), pick.randint(1, 3), pick.randint(1, 4), 0, pick.choice(WIDE)
    query, key = draw(batch, heads, length, 6, dtype=dtype), draw(batch, 1, length, 6, dtype=dtype)
    weights, most, causal = draw(batch, length, heads, dtype=dtype), pick.randint(1, 9), pick.random() < 0.5
    cache = [None, None]
    if pick.random() < 0.6:
        past = pick.randint(0, 5)
        cache = [draw(batch, 1, past + length, 6, dtype=dtype, seed=1), torch.full((batch,), past)]
    every = key if cache[0] is None else torch.cat([cache[0][:, :, :past].clone(), key], 2)
    scores = reference.index_scores(query, every, weights)

    def right(index):
        assert cache[0] is None or (torch.equal(cache[0], every) and cache[1].tolist() == [past + length] * batch)
        assert index.shape == (batch, 1, length, min(most, past + length))
        for b in range(batch):
            for i in range(length):
                end = past + i + 1 if causal else past + length
                named = [n for n in index[b, 0, i].tolist() if n >= 0]
                worth = scores[b, i, :end].sort(descending=True).values[: len(named)]
                assert len(set(named)) == len(named) == min(most, end) and max(named) < end
                assert_close(scores[b, i, named].sort(descending=True).values, worth, atol=1e-5, rtol=1e-5)

    return "index_keys", in_order("index_keys", query, key, weights, most, 0, *cache, causal=causal), right


def indexer_loss(pick: Random) -> Call:
    batch, heads, length, dtype = pick.randint(1, 3), pick.randint(1, 3), pick.randint(1, 5), pick.choice(WIDE)
    query, key = draw(batch, heads, length, 6, dtype=dtype), draw(batch, 1, length, 6, dtype=dtype)
    weights, causal = draw(batch, length, heads, dtype=dtype), pick.random() < 0.5
    allowed = torch.ones(batch, length, length, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    index, given = None, pick.choice([None, "key_index", "at_names"])
    if given:  # its own key among others, which may be none, stand twice or lie ahead
        index = torch.tensor(
            [[[[i, *(pick.randint(-1, length - 1) for _ in range(3))] for i in range(length)]]] * batch
        )
        named = torch.zeros(batch, length, length + 1, dtype=torch.bool).scatter(2, index[:, 0] % (length + 1), True)
        allowed = allowed & named[..., :length]
    probs = draw(batch, 2, length, length, dtype=dtype, seed=1).masked_fill(~allowed.unsqueeze(1), -torch.inf)
    probs = probs.softmax(-1)

    def right(loss):
        scores = reference.index_scores(query, key, weights) / (heads * 6) ** 0.5
        assert_close(loss, reference.indexer_loss(scores, probs, allowed), atol=1e-4, rtol=1e-4)

    shown = probs.gather(3, index.clamp(min=0).expand(-1, 2, -1, -1)) if given == "at_names" else probs
    rest = {"causal": causal, "at_names": given == "at_names"}
    return "indexer_loss", in_order("indexer_loss", query, key, weights, shown, index, **rest), right


def sparse_rule(pick: Random) -> Call:
    """A rule of a SparseCache that keeps sums or an indexer's keys, or a call that brings its sums up to date."""
    made, sums = attnpack.SparseCache(), pick.random() < 0.6
    batch, heads, block, dtype = pick.randint(1, 3), pick.randint(1, 2), pick.randint(1, 4), pick.choice(WIDE)
    for length in (pick.randint(1, 9), pick.randint(1, 3)):
        q, k, v = (draw(batch, n, length, d, dtype=dtype) for n, d in ((2 * heads, 8), (heads, 8), (heads, 6)))
        made.keep_sums(block, length) if sums else made.reserve_index(k[:, :1])
        state, numbers = made.clone()._tensors, made._numbers
        room = made.reserve(k, v)
        if len(made):
            break
        chosen = {"key_block": block, "top_blocks": 2, "local_blocks": 1} if sums else {}
        attnpack.ops.attend(q, k, v, cache=room, causal=True, **chosen)
        made.commit(length, None)
    rules = dict.fromkeys(("clone", "len", "nbytes", "nbytes_allocated", "reset", "views"), [])
    rules |= {"crop": [pick.randint(0, 9)], "reserve": [k, v, None], "commit": [0, None]}
    rules |= {"reorder": [torch.zeros(batch, dtype=torch.int64)]}
    rules |= {"keep_sums": [block, length]} if sums else {"reserve_index": [k[:, :1]]}
    name = pick.choice([*rules, *["attend"] * 3 * sums])
    if name != "attend":
        return f"cache_{name}", ["SparseCache", state, numbers, *rules[name]], _no_check
    rest = {"causal": True, "key_block": block, "top_blocks": pick.randint(1, 3), "local_blocks": 1}
    total = len(made) + length

    def right(_):
        whole = total // block
        expected = room.key[:, :, : whole * block].unflatten(2, (whole, block)).sum(3)
        assert_close(room.block_sums[:, :, :whole], expected, atol=1e-5, rtol=1e-5)

    name = pick.choice(["attend", "attend_with_weights"])
    return name, in_order(name, q, k, v, *room, **rest), right


def key_products(pick: Random) -> Call:
    batch, kv_heads, group, length = (pick.randint(1, 3) for _ in range(4))
    dtype, dim, keys = pick.choice(DTYPES), pick.choice([1, 5, 32, 64, 100]), pick.choice([0, 1, 9, 300])
    query = draw(batch, kv_heads * group, length * pick.choice([1, 1, 20]), dim, dtype=dtype)
    key = draw(batch, kv_heads, keys, dim, dtype=dtype)

    def right(result):
        expected = query.double() @ key.double().repeat_interleave(group, 1).transpose(2, 3)
        assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_close(result.double(), expected, atol=1e-4, rtol=1e-4)

    return "key_products", [query, key], right


MAKERS = [
    gate_heads, attend_shared, pair_values, subtract_halves, subtract_pairs, select, route_experts, index_keys,
    indexer_loss, sparse_rule, key_products,
]  # fmt: skip
