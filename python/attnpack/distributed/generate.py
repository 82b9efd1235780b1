"""The loop of `CausalLM.generate` where several processes share the model or its cache. Rank 0 chooses the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..cache import DynamicCache, LatentCache, ModelCache, StaticCache
from ..errors import check_ids, check_lengths, check_size
from ..nn.causal_lm import CausalLM
from ..nn.latent_attention import MultiHeadLatentAttention
from ..nn.spread import Spread
from .collectives import explained
from .shares import plan_of


@torch.no_grad()
def generate(
    model: CausalLM,
    ids: Tensor,
    *,
    max_new_tokens: int,
    cache: str | ModelCache,
    num_return_sequences: int = 1,
    lengths: Tensor | None = None,
    stop_tokens: int | Sequence[int] = (),
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    callback: Callable[[Tensor], bool | None] | None = None,
) -> Tensor:
    """As `CausalLM.generate`, on every rank: the same tokens. The callback must answer alike on all of them."""
    check_ids("ids", ids)
    check_lengths("lengths", lengths, ids)
    check_size("num_return_sequences", num_return_sequences)
    groups = _groups_of(model, cache)
    held = cache if isinstance(cache, ModelCache) else _make_cache(model, cache, ids, max_new_tokens, groups[0])
    choose = _C.cpp.Sampler(temperature, top_k, top_p, seed)
    stops = torch.tensor([stop_tokens] if isinstance(stop_tokens, int) else list(stop_tokens), device=ids.device)

    rows = torch.arange(ids.size(0), device=ids.device).repeat_interleave(num_return_sequences)
    pieces = [ids.long()[rows]]
    stopped = torch.zeros(len(rows), dtype=torch.bool, device=ids.device)
    tokens = None
    for step in range(max_new_tokens):
        if step == 0:
            logits = model(ids, cache=held, lengths=lengths)
            ends = torch.full_like(ids[:, 0], ids.size(1)) if lengths is None else lengths.to(ids)
            logits = logits[torch.arange(ids.size(0), device=ids.device), ends - 1][rows]
            if num_return_sequences > 1:
                held.reorder(rows)
        else:
            logits = model(tokens.unsqueeze(1), cache=held)[:, 0]
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
        with explained(group):
            dist.broadcast(tokens, group=group, group_src=0)
    return tokens


def _groups_of(model: CausalLM, cache: str | ModelCache) -> list[dist.ProcessGroup]:
    """The groups that share the model and the cache."""
    groups = [] if model._generate is None else [next(model.parameters()).device_mesh.get_group()]
    if isinstance(cache, ModelCache) and isinstance(cache.layers[0], Spread):
        groups.append(cache.layers[0].group)
    return groups


def _make_cache(model: CausalLM, name: str, ids: Tensor, max_new_tokens: int, group: dist.ProcessGroup) -> ModelCache:
    """A cache of this rank's heads for each layer."""
    if name not in ("dynamic", "static"):
        raise ValueError(
            f"attnpack: cache: got {name!r} for a model that several processes share, want 'dynamic', 'static' or a "
            "ModelCache of this rank's kv heads"
        )
    made = []
    for layer in model.layers:
        attention = layer.self_attn
        latent = isinstance(attention, MultiHeadLatentAttention)
        if name == "dynamic":
            made.append(LatentCache() if latent else DynamicCache())
            continue
        norm = layer.input_layernorm.weight
        kv_heads = 1 if latent else plan_of(attention, group.size(), group.rank()).settings["num_kv_heads"]
        width = attention.kv_lora_rank + attention.qk_rope_head_dim if latent else attention.head_dim
        sizes = {"v_head_dim": 0 if latent else None, "dtype": norm.dtype, "device": norm.device}
        made.append(StaticCache(ids.size(0), kv_heads, ids.size(1) + max_new_tokens, width, **sizes))
    return ModelCache(made)
