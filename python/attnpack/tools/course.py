"""Helpers of the notebooks: differences in words, times in turn, and checks of the exercises that say "implement".

A check calls the reader's function on small random inputs and compares it with the library. It returns "right", or "not
yet" with the first thing that differs; it raises nothing that the function did not raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .. import GroupedQueryAttention, MultiHeadAttention, RotaryEmbedding, attention, convert, linear_attention
from ..ops import select_blocks
from .bench.cases import Case, Limits

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
    """`attend(query, key, value)`: causal attention over [B, H, L, D], without that of attnpack."""
    inputs, library = _random(3, 2, 3, 5, 4).unbind(0), _Library()
    answer = library.watch(attend, *inputs)
    return library.verdict(_compare(answer, attention(*inputs, causal=True), "attend(query, key, value)"))


@torch.no_grad()
def check_decode(step: Callable[[MultiHeadAttention, Tensor, tuple | None], tuple[Tensor, tuple]]) -> str:
    """`step(layer, token, past)`: the output [B, 1, E] of one token, and the keys and values up to it, each
    [B, H, L, D], which the next call gets as `past`; without the attention and the caches of attnpack."""
    layer, x = MultiHeadAttention(12, 3, causal=True), _random(2, 5, 12)
    past, outs, library = None, [], _Library()
    for number, token in enumerate(x.split(1, dim=1), 1):
        answer = library.watch(step, layer, token, past)
        if not isinstance(answer, tuple) or len(answer) != 2:
            return f"not yet: step {number} returned {type(answer).__name__}, wanted the output and the pair (k, v)"
        out, past = answer
        if not isinstance(past, tuple) or [getattr(each, "shape", None) for each in past] != [(2, 3, number, 4)] * 2:
            shapes = [tuple(getattr(each, "shape", ())) for each in past] if isinstance(past, tuple) else past
            return f"not yet: after step {number} k and v are {shapes}, wanted [B, H, L, D] = (2, 3, {number}, 4)"
        if not isinstance(out, Tensor) or out.shape != token.shape:
            return _compare(out, token, f"the output of step {number}")
        outs.append(out)
    verdict = _compare(torch.cat(outs, dim=1), layer(x), "the outputs of five steps")
    return library.verdict(verdict)


def check_chunk_mask(mask: Callable[[int, int], Tensor]) -> str:
    """`mask(new, past)`: bool [new, past + new], True where row i of a chunk may attend key j."""
    for new, past in ((3, 0), (1, 4), (3, 2)):
        name, got = f"mask({new}, {past})", mask(new, past)
        positions = past + torch.arange(new)
        wanted = torch.arange(past + new) <= positions[:, None]
        verdict = _compare_masks(got, wanted, name, "attend")
        if verdict != "right":
            return verdict
    return "right"


@torch.no_grad()
def check_groups(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> str:
    """`attend(query, key, value)`: attention of H query heads [B, H, L, D] over G key-value heads [B, G, L, D], without
    `repeat_interleave`, a loop and the attention of attnpack."""
    library, counts = _Library(), {}
    for batch, heads, groups in ((2, 6, 6), (2, 6, 3), (2, 6, 2), (2, 6, 1), (3, 4, 2)):
        query, (key, value) = _random(batch, heads, 5, 4), _random(2, batch, groups, 5, 4).unbind(0)
        with _Calls() as calls:
            got = library.watch(attend, query, key, value)
        verdict = _compare(got, attention(query, key, value), f"attend with {groups} key-value heads")
        if verdict != "right":
            return verdict
        if "repeat_interleave" in calls.names:
            return "not yet: right numbers, but repeat_interleave was called"
        if 1 < groups < heads:  # others may have a way of their own
            counts[batch, heads, groups] = len(calls.names)
    if len(set(counts.values())) > 1:  # sequences, heads or groups one after the other
        each = ", ".join(f"{count} for {sizes}" for sizes, count in counts.items())
        return f"not yet: right numbers, but a loop: the calls of torch for (B, H, G) are {each}"
    return library.verdict("right")


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
            verdict = _compare(getattr(made, part).weight, getattr(wanted, part).weight, f"{part}.weight of {name}")
            if verdict != "right":
                return verdict
        verdict = _compare(made(x), wanted(x), f"the output of {name}")
        if verdict != "right":
            return verdict
    return "right"


@torch.no_grad()
def check_rotation(rotate: Callable[[Tensor, Tensor], Tensor]) -> str:
    """`rotate(x, positions)`: x [B, H, L, D], pairs (i, i + D/2) rotated by position * 10000 ** (-2 i / D)."""
    x, positions, library = _random(1, 2, 5, 8), torch.tensor([0, 1, 5, 6, 40]), _Library()
    answer = library.watch(rotate, x, positions)
    return library.verdict(_compare(answer, RotaryEmbedding(8)(x, positions), "rotate(x, positions)"))


@torch.no_grad()
def check_absorbed(attend: Callable[..., Tensor]) -> str:
    """`attend(q_nope, q_rope, latents, k_rope, w_uk, w_uv)`: absorbed attention of a new token, [B, H, 1, V], over the
    latents [B, K, C] and rotated keys [B, K, R]. Queries are [B, H, 1, N] and [B, H, 1, R], the matrices [H, N, C] and
    [H, V, C], and the scale is 1 / sqrt(N + R)."""
    heads, keys, width, rank = 3, 40, 16, 6
    q_nope, q_rope = _random(2, heads, 1, width), _random(2, heads, 1, 4)
    latents, k_rope = _random(2, keys, rank), _random(2, keys, 4)
    w_uk, w_uv = _random(2, heads, width, rank).unbind(0)
    expanded = [torch.einsum("bkc,hdc->bhkd", latents, each) for each in (w_uk, w_uv)]
    key = torch.cat([expanded[0], k_rope[:, None].expand(-1, heads, -1, -1)], dim=-1)
    library = _Library()
    with _Largest() as made:
        got = library.watch(attend, q_nope, q_rope, latents, k_rope, w_uk, w_uv)
    verdict = _compare(got, attention(torch.cat([q_nope, q_rope], dim=-1), key, expanded[1]), "attend(...)")
    if verdict == "right" and made.largest.numel() >= expanded[0].numel():
        shape = tuple(made.largest.shape)
        return f"not yet: right numbers, but a tensor {shape} was made, as large as the keys of all heads"
    return library.verdict(verdict)


@torch.no_grad()
def check_padded_source(attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> str:
    """`attend(query, key, value, lens)`: cross-attention of [B, H, L, D] over [B, H, K, D], where only the first
    lens[b] keys of sequence b are real."""
    query, lens = _random(3, 2, 4, 8), torch.tensor([6, 2, 5])
    key, value = _random(2, 3, 2, 6, 8).unbind(0)
    library = _Library()
    for name, real in (("attend without padding", torch.full((3,), 6)), ("attend with lens 6, 2 and 5", lens)):
        answer = library.watch(attend, query, key, value, real)
        verdict = _compare(answer, attention(query, key, value, kv_lens=real), name)
        if verdict != "right":
            return verdict
    return library.verdict("right")


@torch.no_grad()
def check_blocks(choose: Callable[[Tensor, Tensor, int, int], Tensor]) -> str:
    """`choose(query, key, block, count)`: bool [L, L] for query and key [L, D], True where a query reads a key: those
    of its own block up to itself, and those of the `count - 1` earlier blocks whose mean key has the largest
    product."""
    length, block = 24, 4
    query, key = _random(2, length, 8).unbind(0)
    places, library = torch.arange(length), _Library()
    for count in (1, 3):
        named = select_blocks(query[None, None], key[None, None], block, count, causal=True)[0, 0]  # [L, count]
        wanted = (named[:, None] == places[:, None] // block).any(-1) & (places <= places[:, None])
        name = f"choose(query, key, {block}, {count})"
        answer = library.watch(choose, query, key, block, count)
        verdict = _compare_masks(answer, wanted, name, "read")
        if verdict != "right":
            return verdict
    return library.verdict("right")


@torch.no_grad()
def check_delta_rule(run: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> str:
    """`run(q, k, v, beta)`: the outputs [L, Dv] of the delta rule for q and k [L, D], v [L, Dv] and beta [L]."""
    q, k = torch.nn.functional.normalize(_random(2, 7, 4), dim=-1).unbind(0)
    v, beta = _random(7, 3), _random(7).sigmoid()
    wanted = linear_attention(q[None, None], k[None, None], v[None, None], beta=beta[None, None], scale=1.0)
    library = _Library()
    answer = library.watch(run, q, k, v, beta)
    return library.verdict(_compare(answer, wanted[0, 0], "run(q, k, v, beta)"))


def check_least_seconds(least: Callable[[int, int, int, int, int, float, float], float]) -> str:
    """`least(num_heads, num_kv_heads, head_dim, keys, size, flops, read)`: the roofline's seconds for one new token
    over `keys` keys and values of `size` bytes per number, by `flops` operations and `read` bytes per second."""
    limits = Limits(flops=2e11, bf16_flops=2e11, bytes_per_second=4e10)
    for heads, groups in ((32, 32), (32, 8), (32, 1)):
        case = Case("decode", "", "fp32", heads, groups, 1, 16384, 128, 128)
        wanted, got = case.limit_seconds(limits), least(heads, groups, 128, 16384, 4, 2e11, 4e10)
        name = f"least for {heads} heads on {groups}"
        if not isinstance(got, (int, float)):
            return f"not yet: {name} returned {type(got).__name__}, wanted seconds"
        if abs(got / wanted - 1) > 0.02:
            return f"not yet: {name} is {1e3 * got:.3f} ms, wanted {1e3 * wanted:.3f} ms"
    return "right"


@torch.no_grad()
def check_finds_mistakes(is_right: Callable[[Callable[..., Tensor]], bool]) -> str:
    """`is_right(attend)`: whether `attend(query, key, value, num_heads, mask)` is right. All are [B, L, E], heads side
    by side; the mask is bool [L, L], and True means may attend."""
    for name, attend in _ATTENDS.items():
        verdict, right = is_right(attend), name.startswith("right")
        if not isinstance(verdict, bool):
            return f"not yet: is_right returned {type(verdict).__name__}, wanted True or False"
        if verdict != right:
            return f"not yet: is_right {'refuses an attention that is right' if right else f'does not find {name}'}"
    return "right"


def _attend(mistake: str, query: Tensor, key: Tensor, value: Tensor, num_heads: int, mask: Tensor) -> Tensor:
    batch, length, width = query.shape
    head_dim = width // num_heads
    heads = [each.view(batch, length, num_heads, head_dim).transpose(1, 2) for each in (query, key, value)]
    if mistake == "view":
        heads = [each.reshape(batch, num_heads, length, head_dim) for each in (query, key, value)]
    scores = heads[0] @ heads[1].transpose(-2, -1)
    if mistake != "late":
        scores = scores / (width if mistake == "scale" else head_dim) ** 0.5
    scores = scores.masked_fill(mask if mistake == "mask" else ~mask, -1e9)
    weights = scores.softmax(dim=-2 if mistake == "columns" else -1)
    if mistake == "late":
        weights = weights / head_dim**0.5
    out = weights @ heads[2]
    return out.reshape(query.shape) if mistake == "view" else out.transpose(1, 2).reshape(query.shape)


_ATTENDS: dict[str, Callable[..., Tensor]] = {
    "right": partial(_attend, ""),
    "the view without a transpose": partial(_attend, "view"),
    "the softmax over the queries": partial(_attend, "columns"),
    "the scale of the whole width": partial(_attend, "scale"),
    "the scale after the softmax": partial(_attend, "late"),
    "the mask whose True means hidden": partial(_attend, "mask"),
}


class _Calls(TorchFunctionMode):
    """The names of the functions of torch that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Library(TorchDispatchMode):
    """Keeps the name of an operator of attnpack that was called, other than the projections."""

    def __init__(self) -> None:
        super().__init__()
        self.called = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith("attnpack::") and name not in ("attnpack::linear", "attnpack::linears"):
            self.called = name
        return func(*args, **(kwargs or {}))

    def watch(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The answer of a reader's function."""
        with self:
            return function(*arguments)

    def verdict(self, compared: str) -> str:
        """The verdict of a comparison, unless a right answer is the library's."""
        if compared != "right" or not self.called:
            return compared
        return f"not yet: right numbers, but of {self.called}, which this is to replace"


class _Largest(TorchFunctionMode):
    """Keeps the largest tensor that a call of torch gives."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = torch.empty(0)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() > self.largest.numel():
            self.largest = out
        return out


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


def _compare_masks(got: object, wanted: Tensor, name: str, may: str) -> str:
    if not isinstance(got, Tensor) or got.shape != wanted.shape:
        return _compare(got, wanted, name)
    if got.dtype != torch.bool:
        return f"not yet: {name} is of {got.dtype}, wanted torch.bool"
    if torch.equal(got, wanted):
        return "right"
    meaning = f"; it is the other way round: True means may {may}" if torch.equal(got, ~wanted) else ""
    row = int((got != wanted).any(1).nonzero()[0])
    return f"not yet: row {row} of {name} is {got[row].tolist()}, wanted {wanted[row].tolist()}{meaning}"
