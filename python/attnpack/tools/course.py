"""Helpers of the notebooks: differences in words, times in turn, and checks of the exercises that say "implement".

A check calls the reader's function on small random inputs and compares it with the library. It returns "right", or "not
yet" with the first thing that differs; it raises nothing that the function did not raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .. import GroupedQueryAttention, MultiHeadAttention, RotaryEmbedding, attention, convert

SENTENCE = "The cat sat because it was tired"
"""The sentence that the drawings follow."""


def largest_difference(a: Tensor, b: Tensor) -> str:
    gap = (a - b).abs().max().item()
    return f"{gap:.1e}" if gap else "0"


def time_in_turn(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The least of each call's times in milliseconds: what else runs on the machine can only add to it. The calls take
    turns, so that a busy minute meets all of them."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    return {name: 1e3 * min(each) for name, each in taken.items()}


@torch.no_grad()
def check_attention(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> str:
    """`attend(query, key, value)`: causal attention over [B, H, L, D]."""
    inputs = _random(3, 2, 3, 5, 4).unbind(0)
    return _compare(attend(*inputs), attention(*inputs, causal=True), "attend(query, key, value)")


@torch.no_grad()
def check_decode(step: Callable[[MultiHeadAttention, Tensor, tuple | None], tuple[Tensor, tuple]]) -> str:
    """`step(layer, token, past)`: the output [B, 1, E] of one token, and the keys and values up to it, each
    [B, H, L, D], which the next call gets as `past`."""
    layer, x = MultiHeadAttention(12, 3, causal=True), _random(2, 5, 12)
    past, outs = None, []
    for number, token in enumerate(x.split(1, dim=1), 1):
        answer = step(layer, token, past)
        if not isinstance(answer, tuple) or len(answer) != 2:
            return f"not yet: step {number} returned {type(answer).__name__}, wanted the output and the pair (k, v)"
        out, past = answer
        if not isinstance(past, tuple) or [getattr(each, "shape", None) for each in past] != [(2, 3, number, 4)] * 2:
            shapes = [tuple(getattr(each, "shape", ())) for each in past] if isinstance(past, tuple) else past
            return f"not yet: after step {number} k and v are {shapes}, wanted [B, H, L, D] = (2, 3, {number}, 4)"
        if not isinstance(out, Tensor) or out.shape != token.shape:
            return _compare(out, token, f"the output of step {number}")
        outs.append(out)
    return _compare(torch.cat(outs, dim=1), layer(x), "the outputs of five steps")


def check_chunk_mask(mask: Callable[[int, int], Tensor]) -> str:
    """`mask(new, past)`: bool [new, past + new], True where row i of a chunk may attend key j."""
    for new, past in ((3, 0), (1, 4), (3, 2)):
        name, got = f"mask({new}, {past})", mask(new, past)
        positions = past + torch.arange(new)
        wanted = torch.arange(past + new) <= positions[:, None]
        if not isinstance(got, Tensor) or got.shape != wanted.shape:
            return _compare(got, wanted, name)
        if got.dtype != torch.bool:
            return f"not yet: {name} is of {got.dtype}, wanted torch.bool"
        if not torch.equal(got, wanted):
            meaning = "; it is the other way round: True means may attend" if torch.equal(got, ~wanted) else ""
            row = int((got != wanted).any(1).nonzero()[0])
            return f"not yet: row {row} of {name} is {got[row].tolist()}, wanted {wanted[row].tolist()}{meaning}"
    return "right"


@torch.no_grad()
def check_groups(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> str:
    """`attend(query, key, value)`: attention of H query heads [B, H, L, D] over G key-value heads [B, G, L, D]."""
    query = _random(2, 6, 5, 4)
    for groups in (6, 3, 2, 1):
        key, value = _random(2, 2, groups, 5, 4).unbind(0)
        said = _compare(
            attend(query, key, value), attention(query, key, value), f"attend with {groups} key-value heads"
        )
        if said != "right":
            return said
    return "right"


@torch.no_grad()
def check_to_groups(make: Callable[[MultiHeadAttention, int], GroupedQueryAttention]) -> str:
    """`make(layer, groups)`: grouped-query attention whose key-value heads are the means of the groups' heads."""
    layer, x = MultiHeadAttention(24, 6, causal=True), _random(1, 5, 24)
    for groups in (3, 1):
        made, name = make(layer, groups), f"make(layer, {groups})"
        if not isinstance(made, GroupedQueryAttention) or made.num_kv_heads != groups:
            return f"not yet: {name} returned {type(made).__name__}, wanted a GroupedQueryAttention of {groups} groups"
        wanted = convert.to_gqa(layer, groups)
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            said = _compare(getattr(made, part).weight, getattr(wanted, part).weight, f"{part}.weight of {name}")
            if said != "right":
                return said
        said = _compare(made(x), wanted(x), f"the output of {name}")
        if said != "right":
            return said
    return "right"


@torch.no_grad()
def check_rotation(rotate: Callable[[Tensor, Tensor], Tensor]) -> str:
    """`rotate(x, positions)`: x [B, H, L, D], pairs (i, i + D/2) rotated by position * 10000 ** (-2 i / D)."""
    x, positions = _random(1, 2, 5, 8), torch.tensor([0, 1, 5, 6, 40])
    return _compare(rotate(x, positions), RotaryEmbedding(8)(x, positions), "rotate(x, positions)")


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def _compare(got: object, wanted: Tensor, name: str) -> str:
    if not isinstance(got, Tensor):
        return f"not yet: {name} returned {type(got).__name__}, wanted a tensor {tuple(wanted.shape)}"
    if got.shape != wanted.shape:
        return f"not yet: {name} has the shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    if not torch.allclose(got.to(wanted.dtype), wanted, atol=1e-4, rtol=1e-4):
        return f"not yet: {name} differs by up to {largest_difference(got.to(wanted.dtype), wanted)}"
    return "right"
