"""attnpack's module for the grouped attention layers of transformers.

B batch, L / Lkv lengths of queries and keys, Hq query heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...nn.attention import GroupedQueryAttention
from ...nn.attention_base import split_heads
from ...nn.linear import project_all
from ..attention_function import attention_forward
from .adopted import Adopted, check_call, rotated


class HfGroupedQueryAttention(Adopted, GroupedQueryAttention):
    """GroupedQueryAttention in the place of a layer of transformers. It takes over that layer's parameters, and is
    called like it.

    The model gives its mask, its cache, and a RoPE table that it makes once for all layers.

    Args:
        theirs: a layer of a class in `layers.KNOWN`; its projections become this module's own.
    """

    def __init__(self, theirs: nn.Module) -> None:
        config = theirs.config
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim=theirs.head_dim,
            dropout=theirs.attention_dropout,
            causal=True,
            scale=theirs.scaling,
            device="meta",
        )
        self._adopt_parts(theirs, ("q_proj", "k_proj", "v_proj", "o_proj"), ("q_norm", "k_norm"))

    def forward(
        self,
        hidden_states: Tensor,  # [B, L, embed_dim]
        position_embeddings: tuple[Tensor, Tensor],  # each [B, L, D]
        attention_mask: Tensor | None = None,  # [B, 1, L, Lkv]
        past_key_values: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(out [B, L, embed_dim], probabilities [B, Hq, L, Lkv] or None), as the layer of transformers returns them.

        Args:
            position_embeddings: (cos, sin) of the model's RoPE.
            attention_mask: as `attnpack.hf` makes it for the model, or None for causal.
            past_key_values: a cache of transformers; it stores the rotated keys under `layer_idx`.

        Raises:
            TypeError: past_key_values is a cache of attnpack.
            ValueError: names an argument that attention cannot honour.
        """
        check_call(hidden_states, past_key_values)
        # Under the model's tensor parallelism this process has some of the heads: as many as the projections give.
        projected = project_all((self.q_proj, self.k_proj, self.v_proj), hidden_states)
        query, key, value = (split_heads(x, x.size(-1) // self.head_dim) for x in projected)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (rotated(heads, position_embeddings) for heads in (query, key))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        heads, weights = attention_forward(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.dropout if self.training else 0.0,
            scaling=self.scale,
            **others,
        )
        return self._output(heads.flatten(2), hidden_states), weights
