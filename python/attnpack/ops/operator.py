"""The operators as Python functions. They call C++ through pybind in eager mode, and ``torch.ops`` while compiling.

B batch, Hq / Hkv query / kv heads, Lq / Lkv lengths, D head dim of queries and keys, Dv of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from torch import Tensor

from .. import _C
from ..signatures import AttentionRules, Rules, ScoresRules, spelled_out

_is_compiling = torch.compiler.is_compiling

Rope = _C.RopeSettings | tuple | None
"""`RotaryEmbedding.settings`, or its first numbers as a tuple."""


class CacheTensors(NamedTuple):
    """The tensors of one layer's KV cache, as `attend` takes them."""

    key: Tensor
    """[B, Hkv, capacity, D], written by a call."""
    value: Tensor
    """[B, Hkv, capacity, Dv], written by a call."""
    lengths: Tensor
    """int64 [B], how many positions each sequence has; a call adds to them."""
    dropped: Tensor | None = None
    """int64 [B], how many of them are no longer stored; None if all are."""
    window: int = -1
    """With `dropped`: how many positions before each new one are stored in any case."""
    keep_first: int = 0
    """With `dropped`: how many first positions are stored, and seen by all later ones."""
    bits: int = 0
    """8 or 4: key and value are quantised rows (`quantize_rows`), and `dropped`, `window` and `keep_first` are those of
    the exact positions beside them."""
    exact_key: Tensor | None = None
    """With `bits`: [B, Hkv, slots, D], the exact positions, written by a call."""
    exact_value: Tensor | None = None
    """With `bits`: [B, Hkv, slots, Dv], as `exact_key`."""
    block_table: Tensor | None = None
    """Of a PagedCache, int32 [B, max_pages]; key and value are then its pools [num_pages, page_size, Hkv, D or Dv]."""
    block_sums: Tensor | None = None
    """Of a SparseCache, [B, Hkv, blocks, D]: the sums of each block of keys, in fp32 at least. A call that chooses
    blocks by their mean writes them."""


