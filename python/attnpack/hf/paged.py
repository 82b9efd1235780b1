"""Continuous batching: the requests of transformers' `generate_batch` on the operator, each with its own keys alone.

T new tokens of all requests, S keys of all requests, R requests, Hq query heads, Hkv KV heads, D head_dim.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from ..varlen import attention_varlen

PAGED_ARGUMENTS = ("cache", "read_index", "write_index", "cu_seq_lens_q", "cu_seq_lens_k")
_MANAGER = continuous_api.ContinuousBatchingManager


def is_paged(others: dict[str, Any]) -> bool:
    """Whether the keywords of an attention function are those of continuous batching."""
    return isinstance(others.get("cache"), PagedAttentionCache)


def attend_paged(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, Dv]
    others: dict[str, Any],
    *,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,  # [Hq]
) -> Tensor:
    """Writes the new keys into the pages of `others["cache"]` and attends them there. No key is copied, but those of
    layers with a sliding window: transformers keeps them in a ring, and gathers them in order.

    Returns:
        out [1, T, Hq, Dv].
    """
    cache = others["cache"]
    layer = module.layer_idx
    allocator = cache.layer_to_allocator[layer]
    read, write = others["read_index"][allocator.index], others["write_index"][allocator.index]
    ends_q, ends_k = others["cu_seq_lens_q"], others["cu_seq_lens_k"][allocator.layer_type]
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    pages: dict[str, Tensor] = {}
    if read.numel() and allocator.supports_block_table:
        allocator.update(key, value, layer, read[:0], write)
        key, value = allocator.get_cache_for_block_table(layer)
        pages = {"block_table": _block_table(read, ends_k, key.size(1)), "kv_lens": ends_k.diff()}
    else:
        key, value = allocator.update(key, value, layer, read, write)
        pages = {"cu_seqlens_k": ends_k}
    valid = int(ends_q[-1])  # fixed shapes have more rows, which no request owns
    out = query.new_zeros(*query.shape[:2], value.size(-1))
    window = getattr(allocator, "sliding_window", 0)
    out[:valid] = attention_varlen(
        query[:valid], key, value, ends_q, **pages, causal=True, window=(window - 1, -1), softcap=softcap or 0.0,
        sinks=sinks, scale=scale,
    )  # fmt: skip
    return out.unsqueeze(0)


def _block_table(
    read_index: Tensor,  # [S or more], the place of each key in rows of the pool
    ends: Tensor,  # [R + 1]
    page_size: int,
) -> Tensor:
    """The pages of each request, int32 [R, pages of the longest one]: the page of every page_size-th key."""
    most = int(ends.diff().max())
    first = ends[:-1, None] + torch.arange(0, most, page_size, device=ends.device)
    return (read_index[first.clamp(max=read_index.numel() - 1).long()] // page_size).int()


def allow(name: str) -> None:
    """Teaches continuous batching the attention implementation `name`: it refuses names that it does not know."""
    if hasattr(_MANAGER.switch_to_cb_friendly_attn, "__wrapped__"):
        return
    theirs = _MANAGER.switch_to_cb_friendly_attn

    @functools.wraps(theirs)
    def switch(self: Any, model: Any, *arguments: Any, **settings: Any) -> None:
        if model.config._attn_implementation != name:
            theirs(self, model, *arguments, **settings)

    _MANAGER.switch_to_cb_friendly_attn = switch


def forbid() -> None:
    """Undoes `allow`."""
    switch = _MANAGER.switch_to_cb_friendly_attn
    _MANAGER.switch_to_cb_friendly_attn = getattr(switch, "__wrapped__", switch)
