"""Continuous batching: transformers' `generate_batch` on the operator. Each request reads only its own keys.

T new tokens of all requests, S keys of all requests, R requests, Hq query heads, Hkv KV heads, D head_dim.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, masking_utils
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from ..ops import attention_varlen
from .arguments import SDPA_INSTEAD

PAGED_ARGUMENTS = ("cache", "new_keys", "read_index", "write_index", "cu_seq_lens_q", "cu_seq_lens_k")
_MANAGER = continuous_api.ContinuousBatchingManager
_UPDATE = PagedAttentionCache.update
HAS_ALLOCATORS = "layer_to_allocator" in PagedAttentionCache.__init__.__code__.co_names  # from 5.18 on
# Whether the layers of transformers update the cache, as from 5.24 on. Before, the attention function does.
LAYERS_UPDATE = "cache" in inspect.signature(masking_utils.create_causal_mask).parameters


def is_paged(cache: Any) -> bool:
    """Whether a cache is that of continuous batching."""
    return isinstance(cache, PagedAttentionCache)


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
    _refuse_changed(module, key, value, others)
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


def _refuse_changed(module: nn.Module, key: Tensor, value: Tensor, others: dict[str, Any]) -> None:
    """Raises ValueError for a layer that computes with the keys or values that the cache's update gave it (DiffLlama,
    JetMoE): it got the new ones only."""
    new_keys = others.get("new_keys")
    if new_keys is not None and not (key is new_keys[0] and value is new_keys[1]):
        raise ValueError(
            f"attnpack: generate_batch: {type(module).__name__} changes keys or values after the cache has stored "
            "them, which stay in their pages here; " + SDPA_INSTEAD
        )


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
        elif not HAS_ALLOCATORS:
            raise ValueError(
                f"attnpack: generate_batch: transformers {transformers.__version__} keeps its pages in another way; "
                'update transformers, or call model.set_attn_implementation("sdpa") before'
            )

    _MANAGER.switch_to_cb_friendly_attn = switch
    if LAYERS_UPDATE:
        PagedAttentionCache.update = _leave_to_attention


def forbid() -> None:
    """Undoes `allow`."""
    switch = _MANAGER.switch_to_cb_friendly_attn
    _MANAGER.switch_to_cb_friendly_attn = getattr(switch, "__wrapped__", switch)
    PagedAttentionCache.update = _UPDATE


def update_as_theirs(module: nn.Module, key: Tensor, value: Tensor, others: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The keys and values [1, Hkv, S, D] for transformers' own attention function, which reads no pages from 5.24 on;
    until then it takes the cache itself."""
    if not LAYERS_UPDATE or not is_paged(others.get("cache")):
        return key, value
    _refuse_changed(module, key, value, others)
    return _UPDATE(others.pop("cache"), key, value, module.layer_idx, others)


@functools.wraps(_UPDATE)
def _leave_to_attention(
    self: PagedAttentionCache, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Takes the place of the cache's update, which copies all keys out of their pages. An attention function of ours
    writes and reads them in the pages, so this only hands the cache on to it."""
    function = AttentionInterface._global_mapping.get(self.config._attn_implementation)
    if getattr(function, "__module__", "").rpartition(".")[0] != __package__:
        return _UPDATE(self, key_states, value_states, layer_idx, kwargs)
    kwargs["cache"], kwargs["new_keys"] = self, (key_states, value_states)
    return key_states, value_states
