"""Which keys, or blocks of keys, a query is to attend, and the loss that trains an indexer.

B batch, H heads, Hq / Hkv query / kv heads, L length, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from .positions import Rope, flat_rope, native_rope

_is_compiling = torch.compiler.is_compiling


def select_keys(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    top_k: int,
    *,
    causal: bool = False,
    q_offsets: Tensor | None = None,
    kv_lens: Tensor | None = None,
    mask: Tensor | None = None,
    local_keys: int = 0,
) -> Tensor:
    """The keys that each query is to attend by DeepSeek-V3.2's lightning indexer: the best by sum_h w_h relu(q_h k).

    No gradient flows through the choice.

    Args:
        query: [B, H, L, D] of the indexer's heads, key: [B, 1, Lkv, D], both rotated; weights: [B, L, H].
        top_k: how many keys a query attends at most.
        causal: keep keys j <= i + q_offsets.
        q_offsets: [B] int64, the position of query row 0 of each sequence; default 0.
        kv_lens: [B], valid keys of each sequence; default all.
        mask: bool (True = may attend) or floating, broadcastable to [B, heads, L, Lkv]: it is added to the scores, and
            of heads that share a choice the largest counts. A key at -inf is not named.
        local_keys: how many keys up to the query's own position are among them in any case.

    Returns:
        int32 [B, 1, L, min(top_k, Lkv)], the best first, -1 where a query has fewer keys.

    Raises:
        ValueError: a shape, dtype or device does not fit.
    """
    names = torch.ops.attnpack if _is_compiling() else _C
    return names.select_keys(query, key, weights, top_k, causal, q_offsets, kv_lens, mask, local_keys)


def index_keys(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    top_k: int,
    local_keys: int = 0,
    *,
    cache: tuple[Tensor, Tensor] | None = None,
    rope: Rope = None,
    positions: Tensor | None = None,
    causal: bool = False,
    kv_lens: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """`select_keys` for the new tokens of an indexer: rotate, append the keys to the cache, select among all keys.

    Args:
        query: [B, H, L, D], key: [B, 1, L, D], before rotation, of which the first dims rotate; weights: [B, L, H].
        cache: (keys [B, 1, capacity, D], lengths [B] int64), as a LatentCache reserves them; the call writes into them.
        rope, positions, kv_lens: as in `attend`.

    The other arguments, the result and the errors are those of `select_keys`; the numbers are positions of the cache.
    """
    if not _is_compiling():
        return _C.index_keys(
            query, key, weights, top_k, local_keys, cache, native_rope(rope), positions, causal, kv_lens, mask
        )  # fmt: skip
    return torch.ops.attnpack.index_keys(
        query, key, weights, top_k, local_keys, *(cache or (None, None)), **flat_rope(rope), positions=positions,
        mask=mask, causal=causal, kv_lens=kv_lens,
    )  # fmt: skip


def indexer_loss(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    probabilities: Tensor,
    key_index: Tensor | None = None,
    *,
    rope: Rope = None,
    positions: Tensor | None = None,
    causal: bool = False,
    kv_lens: Tensor | None = None,
    mask: Tensor | None = None,
    at_names: bool = False,
) -> Tensor:
    """The mean over the valid queries of KL(p || softmax(I)), which trains an indexer (DeepSeek-V3.2, section 2.1).

    p is the sum over the heads of the probabilities, divided by its own sum. I = sum_h w_h relu(q_h k) / sqrt(H D).
    Gradients flow into query, key and weights.

    Args:
        query: [B, H, L, D], key: [B, 1, L, D], before rotation; weights: [B, L, H].
        probabilities: [B, Hq, L, L], those of attention over all keys, or over the named ones.
        key_index: [B, 1, L, n], the keys that I covers; default all. -1 names none.
        rope, positions, causal, kv_lens: as in `attend`.
        mask: as in `select_keys`. A query that it leaves no key does not count.
        at_names: the probabilities are [B, Hq, L, n], those at the keys of key_index in its order, as stage "named" of
            `attention_scores` gives them. The first of equal names in a row counts. Outside of graphs the memory then
            grows with n, and not with the keys.

    Returns:
        A number [], in fp32 at least.

    Raises:
        ValueError: a shape, dtype or device does not fit.
    """
    if not _is_compiling():
        return _C.indexer_loss(
            query, key, weights, probabilities, key_index, native_rope(rope), positions, causal, kv_lens, mask, at_names
        )  # fmt: skip
    return torch.ops.attnpack.indexer_loss(
        query, key, weights, probabilities, key_index, **flat_rope(rope), positions=positions, mask=mask,
        causal=causal, kv_lens=kv_lens, at_names=at_names,
    )  # fmt: skip


def select_blocks(
    query: Tensor,
    key: Tensor,
    block: int,
    top_blocks: int,
    *,
    local_blocks: int = 1,
    scorer: str = "mean",
    causal: bool = False,
    q_offsets: Tensor | None = None,
    kv_lens: Tensor | None = None,
    mask: Tensor | None = None,
    block_sums: Tensor | None = None,
) -> Tensor:
    """The blocks of keys that the query heads of a kv head are to attend, by the sum of their scores.

    No gradient flows through the choice.

    Args:
        query: [B, Hq, L, D], key: [B, Hkv, Lkv, D].
        block: keys of a block; top_blocks: how many blocks a query attends at most.
        local_blocks: its own block and those before it, which it attends in any case; at least 1 for a causal "mean".
        scorer: "mean", query times the mean of a block's valid keys (MoBA, Lu et al. 2025, arXiv 2502.13189), or "max",
            the greatest product of the query and a key of the block, as MiniMax-M3's indexer.
        mask: as in `select_keys`. In a block the key that may attend most counts. The mean is over all valid keys.
        block_sums: [B, Hkv, at least as many as there are blocks, D], the sums of each block's valid keys in fp32 (fp64
            of fp64 keys). With them "mean" does not read the keys.

    The other arguments and errors are those of `select_keys`.

    Returns:
        int32 [B, Hkv, L, min(top_blocks, blocks)], the best first, -1 where a query has fewer blocks.
    """
    names = torch.ops.attnpack if _is_compiling() else _C
    return names.select_blocks(
        query, key, block, top_blocks, local_blocks, scorer, causal, q_offsets, kv_lens, mask, block_sums
    )
