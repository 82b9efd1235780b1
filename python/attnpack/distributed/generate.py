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
from ..errors import check_ids, check_lengths, check_size
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
    layers = [layer.self_attn for layer in model.layers]

    def logits_of(tokens: Tensor, kv_cache: ModelCache, lengths: Tensor | None) -> Tensor:
        return _last(model(tokens, cache=kv_cache, lengths=lengths), lengths)

    return _answer(logits_of, layers, groups, ids, cache=cache, **arguments)


@torch.no_grad()
def generate_from_source(
    model: EncoderDecoder,
    source: Tensor,
    target: Tensor,
    *,
    head: Callable[[Tensor], Tensor] | None,
    source_lens: Tensor | None,
    cache: str | ModelCache,
    num_return_sequences: int,
    **arguments: Any,
) -> Tensor:
    """As `EncoderDecoder.generate`, on every rank: the same tokens."""
    groups = _groups_of(model, cache)
    layers = [layer.self_attn for layer in model.decoder.layers]
    head = head or _products_with_embedding(model.decoder)
    cross = model.new_cross_cache()
    lens = source_lens

    def logits_of(tokens: Tensor, kv_cache: ModelCache, lengths: Tensor | None) -> Tensor:
        nonlocal lens
        first = not len(cross)
        states = model(source, tokens, source_lens=lens, target_lens=lengths, cache=kv_cache, cross_cache=cross)
        if first and num_return_sequences > 1:
            rows = torch.arange(len(source), device=source.device).repeat_interleave(num_return_sequences)
            cross.reorder(rows)
            lens = None if lens is None else lens[rows]
        return head(_last(states, lengths))

    arguments["num_return_sequences"] = num_return_sequences
    return _answer(logits_of, layers, groups, target, cache=cache, **arguments)


def _last(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Row lengths[b] - 1 of x [B, L, N], or the last row: [B, N]."""
    if lengths is None:
        return x[:, -1]
    return x[torch.arange(len(x), device=x.device), lengths.to(x.device) - 1]


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
    logits_of: Callable[[Tensor, ModelCache, Tensor | None], Tensor],
    layers: Sequence[nn.Module],
    groups: Sequence[dist.ProcessGroup],
    ids: Tensor,
    *,
    max_new_tokens: int,
    cache: str | ModelCache,
    num_return_sequences: int = 1,
    lengths: Tensor | None = None,
    stop_tokens: int | Iterable[int] = (),
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    callback: Callable[[Tensor], bool | None] | None = None,
) -> Tensor:
    """The loop. `logits_of` gives the logits [B, V] after the last valid one of the tokens [B, L]."""
    check_ids("ids", ids)
    check_lengths("lengths", lengths, ids)
    check_size("num_return_sequences", num_return_sequences)
    ends = [stop_tokens] if isinstance(stop_tokens, int) else list(stop_tokens)
    stops = torch.tensor(ends, device=ids.device)
    for group in groups:
        agree(
            "generate",
            group,
            ids.device,
            ids=ids,
            numbers=Numbers(ids),
            max_new_tokens=max_new_tokens,
            num_return_sequences=num_return_sequences,
            stop_tokens=ends,
        )
    kv_cache = cache if isinstance(cache, ModelCache) else _make_cache(layers, cache, ids, max_new_tokens, groups[0])
    choose = _C.cpp.Sampler(temperature, top_k, top_p, seed)

    rows = torch.arange(ids.size(0), device=ids.device).repeat_interleave(num_return_sequences)
    pieces = [ids.long()[rows]]
    stopped = torch.zeros(len(rows), dtype=torch.bool, device=ids.device)
    tokens = None
    for step in range(max_new_tokens):
        if step == 0:
            logits = logits_of(ids, kv_cache, lengths)[rows]
            if num_return_sequences > 1:
                kv_cache.reorder(rows)
        else:
            logits = logits_of(tokens.unsqueeze(1), kv_cache, None)
        chosen = _chosen(choose, logits, groups)
        tokens = chosen if step == 0 else torch.where(stopped, tokens, chosen)
        pieces.append(tokens.unsqueeze(1))
        if callback is not None and callback(tokens) is False:
            break
        stopped |= torch.isin(tokens, stops)
        if len(stops) and stopped.all():
            break
    return torch.cat(pieces, 1)


def _chosen(choose: Callable[[Tensor], Tensor], logits: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The tokens that the first rank of each group chooses, on all ranks: draws differ where their generators do."""
    tokens = torch.empty(logits.size(0), dtype=torch.int64, device=logits.device)
    if all(group.rank() == 0 for group in groups):
        tokens = choose(logits)
    for group in groups:
        tokens = from_first(tokens, group)
    return tokens


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


def _make_cache(
    layers: Sequence[nn.Module], name: str, ids: Tensor, max_new_tokens: int, group: dist.ProcessGroup
) -> ModelCache:
    """A cache of this rank's heads for each of the layers' attention."""
    if name not in ("dynamic", "static"):
        raise ValueError(
            f"attnpack: cache: got {name!r} for a model that several processes share, want 'dynamic', 'static' or a "
            "ModelCache of this rank's kv heads"
        )
    made = []
    for attention in layers:
        latent = isinstance(attention, MultiHeadLatentAttention)
        if name == "dynamic":
            made.append(LatentCache() if latent else DynamicCache())
            continue
        weight = next(attention.parameters())
        kv_heads = 1 if latent else plan_of(attention, group.size(), group.rank()).settings["num_kv_heads"]
        width = attention.kv_lora_rank + attention.qk_rope_head_dim if latent else attention.head_dim
        sizes = {"v_head_dim": 0 if latent else None, "dtype": weight.dtype, "device": weight.device}
        made.append(StaticCache(ids.size(0), kv_heads, ids.size(1) + max_new_tokens, width, **sizes))
    return ModelCache(made)
