"""Attention, its scores, and results over parts of the keys joined.

B batch, Hq / Hkv query / kv heads, Lq / Lkv lengths, D head dim of queries and keys, Dv of values.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from .. import _C
from ..signatures import AttentionRules, ScoresRules, spelled_out
from . import nested
from .fast_path import fast_path
from .rules import check_keywords, draw_seed, flat_rules

_is_compiling = torch.compiler.is_compiling
_KEYWORDS = frozenset(AttentionRules.__annotations__)
_SCORES_KEYWORDS = frozenset(ScoresRules.__annotations__)


@overload
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *,
              return_lse: Literal[False] = False, **rules: Unpack[AttentionRules]) -> Tensor: ...  # fmt: skip
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, return_lse: Literal[True],
              **rules: Unpack[AttentionRules]) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, return_lse: bool,
              **rules: Unpack[AttentionRules]) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@fast_path("attention")
@spelled_out(AttentionRules, torch.ops.attnpack.attention)
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, return_lse: bool = False, **rules: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * query key^T + mask) value, with grouped heads and nothing of size Lq x Lkv in memory.

    Args:
        query: [B, Hq, Lq, D], float64, float32, bfloat16 or float16; any strides. Or all three are jagged nested
            tensors [B, H, L*, D], which mean one call per sequence; they take no mask and no kv_lens, and a query_scale
            that is jagged, [B, L*].
        key: [B, Hkv, Lkv, D], value: [B, Hkv, Lkv, Dv], in the dtype of query.
        mask: bool (True = may attend) or additive float, broadcastable to [B, Hq, Lq, Lkv], right-aligned.
        causal: keep keys j <= i + q_offset.
        q_offset: position of query row 0: an int, an integer tensor [B], or "end" (valid keys - Lq). 0 is top-left.
        window: (left, right): keep pos - left <= j <= pos + right, inclusive; -1 = unbounded.
        chunk: keep keys of the query's chunk of so many positions, pos // chunk == j // chunk. On the CPU the keys of
            other chunks are not read; on CUDA a mask [Lq, Lkv] hides them. (Llama 4's chunked attention.)
        kv_lens: [B] int32 or int64, valid keys of each sequence; keys beyond them are never read into the result.
        softcap: c > 0: scores become c * tanh(score / c).
        sinks: [Hq], one logit per head that joins the softmax denominator only.
        alibi_slopes: [Hq], adds -slope * abs(pos - j); no gradient.
        head_map: Hq ints, the kv head that each query head reads; default h // (Hq // Hkv). Groups may be uneven.
        dropout_p: dropout on the probabilities; the seed comes from torch's generator.
        scale: default 1 / sqrt(D).
        query_scale: float [Lq] or [B, Lq], a factor on the scaled scores of each query row, before the soft cap; it
            gets a gradient. The queries are multiplied by it, and rounded once to their dtype: in float16 the products
            must stay below 65504. (Llama 4 and Mistral 4 have such factors.)
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
        return nested.attention(query, key, value, mask, return_lse, rules)
    if _is_compiling():
        check_keywords("attention", rules, _KEYWORDS)
        query, flat = flat_arguments(query, key, rules)
        result = torch.ops.attnpack.attention(query, key, value, mask, **flat)
        return result if return_lse else result[0]
    return _C.attention(query, key, value, mask, rules | {"return_lse": return_lse})


def flat_arguments(query: Tensor, key: Tensor, rules: Any) -> tuple[Tensor, dict[str, Any]]:
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


@fast_path("attention_scores")
@spelled_out(ScoresRules, torch.ops.attnpack.attention_scores)
def attention_scores(query: Tensor, key: Tensor, mask: Tensor | None = None, **rules: Unpack[ScoresRules]) -> Tensor:
    """The scores that :func:`attention` computes, [B, Hq, Lq, Lkv], for plots, tests and study.

    Args:
        stage: "scaled" or "capped" (both for all keys), "masked" (with ALiBi and mask; -inf for an excluded key),
            "probs" (before dropout) or "named": the probabilities at only the keys of key_index, in its order,
            [B, Hq, Lq, n * key_block]. They are 0 for -1, and after the first place of a number that stands twice.

    The other arguments are those of :func:`attention`. Unlike `attention`, this function holds Lq x Lkv numbers; stage
    "named" holds those of some rows at a time.
    """
    if _is_compiling():
        check_keywords("attention_scores", rules, _SCORES_KEYWORDS)
        query, flat = flat_arguments(query, key, rules)
        return torch.ops.attnpack.attention_scores(query, key, mask, **flat)
    return _C.attention_scores(query, key, mask, rules)


@fast_path("merge_states")
def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the results of two :func:`attention` calls over disjoint keys (give sinks to one part only).

    Args:
        out_a, out_b: [B, H, L, Dv]; lse_a, lse_b: [B, H, L].

    Returns:
        (out, lse) as if all keys had been given at once; a part with lse -inf weighs nothing.
    """
    if _is_compiling():
        return torch.ops.attnpack.merge_states(out_a, lse_a, out_b, lse_b)
    return _C.merge_states(out_a, lse_a, out_b, lse_b, {})
