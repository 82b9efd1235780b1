"""attnpack's module for the grouped attention layers of transformers.

B batch, L / Lkv lengths of queries and keys, Hq query heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...nn.attention import GroupedQueryAttention
from ...nn.attention.base import split_heads
from ...nn.linear import project, project_all
from ...ops import gate_heads
from ..attention_function import attention_forward
from ..paged import is_paged
from .adopted import Adopted, cache_of_call, eps_of, rotated
from .families import GROUPED


class HfGroupedQueryAttention(Adopted, GroupedQueryAttention):
    """GroupedQueryAttention in the place of a layer of transformers. It takes over that layer's parameters, and is
    called like it.

    The model gives its mask, its cache, and a RoPE table that it makes once for all layers. An indexer stays the
    model's own, and names the blocks of keys that a query attends.

    Args:
        theirs: a layer of a class in `layers.KNOWN`; its projections become this module's own.
    """

    def __init__(self, theirs: nn.Module) -> None:
        self._its = its = GROUPED[type(theirs).__name__]
        heads = getattr(theirs, "num_heads", None) or theirs.config.num_attention_heads
        norm = getattr(theirs, "q_norm", None)
        super().__init__(
            theirs.config.hidden_size,
            heads,
            heads // theirs.num_key_value_groups,
            head_dim=theirs.head_dim,
            dropout=theirs.attention_dropout,
            causal=True,
            scale=theirs.scaling,
            softcap=getattr(theirs, its.softcap, None) or 0.0 if its.softcap else 0.0,
            sinks=getattr(theirs, "sinks", None) is not None,
            qk_norm=norm is not None and {"all_heads": its.all_heads, "plus_one": its.plus_one, "eps": eps_of(norm)},
            device="meta",
        )
        gates = {its.gate} - {"", "q_proj"}
        projections = ("q_proj", "k_proj", "v_proj", "o_proj", *gates)
        self._adopt_parts(theirs, projections, ("q_norm", "k_norm"), its.plus_one)
        if self.sinks is not None:
            self.sinks = theirs.sinks
        self.gate_activation = its.gate_activation
        self._rotates = its.rotates(theirs)
        self.indexer = getattr(theirs, "indexer", None)

    def forward(
        self,
        hidden_states: Tensor,  # [B, L, embed_dim]
        position_embeddings: tuple[Tensor, Tensor] | None = None,  # each [B, L, D]
        attention_mask: Tensor | None = None,  # [B, 1, L, Lkv]
        past_key_values: Any = None,
        *,
        cache: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(out [B, L, embed_dim], probabilities [B, Hq, L, Lkv] or None), as the layer of transformers returns them.

        Args:
            position_embeddings: (cos, sin) of the model's RoPE, or None for a layer that does not rotate.
            attention_mask: as `attnpack.hf` makes it for the model, or None for causal.
            cache: a cache of transformers; it stores the rotated keys under `layer_idx`. past_key_values is its name
                before transformers 5.24.

        Raises:
            TypeError: the cache is one of attnpack.
            ValueError: names an argument that attention cannot honour.
        """
        cache = cache_of_call(hidden_states, past_key_values, cache)
        # Under the model's tensor parallelism this process has some of the heads: as many as the projections give.
        query, key, value, gate = self._own_heads(hidden_states)
        if self.q_norm is not None:
            query, key = self._normed(self.q_norm, query), self._normed(self.k_norm, key)
        if self._rotates and position_embeddings is not None:
            how = self._its.interleaved, self._its.table
            query, key = (rotated(heads, position_embeddings, *how) for heads in (query, key))
        if is_paged(cache):
            others["cache"] = cache  # the attention function writes and reads its pages
        elif cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if self.indexer is not None:
            place = _places(others.get("position_ids"), query, key)
            others["block_indices"] = self.indexer(hidden_states, position_embeddings, cache, place)
        if self.sinks is not None:
            others["s_aux"] = self.sinks
        heads, weights = attention_forward(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.dropout if self.training else 0.0,
            scaling=self.scale,
            softcap=self.softcap,
            **others,
        )
        joined = heads.flatten(2)
        if gate is not None:
            joined = gate_heads(joined, gate, joined.size(-1) // self.head_dim, self.gate_activation)
        return project(self.o_proj, joined), weights

    def _own_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k and v as heads, and the gate [B, L, Hq] or [B, L, Hq * D], if there is one."""
        query, key, value = project_all((self.q_proj, self.k_proj, self.v_proj), x)
        gate = None
        if self._its.gate == "q_proj":
            query, gate = (part.flatten(2) for part in query.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2))
        elif self._its.gate and (proj := getattr(self, self._its.gate)) is not None:
            gate = project(proj, x)
        return *(split_heads(heads, heads.size(-1) // self.head_dim) for heads in (query, key, value)), gate


def _places(given: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """The positions [B, L] of the queries: those given, or the last of the keys."""
    if given is None:
        given = torch.arange(key.size(2) - query.size(2), key.size(2), device=query.device)
    return given.expand(query.size(0), -1)
