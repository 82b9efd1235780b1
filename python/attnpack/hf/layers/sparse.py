"""attnpack's module for layers of transformers whose latent attention reads the keys that an indexer names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention_function import are_recorded
from ..packed import named_sequences
from .adopted import cache_of_call
from .families import LATENT
from .latent import HfLatentAttention


class HfSparseLatentAttention(HfLatentAttention):
    """HfLatentAttention whose queries attend the keys that the model's indexer names, and no others. The indexer stays
    the model's own: its keys lie in the cache of transformers.

    Args:
        theirs: a layer of a class in `layers.KNOWN`; its projections and its indexer become this module's own.
    """

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__(theirs)
        self.indexer = theirs.indexer
        self._hands_on = LATENT[type(theirs).__name__].hands_on

    def forward(
        self,
        hidden_states: Tensor,  # [B, L, embed_dim]
        attention_mask: Tensor | None = None,  # [B, 1, L, S]
        past_key_values: Any = None,
        *,
        cache: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | Tensor | None = None,
        prev_topk_indices: Tensor | None = None,  # [B, L, n]
        output_attentions: bool | None = False,
        **others: Any,
    ) -> tuple[Tensor | None, ...]:
        """That of HfLatentAttention; a layer of GLM-5 also returns its selection [B, L, n].

        Args:
            prev_topk_indices: the selection of an earlier layer, for a layer without an indexer.

        Raises:
            TypeError: the cache is one of attnpack.
            ValueError: names an argument that attention cannot honour.
        """
        if self.indexer is None and prev_topk_indices is None:
            raise ValueError(
                "attnpack: prev_topk_indices: got None for a layer without an indexer, want the selection [B, L, n] of "
                "the layer before it"
            )
        earlier = None if self.indexer is not None else prev_topk_indices
        wanted = are_recorded(output_attentions)
        cache = cache_of_call(hidden_states, past_key_values, cache)
        result = self._attend_selected(
            hidden_states, attention_mask, cache, position_embeddings, earlier, wanted, others
        )
        return result if self._hands_on else result[:2]

    def _select(
        self,
        x: Tensor,
        low: Tensor,  # of the queries
        table: tuple[Tensor, Tensor] | Tensor | None,
        mask: Tensor | None,
        cache: Any,
        keys: Tensor,  # [B, 1, S, C]
        others: dict[str, Any],
    ) -> Tensor:
        if named_sequences(others, x.unsqueeze(1), keys) is not None:
            raise ValueError(
                "attnpack: indices: got keys that the model selected for packed sequences, which may be those of "
                "another sequence; leave cu_seq_lens and seq_idx out and pass position_ids with use_cache=False"
            )
        rows = _causal_rows(x, keys.size(2)) if mask is None else mask[:, 0]
        return self.indexer(x, low, table, rows, others.get("position_ids"), cache)


def _causal_rows(x: Tensor, keys: int) -> Tensor:
    """bool [B, L, S] for rows that are the last of the keys."""
    rows = torch.ones(x.size(1), keys, dtype=torch.bool, device=x.device).tril(keys - x.size(1))
    return rows.expand(x.size(0), -1, -1)
