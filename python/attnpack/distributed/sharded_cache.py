"""A KV cache whose positions are dealt out over the ranks of a group: position p is held by rank p mod ranks.

Every rank computes the new keys and all queries, attends over the keys that it holds, and the results are joined by
their lse: one collective a call. B batch, L new tokens, Hq / Hkv query / kv heads, K held keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..cache import DynamicCache, KVCache, LatentCache, StaticCache
from ..errors import check_positions, wrong_kind
from ..nn.linear import plain_weight
from ..nn.sharded_attention import ShardedAttention
from .agreement import agree
from .collectives import Group, as_group
from .context_parallel import refuse_inputs, rotate_latents, scaled, settings_of
from .generate import generate

_KINDS = (DynamicCache, LatentCache, StaticCache)


class ShardedCache(KVCache, ShardedAttention):
    """The share of one rank in a KV cache that no single process holds. Give each rank the same calls.

    Args:
        cache: an empty DynamicCache, LatentCache or StaticCache, which holds this rank's positions.
        group: a process group, a DeviceMesh of one dim, or None for all processes.

    `lengths` and `len` are those of the whole sequences; `nbytes`, `k` and `v` those of this rank. As in all caches, no
    gradient flows through the past; under it no gradient flows at all. It refuses masks, need_weights and dropout in
    training; sliding windows and ALiBi are exact.
    """

    def __init__(self, cache: KVCache, group: Group = None) -> None:
        if type(cache) not in _KINDS:
            raise wrong_kind("cache", cache, "a DynamicCache(), a LatentCache() or a StaticCache")
        if len(cache):
            raise ValueError(f"attnpack: cache: got one that holds {len(cache)} positions, want an empty one")
        self.inner, self.group = cache, as_group(group)
        self._total_lengths = cache.lengths.clone()

    generate = staticmethod(generate)

    @property
    def _kind(self) -> str:
        return self.inner._kind

    @property
    def _places(self) -> dict[str, int]:
        return self.inner._places

    @property
    def _tensors(self) -> list[Tensor | None]:
        return self.inner._tensors

    @_tensors.setter
    def _tensors(self, tensors: list[Tensor | None]) -> None:
        self.inner._tensors = tensors

    @property
    def _numbers(self) -> list[int]:
        return self.inner._numbers

    @_numbers.setter
    def _numbers(self, numbers: list[int]) -> None:
        self.inner._numbers = numbers

    @property
    def lengths(self) -> Tensor:
        """Number of positions of each whole sequence, int64 [B]."""
        return self._total_lengths

    def __len__(self) -> int:
        return int(self._total_lengths.max()) if self._total_lengths.numel() else 0

    def __repr__(self) -> str:
        return f"ShardedCache({len(self)} positions over {self.group.size()} ranks, here: {self.inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "attnpack: a ShardedCache belongs to the processes of its group and cannot be pickled: fill a new one there"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedCache:
        return self.clone()

    def reset(self) -> None:
        self.inner.reset()
        self._total_lengths = self.inner.lengths.clone()

    def crop(self, n: int) -> None:
        """Keeps the first n positions of each sequence."""
        DynamicCache().crop(n)  # raises where n is no number of positions
        if n == 0:
            return self.reset()
        self.inner.crop(int(self._held(torch.tensor([n], device="cpu"), self.group.rank())))
        self._total_lengths = self._total_lengths.clamp(max=n)

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Sequence b becomes the former sequence index[b]."""
        self.inner.reorder(index)
        self._total_lengths = self._total_lengths[torch.as_tensor(index, device=self._total_lengths.device)]

    def clone(self) -> ShardedCache:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, inner=self.inner.clone(), _total_lengths=self._total_lengths.clone())
        return other

    def _after_rollback(self) -> None:
        self.inner.lengths.copy_(self._held(self._total_lengths, self.group.rank()))

    def _held(self, lengths: Tensor, rank: int) -> Tensor:
        """How many of the first `lengths` positions a rank holds."""
        return torch.ops.attnpack.held_positions(lengths, self.group.group_name, rank)

    @torch.no_grad()
    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **inputs: Any) -> Tensor:
        past, new = self._begin(module, inputs, query=query, key=key, value=value)
        places = self._positions(past, query, inputs)
        query, key = module._rotated(query, key, places, places)
        query = scaled(module, query, places, past)
        settings = settings_of(module, query)
        with self.inner.rollback_on_error():
            stored = self._append(key, value, past, new)
            out = self._joined("attend_sharded_keys", query, stored, past, causal=inputs["causal"], **settings)
            self._total_lengths = past + new
        return out.transpose(1, 2).flatten(2)

    @torch.no_grad()
    def attend_latents(self, module: nn.Module, query: Tensor, latent: Tensor, k_rope: Tensor, **inputs: Any) -> Tensor:
        past, new = self._begin(module, inputs, query=query, latent=latent)
        places = self._positions(past, query, inputs)
        query = scaled(module, query, places, past)
        query, latents = rotate_latents(module, query, latent, k_rope, places)
        rules = {"causal": inputs["causal"], "scale": module.softmax_scale}
        with self.inner.rollback_on_error():
            stored, _ = self._append(latents, latents[..., :0], past, new, module.kv_lora_rank)
            weight = None if module.folded else plain_weight(module.kv_b_proj)
            if module.folded or weight is not None:
                given = stored, module.qk_rope_head_dim, weight, module.v_head_dim
                out = self._joined("attend_sharded_latents", query, given, past, **rules)
            else:
                heads = module._expand(stored, query.size(1))
                out = self._joined("attend_sharded_keys", query, heads, past, **rules)
            self._total_lengths = past + new
        return out.transpose(1, 2).flatten(2)

    def _begin(
        self, module: nn.Module, inputs: dict[str, Any], query: Tensor, **shown: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Lengths [B] of the whole sequences, and of the new tokens."""
        names = ("mask", "need_weights", "cross")
        refuse_inputs(module, "with a ShardedCache", **{name: inputs[name] for name in names})
        batch, lens = query.size(0), inputs["kv_lens"]
        past = self._total_lengths if self._total_lengths.numel() else self._total_lengths.new_zeros(batch)
        if past.size(0) != batch:
            raise ValueError(f"attnpack: cache: holds {past.size(0)} sequences, got {batch} new ones: they must agree")
        agree(
            "a ShardedCache",
            self.group,
            query.device,
            causal=inputs["causal"],
            past=past.tolist(),
            query=query,
            **shown,
        )
        past = past.to(query.device)
        new = torch.full_like(past, query.size(2)) if lens is None else lens.to(past)
        self._check_room(past + new)
        return past, new

    def _check_room(self, lengths: Tensor) -> None:
        """Raises, on every rank, if the first one, which holds the most, has no room for its share of the positions."""
        if not isinstance(self.inner, StaticCache) or not lengths.is_cpu or not lengths.numel():
            return
        whole, most = int(lengths.max()), int(self._held(lengths, 0).max())
        if most > self.inner.max_len:
            raise ValueError(
                f"attnpack: cache: got {whole} positions over {self.group.size()} ranks, want at most "
                f"{self.inner.max_len} on each: make the StaticCache with max_len {most} or more"
            )

    def _positions(self, past: Tensor, query: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Positions of the new tokens, [B, L], for RoPE."""
        check_positions(inputs["positions"], query)
        if inputs["positions"] is not None:
            return inputs["positions"]
        return past.unsqueeze(1) + torch.arange(query.size(2), device=query.device)

    def _append(
        self, key: Tensor, value: Tensor, past: Tensor, new: Tensor, kv_lora_rank: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Writes this rank's share of the new tokens; the keys and values [B, Hkv, K, D] that it then holds."""
        state, name = (self._kind, self._tensors, self._numbers), self.group.group_name
        changed = torch.ops.attnpack.append_share(*state, key, value, past, new, kv_lora_rank, name)
        self._tensors, self._numbers, *stored = changed
        return tuple(stored)

    def _joined(self, op: str, query: Tensor, stored: tuple, past: Tensor, **settings: Any) -> Tensor:
        """out [B, Hq, L, Dv] over the keys of all ranks."""
        _, flat = ops.flat_rules(query, settings)
        name = self.group.group_name
        return getattr(torch.ops.attnpack, op)(query, *stored, past, name, self.inner.lengths, **flat)
