"""Modules over a sequence that is dealt out over the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import _C, ops
from ..nn.linear import plain_weight
from ..nn.sharded_attention import ShardedAttention, sharded_sequence
from .attention import attention
from .collectives import Group, as_group


@contextmanager
def context_parallel(group: Group = None, *, method: str = "allgather", layout: str = "contiguous") -> Iterator[None]:
    """A context in which attention modules of attnpack attend over a sequence that is sharded over the ranks.

    x [B, L / ranks, E] and a context are parts as `shard_sequence` deals them out; kv_lens and lengths are those of the
    whole sequences, and positions for RoPE those of the rows in them. Outputs are this rank's rows. Gradients of the
    weights are this rank's share: add them up over the ranks (DistributedDataParallel gives their mean).

    Args:
        group, method, layout: as in `attnpack.distributed.attention`. With "allgather" latent attention sends its
            latents, with the others its keys and values.

    Raises ValueError in modules for what is not supported: a mask, a cache, need_weights, dropout in training, nested
    tensors, RoPE whose frequencies follow the length, modules of `attnpack.cpp`, models of transformers.
    """
    if not torch.compiler.is_compiling():
        _C.distributed.check_names(method, layout)
    with sharded_sequence(ContextParallel(as_group(group), method, layout)):
        yield


def refuse_inputs(
    module: nn.Module,
    place: str,
    mask: Tensor | None = None,
    need_weights: bool = False,
    cache: Any = None,
    cross: bool = False,
) -> None:
    """Raises for inputs and settings of a module that are not supported over several processes."""
    rope, dropout = module.rope, module.dropout if module.training else 0.0
    by_length = rope is not None and bool(rope.growth or rope.long_inv_freq)
    given = (mask is not None, bool(need_weights), cache is not None, cross, dropout, by_length)
    if any(given):  # else nothing is called, because graphs stop at it
        _C.checks.single_process_inputs(*given, place)


def check_part_positions(positions: Tensor | None, query: Tensor) -> None:
    """Raises unless positions, if given, are those of the rows of query [B, H, L, D]."""
    if positions is not None and (not torch.compiler.is_compiling() or positions.size(-1) != query.size(2)):
        _C.checks.part_positions(positions, query.size(2))


def settings_of(module: nn.Module, query: Tensor) -> dict[str, Any]:
    """The module's own settings, as arguments of the operator, but for dropout."""
    settings = module._settings(query)
    del settings["dropout_p"]
    return settings


def scaled(module: nn.Module, query: Tensor, positions: Tensor | None, past: Tensor | None) -> Tensor:
    """The queries [B, H, L, D] times the factors of the module's query_scale."""
    return ops.scale_queries(query, module._query_scale(query, positions, past))


class ContextParallel(ShardedAttention):
    """How modules attend under `context_parallel`."""

    def __init__(self, group: dist.ProcessGroup, method: str, layout: str) -> None:
        self.group, self.method, self.layout = group, method, layout

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **inputs: Any) -> Tensor:
        self._check(module, inputs)
        heads = module._rotated(query, key, *self._places(query, key.size(2), inputs))
        out = attention(
            *heads,
            value,
            group=self.group,
            method=self.method,
            layout=self.layout,
            causal=inputs["causal"],
            kv_lens=inputs["kv_lens"],
            query_scale=module._query_scale(query, inputs["positions"], None),
            **settings_of(module, query),
        )
        return out.transpose(1, 2).flatten(2)

    def attend_latents(self, module: nn.Module, query: Tensor, latent: Tensor, k_rope: Tensor, **inputs: Any) -> Tensor:
        """The latents travel, and each rank expands them; other methods than "allgather" take expanded heads."""
        self._check(module, inputs)
        rows, keys = self._places(query, latent.size(1), inputs)
        query = scaled(module, query, inputs["positions"], None)
        query, latents = rotate_latents(module, query, latent, k_rope, rows, keys if inputs["cross"] else None)
        rules = {"causal": inputs["causal"], "scale": module.softmax_scale, "kv_lens": inputs["kv_lens"]}
        if self.method == "allgather":
            name = self.group.group_name
            if not torch.compiler.is_compiling():
                like = latents[..., :1].detach()  # heads that the latents will give, without their memory
                key, value = (like.expand(-1, query.size(1), -1, width) for width in (query.size(-1), 1))
                _C.distributed.agree_on_attention(query, key, value, name, self.method, self.layout, rules)
            whole = torch.ops.attnpack.unshard_sequence(latents, name, 2, self.layout, False)
            heads = latent_heads(module, query, whole, inputs["kv_lens"])
            out, _ = torch.ops.attnpack.context_attention_rows(*heads, name, self.layout, **rules)
        else:
            heads = latent_heads(module, query, latents)
            out = attention(*heads, group=self.group, method=self.method, layout=self.layout, **rules)
        return out.transpose(1, 2).flatten(2)

    def positions(self, length: int, device: torch.device) -> Tensor:
        rows = torch.empty(length, device=device)
        return torch.ops.attnpack.sequence_positions(rows, self.group.group_name, self.layout)

    def _check(self, module: nn.Module, inputs: dict[str, Any]) -> None:
        names = ("mask", "need_weights", "cache")
        refuse_inputs(module, "under context_parallel", **{name: inputs[name] for name in names})

    def _places(self, query: Tensor, kv_len: int, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Positions of the queries and of the keys of this rank; those of self-attention may be given."""
        given = inputs["positions"]
        check_part_positions(given, query)
        rows = self.positions(query.size(2), query.device) if given is None else given
        keys = self.positions(kv_len, query.device) if inputs["cross"] else rows
        return rows, keys


def rotate_latents(
    module: nn.Module, query: Tensor, latent: Tensor, k_rope: Tensor, places: Tensor, key_places: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rotated queries [B, H, L, N + R] and latents [B, 1, Lkv, C + R] of latent attention. key_places: of a context."""
    rope = ops.flat_rope(None if module.rope is None else module.rope.settings)
    return torch.ops.attnpack.latent_rotate(query, latent, k_rope, **rope, positions=places, key_positions=key_places)


def latent_heads(
    module: nn.Module, query: Tensor, latents: Tensor, kv_lens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [B, H, L, N + R], keys [B, H, K, N + R] and values [B, H, K, V] of rotated latents [B, 1, K, C + R]; of a
    folded module the latents. What lies beyond kv_lens [B] takes no part in gradients."""
    weight = None if module.folded else plain_weight(module.kv_b_proj)
    if weight is None and not module.folded:
        return query, *module._expand(latents, query.size(1))
    sizes = module.qk_rope_head_dim, weight, module.v_head_dim
    return torch.ops.attnpack.latent_heads(query, latents, *sizes, "expanded", kv_lens)
