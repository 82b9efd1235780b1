"""The loop of `generate` where several processes share the model or its cache. Rank 0 chooses the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import _C
from ..cache import DynamicCache, LatentCache, ModelCache, StaticCache
from ..errors import check_ids
from ..nn.attention import MultiHeadLatentAttention
from ..nn.causal_lm import CausalLM
from ..nn.linear import linear
from ..nn.sharded_attention import ShardedAttention
from ..nn.stack import Decoder, EncoderDecoder
from .agreement import Numbers, agree
from .collectives import from_first
from .shares import COLUMNS, plan_of, tensor_of
from .units import gather_last


@torch.no_grad()
def generate(model: CausalLM, ids: Tensor, *, cache: str | ModelCache, **arguments: Any) -> Tensor:
    """As `CausalLM.generate`, on every rank: the same tokens. The callback must answer alike on all of them."""
    groups = _groups_of(model, cache)
    kv_cache = _cache_of([layer.self_attn for layer in model.layers], cache, ids, groups, arguments)

    def logits_of(tokens: Tensor, lengths: Tensor | None) -> Tensor:
        return model(tokens, cache=kv_cache, lengths=lengths)

    return _answer(logits_of, lambda logits: logits, kv_cache.reorder, groups, ids, **arguments)


@torch.no_grad()
def generate_from_source(
    model: EncoderDecoder,
    source: Tensor,
    target: Tensor,
    *,
    head: Callable[[Tensor], Tensor] | None,
    source_lens: Tensor | None,
    cache: str | ModelCache,
    **arguments: Any,
) -> Tensor:
    """As `EncoderDecoder.generate`, on every rank: the same tokens."""
    groups = _groups_of(model, cache)
    kv_cache = _cache_of([layer.self_attn for layer in model.decoder.layers], cache, target, groups, arguments)
    cross = model.new_cross_cache()
    lens = source_lens

    def states_of(tokens: Tensor, lengths: Tensor | None) -> Tensor:
        return model(source, tokens, source_lens=lens, target_lens=lengths, cache=kv_cache, cross_cache=cross)

    def pick_rows(index: Tensor) -> None:
        nonlocal lens
        kv_cache.reorder(index)
        cross.reorder(index)
        lens = None if lens is None else lens[index]

    return _answer(states_of, head or _products_with_embedding(model.decoder), pick_rows, groups, target, **arguments)


def _products_with_embedding(decoder: Decoder) -> Callable[[Tensor], Tensor]:
    """The decoder's embedding as its head. Each rank multiplies the rows that it has."""
    if decoder.embed_tokens is None:
        raise ValueError("attnpack: head: got none, and the decoder has no embed_tokens; give a function of its states")
    table = decoder.embed_tokens.weight

    def logits_of(states: Tensor) -> Tensor:
        products = linear(states, tensor_of(table))
        divided = isinstance(table, DTensor) and table.placements[0] == COLUMNS
        return gather_last(products, len(table), table.device_mesh.get_group()) if divided else products

    return logits_of


def _answer(
    states: Callable[[Tensor, Tensor | None], Tensor],
    head: Callable[[Tensor], Tensor],
    pick_rows: Callable[[Tensor], None],
    groups: Sequence[dist.ProcessGroup],
    ids: Tensor,
    *,
    stop_tokens: int | Iterable[int] = (),
    **arguments: Any,
) -> Tensor:
    """The loop of C++, with the tokens that the first rank of each group chooses: draws differ where their generators
    do. The functions are those of GenerateSteps in csrc/attnpack/models/detail/."""
    ends = [stop_tokens] if isinstance(stop_tokens, int) else list(stop_tokens)
    shared = {name: arguments[name] for name in ("max_new_tokens", "num_return_sequences") if name in arguments}
    for group in groups:
        agree("generate", group, ids.device, ids=ids, numbers=Numbers(ids), **shared, stop_tokens=ends)

    def agreed(tokens: Tensor) -> Tensor:
        for group in groups:
            tokens = from_first(tokens, group)
        return tokens

    return _C.cpp.generate_by(states, head, pick_rows, agreed, ids, stop_tokens=ends, **arguments)


def _groups_of(model: CausalLM | EncoderDecoder, cache: str | ModelCache) -> list[dist.ProcessGroup]:
    """The groups that share the model and the cache."""
    groups = []
    if model._generate is not None:
        mesh = next(model.parameters()).device_mesh
        if mesh.ndim > 1:
            raise ValueError(
                f"attnpack: generate: got a {type(model).__name__} whose weights fully_shard has divided too, want "
                "only tensor_parallel: save its state dict, and load it into a model for generation"
            )
        groups.append(mesh.get_group())
    if isinstance(cache, ModelCache) and isinstance(cache.layers[0], ShardedAttention):
        groups.append(cache.layers[0].group)
    return groups


def _cache_of(
    layers: Sequence[nn.Module],
    cache: str | ModelCache,
    ids: Tensor,
    groups: Sequence[dist.ProcessGroup],
    arguments: dict[str, Any],
) -> ModelCache:
    """The given cache, or one of this rank's heads for each of the layers' attention."""
    check_ids("ids", ids)
    if isinstance(cache, ModelCache):
        return cache
    if cache not in ("dynamic", "static"):
        raise ValueError(
            f"attnpack: cache: got {cache!r} for a model that several processes share, want 'dynamic', 'static' or a "
            "ModelCache of this rank's kv heads"
        )
    made, group = [], groups[0]
    for attention in layers:
        latent = isinstance(attention, MultiHeadLatentAttention)
        if cache == "dynamic":
            made.append(LatentCache() if latent else DynamicCache())
            continue
        weight = next(attention.parameters())
        kv_heads = 1 if latent else plan_of(attention, group.size(), group.rank()).settings["num_kv_heads"]
        width = attention.kv_lora_rank + attention.qk_rope_head_dim if latent else attention.head_dim
        sizes = {"v_head_dim": 0 if latent else None, "dtype": weight.dtype, "device": weight.device}
        room = ids.size(1) + arguments["max_new_tokens"]
        made.append(StaticCache(ids.size(0), kv_heads, room, width, **sizes))
    return ModelCache(made)
