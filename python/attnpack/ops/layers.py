"""The work of attention layers beside their projections: they rotate, append to a cache, attend and join the heads.

Layers of other kinds then gate the heads, or subtract some from others (differential attention).

B batch, H heads, Hq / Hkv query / kv heads, L length, D head dim, Dv of values.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from torch import Tensor

from .. import _C
from ..signatures import Rules, spelled_out
from .positions import Rope, flat_rope, with_native_rope
from .rules import flat_rules

_is_compiling = torch.compiler.is_compiling


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
    """The pages of a PagedCache, int32 [B, max_pages]; key and value are then its pools [num_pages, page_size, Hkv, D]
    and [num_pages, page_size, Hkv, Dv]."""
    block_sums: Tensor | None = None
    """A SparseCache's [B, Hkv, blocks, D]: the sums of each block of keys, in fp32 at least. A call that chooses
    blocks by their mean writes them."""


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


class SharedRules(LayerRules, total=False):
    """Keywords of `attend_shared`."""

    key_block: int


class LatentRules(LayerRules, total=False):
    """Keywords of `latent_attend`."""

    cross: bool
    cache: tuple[Tensor, Tensor] | None
    at_names: bool


@spelled_out(AttendRules, torch.ops.attnpack.attend_with_weights)
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
        at_names: the probabilities are those at only the keys of key_index, as stage "named" of `attention_scores`
            gives them.

    Returns:
        out [B, L, Hq * Dv], or (out, probabilities before dropout [B, Hq, L, keys]) with need_weights.
    """
    cache = rules.get("cache")
    if isinstance(cache, tuple) and len(cache) == 3:
        rules["cache"] = CacheTensors(*cache)
    return attend_by(rules, query, key, value, need_weights)


def attend_by(
    rules: Any, query: Tensor, key: Tensor, value: Tensor, need_weights: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """`attend` with its keywords in one dict: Python takes 0.2 us for each keyword that it collects in `**rules`."""
    if not _is_compiling():
        return _C.attend(query, key, value, need_weights, with_native_rope(rules))
    query, flat = flat_layer(query, rules)
    tensors = CacheTensors(*(rules.get("cache") or (None, None, None)))
    flat |= {f"cache_{name}": part for name, part in zip(CacheTensors._fields, tensors, strict=True)}
    if not need_weights:
        flat.pop("at_names", None)
        return torch.ops.attnpack.attend(query, key, value, **flat)
    return torch.ops.attnpack.attend_with_weights(query, key, value, **flat)


@overload
def attend_shared(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, need_weights: Literal[False] = False,
                  **rules: Unpack[SharedRules]) -> Tensor: ...  # fmt: skip
@overload
def attend_shared(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, need_weights: Literal[True],
                  **rules: Unpack[SharedRules]) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attend_shared(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, need_weights: bool,
                  **rules: Unpack[SharedRules]) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@spelled_out(SharedRules, torch.ops.attnpack.attend_shared)
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
        return _C.attend_shared(query, key, value, lengths, need_weights, with_native_rope(rules))
    op = torch.ops.attnpack.attend_shared_with_weights if need_weights else torch.ops.attnpack.attend_shared
    query, flat = flat_layer(query, rules)
    return op(query, key, value, lengths, **flat)


@spelled_out(LatentRules, torch.ops.attnpack.latent_attend_with_weights)
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
    return latent_attend_by(rules, (query, latent, k_rope, kv_b, v_dim, path), need_weights)


def latent_attend_by(rules: Any, tokens: tuple, need_weights: bool) -> Tensor | tuple[Tensor, Tensor]:
    """`latent_attend` with its keywords in one dict, as `attend_by`."""
    if not _is_compiling():
        return _C.latent_attend(*tokens, need_weights, with_native_rope(rules))
    query, *others = tokens
    query, flat = flat_layer(query, rules)
    flat["cache_latents"], flat["cache_lengths"] = rules.get("cache") or (None, None)
    if not need_weights:
        flat.pop("at_names", None)
        return torch.ops.attnpack.latent_attend(query, *others, **flat)
    return torch.ops.attnpack.latent_attend_with_weights(query, *others, **flat)


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


def flat_layer(query: Tensor, rules: Any) -> tuple[Tensor, dict[str, Any]]:
    """`flat_rules` of a layer's function, without its cache."""
    query, flat = flat_rules(query, rules)
    flat.pop("cache", None)
    return query, flat | flat_rope(flat.pop("rope", None))


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