@overload
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *,
              return_lse: Literal[False] = False, **rules: Unpack[AttentionRules]) -> Tensor: ...  # fmt: skip
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, return_lse: Literal[True],
              **rules: Unpack[AttentionRules]) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, return_lse: bool,
              **rules: Unpack[AttentionRules]) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@spelled_out(AttentionRules, q_offset=0, key_block=1)
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, return_lse: bool = False, **rules: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * query key^T + mask) value, with grouped heads and nothing of size Lq x Lkv in memory.

    Args:
        query: [B, Hq, Lq, D], float64, float32, bfloat16 or float16; any strides. Or all three are jagged nested
            tensors [B, H, L*, D], which mean one call per sequence; they take no mask and no kv_lens.
        key: [B, Hkv, Lkv, D], value: [B, Hkv, Lkv, Dv], in the dtype of query.
        mask: bool (True = may attend) or additive float, broadcastable to [B, Hq, Lq, Lkv], right-aligned.
        causal: keep keys j <= i + q_offset.
        q_offset: position of query row 0: an int, an integer tensor [B], or "end" (valid keys - Lq). 0 is top-left.
        window: (left, right): keep pos - left <= j <= pos + right, inclusive; -1 = unbounded.
        kv_lens: [B] int32 or int64, valid keys of each sequence; keys beyond them are never read into the result.
        softcap: c > 0: scores become c * tanh(score / c).
        sinks: [Hq], one logit per head that joins the softmax denominator only.
        alibi_slopes: [Hq], adds -slope * abs(pos - j); no gradient.
        head_map: Hq ints, the kv head that each query head reads; default h // (Hq // Hkv). Groups may be uneven.
        dropout_p: dropout on the probabilities; the seed comes from torch's generator.
        scale: default 1 / sqrt(D).
        query_scale: float [Lq] or [B, Lq], a factor on the scaled scores of each query row, before the soft cap; it
            gets a gradient. The queries are multiplied by it, and rounded once. (Llama 4 and Mistral 4 have such.)
        key_index: int32 or int64 [B, 1 or Hkv, Lq, n], the keys that each row may attend, in any order. -1 names none,
            and a key named twice counts once. All other rules still apply to the named keys. No other key is read: work
            and memory grow with n * key_block, not with Lkv (on CUDA the named keys are copied). On the CPU a number
            out of range raises. Each row has the bits of a call with that row alone over its keys, gathered in
            rising order. (DeepSeek-V3.2 2025, section 2.1; blocks: Lu et al. 2025, MoBA.)
        key_block: how many keys a number in key_index stands for: block b holds the keys b * key_block on.
        return_lse: also return lse, the natural log of the softmax denominator.

    Returns:
        out [B, Hq, Lq, Dv], or (out, lse [B, Hq, Lq] in fp32, fp64 for fp64 inputs). A row with no allowed key gives
        0, and lse -inf or the head's sink.

    Raises:
        ValueError: a shape, dtype, device or length does not fit; the message names the argument and the fix.

    Order: scale, query_scale, softcap, ALiBi, mask, softmax, dropout, times value. Vaswani et al. 2017, section 3.2;
    grouped heads: Ainslie et al. 2023.
    """
    if getattr(query, "is_nested", False):
        from . import nested

        return nested.attention(query, key, value, mask, return_lse, rules)
    if _is_compiling():
        query, flat = _flat_arguments(query, key, rules)
        result = torch.ops.attnpack.attention(query, key, value, mask, **flat)
        return result if return_lse else result[0]
    return _C.attention(query, key, value, mask, return_lse=return_lse, **rules)


def flat_rules(query: Tensor, rules: Any) -> tuple[Tensor, dict[str, Any]]:
    """The query, and keywords among which the rules are, as the ops under torch.ops take them: queries are scaled, and
    the window is two numbers."""
    flat = dict(rules)
    query_scale = flat.pop("query_scale", None)
    if query_scale is not None:
        query = torch.ops.attnpack.scale_queries(query, query_scale)
    window = flat.pop("window", (-1, -1))
    if len(window) != 2:
        raise TypeError(f"attnpack: window is {window}, wants two ints (left, right), -1 for unbounded")
    flat["window_left"], flat["window_right"] = window
    return query, flat


def _flat_arguments(query: Tensor, key: Tensor, rules: Any) -> tuple[Tensor, dict[str, Any]]:
    """`flat_rules` of `attention`: resolves "end" too, and draws the seed of dropout."""
    q_offset, kv_lens = rules.get("q_offset", 0), rules.get("kv_lens")
    query, flat = flat_rules(query, rules)
    if isinstance(q_offset, Tensor):
        flat |= {"q_offset": 0, "q_offsets": q_offset}
    elif q_offset == "end" and kv_lens is None:
        flat["q_offset"] = key.size(2) - query.size(2)
    elif q_offset == "end":
        lens = kv_lens if kv_lens.is_cpu else kv_lens.clamp(0, key.size(2))  # as the operator does
        flat |= {"q_offset": 0, "q_offsets": lens - query.size(2)}
    flat["dropout_seed"] = draw_seed(flat.get("dropout_p", 0.0))
    return query, flat


def draw_seed(dropout_p: float) -> Tensor | None:
    """A seed [1] from torch's generator on the CPU, where there is dropout."""
    return torch.randint(2**63 - 1, (1,), device="cpu") if dropout_p > 0 else None


