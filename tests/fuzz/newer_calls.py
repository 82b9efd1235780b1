"""Valid calls of the ops of recurrent layers, chunks and stored weights, as in op_calls.py."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import attnpack
import torch
import torch.nn.functional as F
from attnpack import reference
from op_cases import draw
from schemas import in_order
from stored_blocks import FORMATS, check_rounded, random_blocks
from torch.testing import assert_close

Call = tuple[str, list, Callable]
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def gated_convolution(pick: Random) -> Call:
    batch, length, width, taps = pick.randint(1, 3), pick.randint(0, 40), pick.randint(1, 20), pick.randint(1, 5)
    mixed, weight = draw(batch, length, 3 * width, dtype=torch.float64), draw(width, 1, taps, dtype=torch.float64)
    bias = pick.choice([None, draw(width, dtype=torch.float64, seed=1)])
    state = pick.choice([None, draw(batch, width, taps - 1, dtype=torch.float64, seed=2)])

    def right(result):
        before, after, x = mixed.chunk(3, -1)
        out, last = reference.causal_conv1d(before * x, weight.squeeze(1), bias, initial_state=state)
        assert_close(result[0], after * out, **CLOSE)
        assert_close(result[1], last, **CLOSE)

    return "gated_convolution", in_order("gated_convolution", mixed, weight, bias, state), right


def linear_attend(pick: Random) -> Call:
    batch, heads, length, dim, v_dim = (pick.randint(1, 3) for _ in range(5))
    query, key = (draw(batch, length, heads * dim, dtype=torch.float64, seed=seed) for seed in (1, 2))
    value = draw(batch, length, heads * v_dim, dtype=torch.float64, seed=3)
    state = pick.choice([None, draw(batch, heads, dim, v_dim, dtype=torch.float64, seed=4)])
    learned = pick.random() < 0.5
    logits = draw(batch, length, heads * dim, dtype=torch.float64, seed=5) if learned else None

    def right(result):
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
        decay = F.logsigmoid(logits.unflatten(-1, (heads, -1)).transpose(1, 2)) / 16 if learned else None
        out, last = reference.linear_attention(q, k, v, log_decay=decay, initial_state=state)
        assert_close(result[0], out.transpose(1, 2).flatten(2), **CLOSE)
        assert_close(result[1], last, **CLOSE)

    kind = "learned" if learned else "none"
    settings = {"num_heads": heads, "feature_map": "identity", "decay": kind, "state": state}
    return "linear_attend", in_order("linear_attend", query, key, value, logits, **settings), right


def delta_attend(pick: Random) -> Call:
    batch, k_heads, length, dim, v_dim = (pick.randint(1, 3) for _ in range(5))
    heads, taps, wide = k_heads * pick.randint(1, 2), pick.randint(1, 4), {"dtype": torch.float64}
    channels = 2 * k_heads * dim + heads * v_dim
    mixed, gate = draw(batch, length, channels, **wide), draw(batch, length, heads * v_dim, seed=1, **wide)
    decay, beta = (draw(batch, length, heads, seed=seed, **wide) for seed in (2, 3))
    conv, norm = draw(channels, 1, taps, seed=4, **wide), draw(v_dim, seed=5, **wide)
    a_log, dt_bias = draw(heads, seed=6, **wide), draw(heads, seed=7, **wide)

    def right(result):
        rows, last = reference.causal_conv1d(mixed, conv.squeeze(1), activation="silu")
        parts = rows.split([k_heads * dim, k_heads * dim, heads * v_dim], -1)
        q, k, v = (
            x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in zip(parts, (k_heads, k_heads, heads), strict=True)
        )
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        g = (-a_log.exp() * F.softplus(decay + dt_bias)).transpose(1, 2)
        out, state = reference.linear_attention(q, k, v, log_decay=g, beta=beta.sigmoid().transpose(1, 2))
        normed = out * (out.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm
        assert_close(result[0], normed.transpose(1, 2).flatten(2) * F.silu(gate), **CLOSE)
        assert_close(result[1], last, **CLOSE)
        assert_close(result[2], state, **CLOSE)

    tensors = mixed, decay, beta, gate, conv, a_log, dt_bias, norm
    settings = {"num_k_heads": k_heads, "eps": 1e-6, "gate_activation": "silu"}
    return "delta_attend", in_order("delta_attend", *tensors, **settings), right


def state_space_attend(pick: Random) -> Call:
    batch, groups, length, dim, v_dim = (pick.randint(1, 3) for _ in range(5))
    heads, taps, wide = groups * pick.randint(1, 2), pick.randint(1, 4), {"dtype": torch.float64}
    values, keys = heads * v_dim, groups * dim
    channels = values + 2 * keys
    mixed = draw(batch, length, values + channels + heads, **wide)
    conv, bias = draw(channels, 1, taps, seed=1, **wide), draw(channels, seed=2, **wide)
    a_log, dt_bias, skip = (draw(heads, seed=seed, **wide) for seed in (3, 4, 5))
    norm = draw(values, seed=6, **wide)

    def right(result):
        gate, x, dt = mixed.split([values, channels, heads], -1)
        rows, last = reference.causal_conv1d(x, conv.squeeze(1), bias, activation="silu")
        x, b, c = (
            part.unflatten(-1, (n, -1)).transpose(1, 2)
            for part, n in zip(rows.split([values, keys, keys], -1), (heads, groups, groups), strict=True)
        )
        dt = F.softplus(dt + dt_bias).transpose(1, 2)
        g = -a_log.exp()[:, None] * dt
        out, state = reference.linear_attention(c, b, x * dt[..., None], log_decay=g, scale=1.0)
        gated = (out + skip[:, None, None] * x).transpose(1, 2).flatten(2) * F.silu(gate)
        parts = gated.unflatten(-1, (groups, -1))
        normed = (parts * (parts.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).flatten(2) * norm
        assert_close(result[0], normed, **CLOSE)
        assert_close(result[1], last, **CLOSE)
        assert_close(result[2], state, **CLOSE)

    tensors = mixed, conv, bias, a_log, dt_bias, skip, norm
    return "state_space_attend", in_order("state_space_attend", *tensors, num_groups=groups, eps=1e-6), right


def recurrent_cache(pick: Random) -> Call:
    """A rule of a RecurrentCache that holds some tokens."""
    batch, length, cache = pick.randint(1, 3), pick.randint(0, 5), attnpack.RecurrentCache()
    cache.advance(draw(batch, 4, 3), draw(batch, 2, 5, 6), length)
    held = ["RecurrentCache", cache._tensors, cache._numbers]
    if pick.random() < 0.5:

        def right(result):
            assert torch.equal(result[0], cache.conv_state) and torch.equal(result[1], cache.state)

        return "cache_states", [*held, batch, [4, 3], [2, 5, 6]], right
    more, state = pick.randint(0, 4), draw(batch, 2, 5, 6, seed=1)

    def right(result):
        assert any(torch.equal(x, state) for x in result[0]) and length + more in result[1]

    return "cache_advance", [*held, draw(batch, 4, 3, seed=2), state, more, None], right


def stored(pick: Random) -> Call:
    kind, rows, inputs = pick.choice(list(FORMATS)), pick.randint(1, 20), 256 * pick.randint(1, 3)
    blocks = random_blocks(kind, rows=rows, inputs=inputs, largest=0.01)  # so that fp16 holds the result
    numbers = reference.stored_numbers(blocks, kind)
    if pick.random() < 0.3:
        return "widen_stored", [blocks, torch.float32], lambda result: assert_close(result, numbers, rtol=0, atol=0)
    dtype = pick.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16])
    x = draw(pick.randint(0, 9), inputs, dtype=dtype)
    if pick.random() < 0.3:  # numbers that stand out
        x[torch.rand(x.shape) < 0.01] *= 50
    rounded = pick.choice([None, False] if dtype == torch.float64 else [None, False, True])
    bias = pick.choice([None, draw(rows, dtype=dtype)])

    def close(out, offset):
        assert out.dtype == dtype
        if dtype == torch.float64:
            assert_close(out, F.linear(x, numbers.double(), offset), **CLOSE)
        else:  # the bound holds for inputs that are not rounded, too: weights are then rounded to the dtype
            check_rounded(x, blocks, kind, out, offset)

    if pick.random() < 0.5:
        return "stored_linear", [x, blocks, bias, rounded], lambda result: close(result, bias)

    def both(result):
        for out in result:
            close(out, bias)

    return "stored_linears", [x, [blocks, blocks], [] if bias is None else [bias, bias]], both


MAKERS: list[Callable[[Random], Call]] = [
    gated_convolution, linear_attend, delta_attend, state_space_attend, recurrent_cache, stored,
]  # fmt: skip
