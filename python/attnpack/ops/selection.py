"""What layers compute beside `attend`, as Python functions: gates on the heads' outputs, attention over the cache
of another layer, the differences of differential attention, and which keys a query is to attend.

B batch, H heads, Hq / Hkv query / kv heads, L length, D head dim.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from .. import _C
from ..signatures import spelled_out
from .operator import LayerRules, Rope, flat_layer, flat_rope, native_rope, with_native_rope

_is_compiling = torch.compiler.is_compiling


class SharedRules(LayerRules, total=False):
    """Keywords of `attend_shared`."""

    key_block: int


def gate_heads(joined: Tensor, gate: Tensor, num_heads: int, activation: str = "sigmoid") -> Tensor:
    """The heads' outputs times f(gate), before the output projection (Qiu et al. 2025, arXiv 2505.06708).

    Args:
        joined: [B, L, H * D].
        gate: [B, L, H], one number per head, or [B, L, H * D].
        num_heads: H.
        activation: f, "sigmoid" or "softplus".

    Returns:
        [B, L, H * D] in joined's dtype.

    Raises:
        ValueError: gate has neither shape, or the activation another name.
    """
    return (torch.ops.attnpack if _is_compiling() else _C).gate_heads(joined, gate, num_heads, activation)


@overload
def attend_shared(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, need_weights: Literal[False] = False,
                  **rules: Unpack[SharedRules]) -> Tensor: ...  # fmt: skip
@overload
def attend_shared(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, need_weights: Literal[True],
                  **rules: Unpack[SharedRules]) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attend_shared(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, need_weights: bool,
                  **rules: Unpack[SharedRules]) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@spelled_out(SharedRules, key_block=1)
def attend_shared(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, need_weights: bool = False, **rules: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`attend` for queries over keys that another layer's cache holds (Brandon et al. 2024, arXiv 2405.12981).

    Args:
        query: [B, Hq, L, D], before rotation. Its last token stands at the last position of its sequence.
        key: [B, Hkv, capacity, D], value: [B, Hkv, capacity, Dv], as the cache holds them; nothing is written.
        lengths: int64 [B], the positions of each sequence, those of query's tokens among them.
        kv_lens: [B], how many of query's tokens are valid; default all.

    The other arguments and the result are those of `attend`.
    """
    if not _is_compiling():
        return _C.attend_shared(query, key, value, lengths, need_weights=need_weights, **with_native_rope(rules))
    op = torch.ops.attnpack.attend_shared_with_weights if need_weights else torch.ops.attnpack.attend_shared
    query, flat = flat_layer(query, rules)
    return op(query, key, value, lengths, **flat)


def pair_values(value: Tensor) -> Tensor:
    """Values as the heads of differential attention read them: kv heads j and j + Hkv / 2 side by side, once for each
    half of the kv heads. [B, Hkv, L, D] -> [B, Hkv, L, 2 * D]."""
    return (torch.ops.attnpack if _is_compiling() else _C).pair_values(value)


def subtract_halves(
    joined: Tensor,
    num_heads: int,
    lambda_q1: Tensor,
    lambda_k1: Tensor,
    lambda_q2: Tensor,
    lambda_k2: Tensor,
    lambda_init: float,
    eps: float,
) -> Tensor:
    """(1 - lambda_init) * norm(out_h - lambda * out_(h + H / 2)), the first form of differential attention (Ye et al.
    2024, arXiv 2410.05258, section 2.1).

    lambda is exp(q1 k1) - exp(q2 k2) + lambda_init, and norm an RMSNorm without weights over a head.

    Args:
        joined: [B, L, H * W]; num_heads: H, an even number.
        lambda_q1, lambda_k1, lambda_q2, lambda_k2: each [D].

    Returns:
        [B, L, H / 2 * W].
    """
    return (torch.ops.attnpack if _is_compiling() else _C).subtract_halves(
        joined, num_heads, lambda_q1, lambda_k1, lambda_q2, lambda_k2, lambda_init, eps
    )


def subtract_pairs(joined: Tensor, lambdas: Tensor) -> Tensor:
    """out_(2 h) - sigmoid(lambda_h) * out_(2 h + 1), the second form of differential attention (Ye et al. 2026,
    Differential Transformer V2).

    Args:
        joined: [B, L, 2 * H * D]; lambdas: [B, L, H].

    Returns:
        [B, L, H * D].
    """
    return (torch.ops.attnpack if _is_compiling() else _C).subtract_pairs(joined, lambdas)


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
            `attention_scores` gives them. Of equal names in a row the first counts. Outside of graphs the memory then
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
        mask: as in `select_keys`. Of a block the key that may attend most counts. The mean is over all valid keys.
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


def compress_tokens(value: Tensor, gate: Tensor, bias: Tensor, overlap: bool = False) -> Tensor:
    """The entries of DeepSeek-V4's compressed attention: of each full window the sum of softmax(gate + bias) * value
    over its tokens, for each dim.

    Args:
        value, gate: [B, L, D], or with overlap [B, L, 2 * D]: the first D belong to the window's successor.
        bias: [tokens of a window, D or 2 * D].
        overlap: an entry is made of two windows, the one before and its own.

    Returns:
        [B, L / tokens, D].

    Raises:
        ValueError: a shape does not fit.
    """
    return torch.ops.attnpack.compress_tokens(value, gate, bias, overlap)


def name_entries(
    query: Tensor,
    entries: Tensor,
    weights: Tensor,
    top_k: int,
    *,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = True,
    rate: int,
) -> Tensor:
    """The entries that each query attends: the top_k by sum_h weights_h * relu(query_h key), of those that it sees.

    Args:
        query: [B, H, L, D], before rotation.
        entries: [B, 1, n, D], before rotation; entry i stands where token i * rate does.
        weights: [B, L, H].
        top_k: how many.
        cos, sin: [L, r/2], the angles of the tokens, which rotate the last r dims.
        interleaved: pairs (2i, 2i + 1) instead of (i, i + r/2).
        rate: tokens of an entry. A query sees an entry from the last of these tokens on.

    Returns:
        int32 [B, 1, L, min(top_k, n)], -1 for none.

    Raises:
        ValueError: a shape does not fit.
    """
    return torch.ops.attnpack.name_entries(query, entries, weights, top_k, cos, sin, interleaved, rate)


def attend_entries(
    query: Tensor,
    key: Tensor,
    entries: Tensor | None,
    named: Tensor | None,
    sinks: Tensor,
    *,
    window: int,
    scale: float | None = None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = True,
    rate: int,
) -> Tensor:
    """Attention over the last `window` tokens and over entries, in one softmax. The keys are the values too, and their
    rotation is undone at the position of the query.

    Args:
        query: [B, H, L, D], before rotation.
        key: [B, 1, L, D], before rotation.
        entries: [B, 1, n, D], before rotation, or None.
        named: of `name_entries`; None for all that a query sees.
        sinks: [H], logits that join the denominator.
        window: a token sees so many tokens: itself, and those right before it.
        scale: default 1 / sqrt(D).
        cos, sin, interleaved, rate: as in `name_entries`.

    Returns:
        [B, L, H * D].

    Raises:
        ValueError: a shape does not fit.
    """
    return torch.ops.attnpack.attend_entries(
        query, key, entries, named, sinks, window, scale, cos, sin, interleaved, rate
    )


def project_groups(joined: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Each group of heads projected by rows of its own: [B, L, groups * W] by weight [groups * R, W] -> [B, L, groups *
    R].

    Raises:
        ValueError: a shape does not fit.
    """
    return torch.ops.attnpack.project_groups(joined, weight, groups)