@spelled_out(ScoresRules, q_offset=0, key_block=1, stage="probs")
def attention_scores(query: Tensor, key: Tensor, mask: Tensor | None = None, **rules: Unpack[ScoresRules]) -> Tensor:
    """The scores that :func:`attention` computes, [B, Hq, Lq, Lkv], for plots, tests and study.

    Args:
        stage: "scaled" or "capped" (both for all keys), "masked" (with ALiBi and mask; -inf for an excluded key),
            "probs" (before dropout) or "named": the probabilities at the keys of key_index alone, in its order,
            [B, Hq, Lq, n * key_block]. They are 0 for -1, and after the first place of a number that stands twice.

    The other arguments are those of :func:`attention`. Unlike `attention`, this function holds Lq x Lkv numbers; stage
    "named" holds those of some rows at a time.
    """
    if _is_compiling():
        query, flat = _flat_arguments(query, key, rules)
        return torch.ops.attnpack.attention_scores(query, key, mask, **flat)
    return _C.attention_scores(query, key, mask, **rules)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the results of two :func:`attention` calls over disjoint keys (give sinks to one part only).

    Args:
        out_a, out_b: [B, H, L, Dv]; lse_a, lse_b: [B, H, L].

    Returns:
        (out, lse) as if all keys had been given at once; a part with lse -inf weighs nothing.
    """
    if _is_compiling():
        return torch.ops.attnpack.merge_states(out_a, lse_a, out_b, lse_b)
    return _C.merge_states(out_a, lse_a, out_b, lse_b)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotates the first r dims of x by the angles whose cosines and sines are given (Su et al. 2021, section 3.4.2).

    Args:
        x: [..., L, D].
        cos, sin: float32 or float64, broadcast to [..., L, r/2].
        interleaved: pairs (2i, 2i + 1) instead of (i, i + r/2).

    Returns:
        The rotated x, in its dtype; computed in fp32 (fp64 for fp64).
    """
    if _is_compiling():
        return torch.ops.attnpack.apply_rope(x, cos, sin, interleaved)
    return _C.apply_rope(x, cos, sin, interleaved)


