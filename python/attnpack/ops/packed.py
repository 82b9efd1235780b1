"""Attention of packed sequences: they stand one after the other in one tensor, without padding."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from .. import _C
from .._C import checks
from ..signatures import PackedRules, spelled_out
from .fast_path import fast_path
from .rules import check_keywords, draw_seed, flat_rules

_KEYWORDS = frozenset(PackedRules.__annotations__) - {"key_index"} | {"q_offset"}


@overload
def attention_varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor,
                     cu_seqlens_k: Tensor | None = None, *, return_lse: Literal[False] = False,
                     **rules: Unpack[PackedRules]) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor,
                     cu_seqlens_k: Tensor | None = None, *, return_lse: Literal[True],
                     **rules: Unpack[PackedRules]) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor,
                     cu_seqlens_k: Tensor | None = None, *, return_lse: bool,
                     **rules: Unpack[PackedRules]) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@fast_path("attention_varlen")
@spelled_out(PackedRules, torch.ops.attnpack.attention_varlen)
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: bool = False,
    **rules: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed sequences: each attends only its own keys, as one :func:`attention` call per sequence.

    The work is the sum over the sequences, and on the CPU the bits are those of one call per sequence, forward and
    backward. On CUDA the kernels take all sequences in one call, and read cu_seqlens on the device; dropout and chunk
    are one call per sequence there. Causality and window are bottom-right here, unlike in :func:`attention`: row i of a
    sequence of Lq queries and Lk keys stands at position i + Lk - Lq.

    Keys may stand in pages, as in PagedAttention (Kwon et al. 2023). On the CPU the bits are those of packed keys. On
    CUDA kernels read the pages in 16 bits, with head dims of up to 256; else they are gathered first.

    Args:
        query: [T, Hq, D], float64, float32, bfloat16 or float16; any strides.
        key: [S, Hkv, D], value: [S, Hkv, Dv], in the dtype of query. With block_table they are pools of pages of any
            strides, [num_pages, page_size, Hkv, D] and [num_pages, page_size, Hkv, Dv]; other layouts are views.
        cu_seqlens_q: int32 or int64 [B + 1] on any device; sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        cu_seqlens_k: the same for keys; default cu_seqlens_q.
        max_seqlen_q, max_seqlen_k: hints, from which nothing is read. On CUDA they choose among kernels.
        block_table: int32 [B, max_pages] on any device: key j of sequence b is row j % page_size of page
            block_table[b, j // page_size]. Sequences may share pages. Entries after those that kv_lens needs may be
            anything, and no other page is read. Pools have no gradients; query and sinks have.
        kv_lens: int32 or int64 [B] on any device, the keys of each sequence in pages; it goes with block_table.
        causal: keep keys j <= i + Lk - Lq.
        window: (left, right): keep pos - left <= j <= pos + right, inclusive; -1 = unbounded.
        chunk: keep keys of the query's chunk of so many positions.
        softcap, sinks, alibi_slopes, head_map, scale, return_lse: as in :func:`attention`.
        query_scale: float [T], as in :func:`attention`.
        dropout_p: dropout on the probabilities; each sequence has a draw of its own.
        key_index: refused, because the keys of packed sequences have no numbers of their own.

    Returns:
        out [T, Hq, Dv], or (out, lse [Hq, T] in fp32, fp64 for fp64 inputs). A row with no allowed key gives 0, and
        lse -inf or the head's sink.

    Raises:
        ValueError: a shape, dtype or device does not fit, or cu_seqlens do not start at 0, fall, or do not end at T (S
            for keys), or an entry of block_table that kv_lens needs is not a page, or a pool requires a gradient, or
            key_index is given; the message names the argument and the fix. On CUDA ATTNPACK_CHECK=1 in the environment
            asks for the checks of numbers in cu_seqlens, kv_lens and block_table, which wait for the device. Without it
            the kernels clamp them.
    """
    if rules.pop("key_index", None) is not None:
        raise ValueError(
            "attnpack: key_index is given, attention_varlen wants none: call attention for each sequence, or for "
            "padded tensors with kv_lens"
        )
    if "q_offset" in rules:
        checks.unexpected_keyword("attention_varlen", "q_offset", [], "")
    return attend_packed(query, key, value, cu_seqlens_q, cu_seqlens_k, return_lse=return_lse, **rules)


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: bool = False,
    **rules: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_varlen`, with q_offset as in `attention`, by default "end"."""
    if not torch.compiler.is_compiling():
        return _C.attention_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, rules | {"return_lse": return_lse})
    check_keywords("attention_varlen", rules, _KEYWORDS)
    query, flat = flat_rules(query, rules)
    q_offset = flat.pop("q_offset", "end")
    if isinstance(q_offset, Tensor):
        flat["q_offsets"] = q_offset
    elif q_offset != "end":
        flat["q_offset"] = q_offset
    flat["dropout_seed"] = draw_seed(flat.get("dropout_p", 0.0))
    result = torch.ops.attnpack.attention_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, **flat)
    return result if return_lse else result[0]