def rope_table(positions: Tensor, inv_freq: Sequence[float], factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of position * inv_freq, times factor: angles in fp64, tables in fp32.

    Args:
        positions: int64 [...].
        inv_freq: r/2 frequencies.

    Returns:
        (cos, sin), each [..., r/2].
    """
    if _is_compiling():
        return torch.ops.attnpack.rope_table(positions, list(inv_freq), factor)
    return _C.rope_table(positions, inv_freq, factor)


def rope_table_by_length(
    positions: Tensor,
    lengths: Tensor | None,
    inv_freq: Sequence[float],
    factor: float,
    long_inv_freq: Sequence[float],
    growth: float,
    trained_len: int,
) -> tuple[Tensor, Tensor]:
    """`rope_table` for frequencies that follow the length of the sequence, as `RotaryEmbedding` describes them.

    Args:
        positions: int64 [L] or [B, L].
        lengths: [B], default the highest position of a row + 1.
        long_inv_freq: the r/2 frequencies for lengths above trained_len, or none.
        growth: if above 0, lengths above trained_len take the frequencies of a larger base (dynamic NTK).

    Returns:
        (cos, sin), each [L, r/2], or [B, L, r/2] if positions or lengths have B rows.
    """
    if _is_compiling():
        return torch.ops.attnpack.rope_table_by_length(
            positions, lengths, list(inv_freq), factor, list(long_inv_freq), growth, trained_len
        )
    return _C.rope_table_by_length(positions, lengths, inv_freq, factor, long_inv_freq, growth, trained_len)


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The ALiBi slope of every head: 2^(-8 i / n) for i = 1 .. n if n is a power of two (Press et al. 2022)."""
    return tuple(_C.alibi_slopes(num_heads))


def sinusoidal_positions(positions: int, dim: int, *, base: float = 10000.0) -> Tensor:
    """Fixed positions, fp32 [positions, dim] (Vaswani et al. 2017, section 3.5).

    At position p, dims 2i and 2i + 1 hold the sine and the cosine of p / base^(2i / dim).
    `nn.Embedding.from_pretrained(table)` makes them the `embed_positions` of an Encoder or a Decoder.

    Raises:
        ValueError: positions is below 1, dim is odd, or base is no number above 0.
    """
    return _C.sinusoidal_positions(positions, dim, base)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input weight^T + bias, as torch's linear, on the CPU by the fastest kernel for the CPU, the dtype and the size.

    Up to 16 rows of input read the weight once, on AMD's Zen 4 and 5 up to 24 in fp32 and 32 in bf16. A row's result
    does not depend on how many of these rows there are, nor on gradients. `attnpack info` names the kernel for more.
    The environment variable ATTNPACK_LINEAR pins one for all: "torch" (its linear) or "onednn".

    Args:
        input: [..., in], weight: [out, in], bias: [out].

    Returns:
        [..., out], accumulated in fp32 and rounded once.
    """
    if _is_compiling():
        return torch.ops.attnpack.linear(input, weight, bias)
    return _C.linear(input, weight, bias)


def linears(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> list[Tensor]:
    """`linear` of one input with several weights, which one call reads all.

    Args:
        input: [..., in]; weights: each [out, in]; biases: none, or one [out] for each weight.

    Returns:
        A list of [..., out], the results of `linear`.
    """
    if _is_compiling():
        return torch.ops.attnpack.linears(input, weights, biases)
    return _C.linears(input, weights, biases)


def quantize_rows(x: Tensor, bits: int) -> Tensor:
    """Rows as bytes: integers in blocks of 32, each block with a scale in fp16; 8.5 or 4.5 bits per number.

    With 4 bits a row is rotated by a Hadamard matrix first, so that no number stands out of its block (QuaRot, Ashkboos
    et al. 2024, section 4).

    Args:
        x: [..., dim], float64, float32, bfloat16 or float16.
        bits: 8 or 4.

    Returns:
        [..., row bytes] uint8: dim integers, then ceil(dim / 32) scales. With 8 bits an integer is x * 127 / max |x| of
        its block, with 4 bits one of 16 steps. A block with a number that is not finite becomes NaN.
    """
    return (torch.ops.attnpack if _is_compiling() else _C).quantize_rows(x, bits)


def dequantize_rows(rows: Tensor, bits: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers [..., dim] of rows that `quantize_rows` made, in dtype."""
    return (torch.ops.attnpack if _is_compiling() else _C).dequantize_rows(rows, bits, dim, dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019); one pass without gradients.

    Args:
        x: [..., dim], weight: [dim].

    Returns:
        [..., dim] in x's dtype, computed in fp32 (fp64 for fp64).
    """
    if _is_compiling():
        return torch.ops.attnpack.rms_norm(x, weight, eps)
    return _C.rms_norm(x, weight, eps)


class LayerRules(Rules, total=False):
    """Keywords of the functions of every layer: `attend`, `attend_shared` and `latent_attend`."""

    rope: Rope
    positions: Tensor | None
    mask: Tensor | None
    kv_lens: Tensor | None
    key_index: Tensor | None


class AttendRules(LayerRules, total=False):
    """Keywords of `attend`."""

    cross: bool
    cache: CacheTensors | tuple[Tensor, Tensor, Tensor] | None
    key_block: int
    top_blocks: int
    local_blocks: int
    scorer: str
    at_names: bool


class LatentRules(LayerRules, total=False):
    """Keywords of `latent_attend`."""

    cross: bool
    cache: tuple[Tensor, Tensor] | None
    at_names: bool


@spelled_out(AttendRules, cross=False, key_block=1, top_blocks=0, local_blocks=0, scorer="mean", at_names=False)
def attend(
    query: Tensor, key: Tensor, value: Tensor, *, need_weights: bool = False, **rules: Unpack[AttendRules]
) -> Tensor | tuple[Tensor, Tensor]:
    """The steps after the projections of every attention layer: rotate, append to the cache, attend, join the heads.

    Args:
        query: [B, Hq, L, D], key: [B, Hkv, Lkv, D], value: [B, Hkv, Lkv, Dv], before rotation.
        rope: `RotaryEmbedding.settings` or its first three numbers as a tuple; None for no rotation.
        positions: int64 [L] or [B, L], for RoPE only; default the positions after the cached ones, or 0..L-1.
        cross: keys come from another sequence and are rotated at 0..Lkv-1.
        cache: (key [B, Hkv, capacity, D], value [B, Hkv, capacity, Dv], lengths [B] int64); the call writes into them.
            CacheTensors say more.
        kv_lens: [B], the number of valid new tokens of each sequence (with cross: of valid context keys).
        key_index, key_block: as in `attention`; with a cache they name positions of the cache.
        top_blocks, local_blocks, scorer: with top_blocks above 0, `select_blocks` chooses that many blocks of
            key_block keys for each query, by the rotated queries and all keys.
        at_names: the probabilities are those at the keys of key_index alone, as stage "named" of `attention_scores`
            gives them.

    Returns:
        out [B, L, Hq * Dv], or (out, probabilities before dropout [B, Hq, L, keys]) with need_weights.
    """
    if not _is_compiling():
        cache = rules.get("cache")
        if isinstance(cache, tuple) and len(cache) == 3:
            rules["cache"] = CacheTensors(*cache)
        return _C.attend(query, key, value, need_weights=need_weights, **with_native_rope(rules))
    query, flat = flat_layer(query, rules)
    held = CacheTensors(*(rules.get("cache") or (None, None, None)))
    flat |= {f"cache_{name}": part for name, part in zip(CacheTensors._fields, held, strict=True)}
    if not need_weights:
        flat.pop("at_names", None)
        return torch.ops.attnpack.attend(query, key, value, **flat)
    return torch.ops.attnpack.attend_with_weights(query, key, value, **flat)


@spelled_out(LatentRules, cross=False, at_names=False)
def latent_attend(
    query: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b: Tensor | None,
    v_dim: int,
    path: str,
    *,
    need_weights: bool = False,
    **rules: Unpack[LatentRules],
) -> Tensor | tuple[Tensor, Tensor]:
    """The steps after the projections of latent attention: rotate, append the latents, attend, join the heads.

    Args:
        query: [B, H, L, N + R], whose last R dims rotate; latent: [B, Lkv, C]; k_rope: [B, Lkv, R], before rotation.
        kv_b: [H * (N + V), C], or None if query and output are in the latent space.
        v_dim: V; path: "auto", "expanded" or "absorbed", see MultiHeadLatentAttention.
        cache: (latents [B, 1, capacity, C + R], lengths [B] int64); the call writes into them.
        scale: factor on the scores; default 1 / sqrt of query's last dim.
        key_index: [B, 1, L, n], as in `attention`; with a cache they name positions of the cache.

    The other arguments are those of `attend`.

    Returns:
        out [B, L, H * V] (H * C without kv_b), or (out, probabilities before dropout [B, H, L, keys]).
    """
    if not _is_compiling():
        given = with_native_rope(rules)
        return _C.latent_attend(query, latent, k_rope, kv_b, v_dim, path, need_weights=need_weights, **given)
    query, flat = flat_layer(query, rules)
    flat["cache_latents"], flat["cache_lengths"] = rules.get("cache") or (None, None)
    tokens = query, latent, k_rope, kv_b, v_dim, path
    if not need_weights:
        flat.pop("at_names", None)
        return torch.ops.attnpack.latent_attend(*tokens, **flat)
    return torch.ops.attnpack.latent_attend_with_weights(*tokens, **flat)


def latent_append(
    query: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    *,
    rope: Rope = None,
    positions: Tensor | None = None,
    cross: bool = False,
    cache: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    kv_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first half of `latent_attend`, for a kv_b that is no plain matrix.

    Returns:
        The rotated query, the latents [B, 1, K, C + R] to read, and q_offset [B] and kv_lens [B] for `attention`.
    """
    latents, lengths = cache or (None, None)
    return torch.ops.attnpack.latent_append(
        query, latent, k_rope, cache_latents=latents, cache_lengths=lengths, **flat_rope(rope), positions=positions,
        cross=cross, mask=mask, causal=causal, kv_lens=kv_lens,
    )  # fmt: skip


def native_rope(rope: Rope) -> _C.RopeSettings | None:
    return _C.RopeSettings(*rope) if isinstance(rope, tuple) else rope


def with_native_rope(rules: Any) -> dict[str, Any]:
    """The keywords, with `rope` as C++ has it."""
    return rules | {"rope": native_rope(rules["rope"])} if isinstance(rules.get("rope"), tuple) else rules


def flat_rope(rope: Rope) -> dict[str, Any]:
    """rope as keywords of the layer ops."""
    given = () if rope is None else rope.numbers() if isinstance(rope, _C.RopeSettings) else rope
    names = ("inv_freq", "factor", "interleaved", "long_inv_freq", "growth", "trained_len", "raw_keys")
    return {f"rope_{name}": number for name, number in zip(names, given, strict=False)}


def flat_layer(query: Tensor, rules: Any) -> tuple[Tensor, dict[str, Any]]:
    """`flat_rules` of a layer's function, without its cache."""
    query, flat = flat_rules(query, rules)
    flat.pop("cache", None)
    return query, flat | flat_rope(flat.pop("rope", None))
