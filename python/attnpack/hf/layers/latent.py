"""attnpack's module for the latent attention layers of transformers.

B batch, L / S lengths of queries and of all latents, H heads, C kv_lora_rank. A head has N dims that are not rotated
and R dims that are rotated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...nn.attention import MultiHeadLatentAttention
from ...nn.linear import is_watched, plain_weight, project
from ...ops import gate_heads
from ..arguments import REFUSED_BY_LATENT, refuse_arguments
from ..attention_function import are_recorded, attention_forward, causal_without_mask, restricted, split_mask
from ..packed import named_sequences, same_sequence
from ..paged import is_paged
from .adopted import Adopted, cache_of_call, rotated
from .families import LATENT


class HfLatentAttention(Adopted, MultiHeadLatentAttention):
    """MultiHeadLatentAttention in the place of a layer of transformers. It takes over that layer's parameters, and is
    called like it.

    The model gives its mask, its cache, and a RoPE table that it makes once for all layers. The cache stores the same
    as for the layer of transformers: latents [B, 1, S, C] and rotated keys [B, 1, S, R].

    Args:
        theirs: a layer of a class in `layers.KNOWN`; its projections become this module's own.

    Raises:
        ValueError: tensor parallelism has split the heads of `theirs`.
    """

    def __init__(self, theirs: nn.Module) -> None:
        _refuse_split(theirs)
        super().__init__(
            theirs.hidden_size,
            theirs.num_heads,
            kv_lora_rank=theirs.kv_lora_rank,
            q_lora_rank=getattr(theirs, "q_lora_rank", None),
            qk_nope_head_dim=theirs.qk_nope_head_dim,
            qk_rope_head_dim=theirs.qk_rope_head_dim,
            v_head_dim=theirs.v_head_dim,
            dropout=theirs.attention_dropout,
            causal=True,
            scale=theirs.scaling,
            device="meta",
        )
        its = LATENT[type(theirs).__name__]
        gates = () if not its.gate else (its.gate,)
        projections = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *gates)
        self._adopt_parts(theirs, projections, ("q_a_layernorm", "kv_a_layernorm"))
        self._gate = its.gate
        rows = getattr(theirs.config, "rope_interleave", True)
        self.interleaved = rows if its.interleaved is None else its.interleaved

    def forward(
        self,
        hidden_states: Tensor,  # [B, L, embed_dim]
        attention_mask: Tensor | None = None,  # [B, 1, L, S]
        past_key_values: Any = None,
        *,
        cache: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | Tensor | None = None,
        output_attentions: bool | None = False,
        **others: Any,
    ) -> tuple[Tensor | None, ...]:
        """(out [B, L, embed_dim], probabilities [B, H, L, S] or None), as the layer of transformers returns them.

        Args:
            attention_mask: as `attnpack.hf` makes it for the model, or None for causal.
            cache: a cache of transformers. past_key_values is its name before transformers 5.24.
            position_embeddings: (cos, sin) of the model's RoPE, each [B, L, R], or cos + i sin as a complex
                [B, L, R / 2]; None for no rotation.

        Raises:
            TypeError: the cache is one of attnpack.
            ValueError: names an argument that attention cannot honour.
        """
        wanted = are_recorded(output_attentions)
        cache = cache_of_call(hidden_states, past_key_values, cache)
        place = attention_mask, cache, position_embeddings
        out, weights, _ = self._attend_selected(hidden_states, *place, None, wanted, others)
        return out, weights

    def _attend_selected(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        cache: Any,
        position_embeddings: tuple[Tensor, Tensor] | Tensor | None,
        earlier: Tensor | None,  # [B, L, n], the selection of an earlier layer
        need_weights: bool,
        others: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The output, the probabilities or None, and the selection [B, L, n] or None for all keys."""
        if is_paged(cache):
            others["cache"] = cache  # refused with a fix
        refuse_arguments(others, REFUSED_BY_LATENT)
        low = self._query_input(hidden_states)
        query, latent, k_rope, _ = self._latents(hidden_states, None, low)
        latent, k_rope = latent.unsqueeze(1), k_rope.unsqueeze(1)
        if position_embeddings is not None:
            nope, rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
            query = torch.cat([nope, rotated(rope, position_embeddings, self.interleaved)], -1)
            k_rope = rotated(k_rope, position_embeddings, self.interleaved)
        if cache is not None:
            latent, k_rope = cache.update(latent, k_rope, self.layer_idx)
        place = position_embeddings, attention_mask, cache, latent
        named = self._select(hidden_states, low, *place, others) if earlier is None else earlier
        joined, weights = self._attend_latents(query, latent, k_rope, attention_mask, need_weights, others, named)
        if self._gate:
            heads = joined.size(-1) // self.v_head_dim
            joined = gate_heads(joined, project(getattr(self, self._gate), hidden_states), heads)
        return project(self.o_proj, joined), weights, named

    def _select(self, *_: Any) -> Tensor | None:
        """The keys [B, L, n] that each query attends, or None for all."""
        return None

    def _attend_latents(
        self,
        query: Tensor,  # [B, H, L, N + R]
        latent: Tensor,  # [B, 1, S, C]
        k_rope: Tensor,  # [B, 1, S, R]
        mask: Tensor | None,
        need_weights: bool,
        others: dict[str, Any],
        named: Tensor | None,  # [B, L, n], keys; None for all
    ) -> tuple[Tensor, Tensor | None]:
        dropout = self.dropout if self.training else 0.0
        weight = plain_weight(self.kv_b_proj)
        if weight is None:  # kv_b_proj is more than a weight, such as LoRA: call it
            key, value = self._expand(torch.cat([latent, k_rope], -1), query.size(1))
            out, weights = attention_forward(
                self,
                query,
                key,
                value,
                mask,
                dropout,
                self.scale,
                indices=named,
                output_attentions=need_weights,
                **others,
            )
            return out.flatten(2), weights
        if mask is None:
            where = {"causal": causal_without_mask(self, others.get("is_causal"), query.size(2))}
        else:
            where = _latent_mask_arguments(mask, query.size(2), latent.size(2))
        if (packed := named_sequences(others, query, latent)) is not None:
            where["mask"] = restricted(where.get("mask"), same_sequence(packed))
        if named is not None and (torch.compiler.is_compiling() or named.size(-1) < latent.size(2)):
            where["key_index"] = named.unsqueeze(1)
        result = ops.latent_attend(
            query,
            latent.squeeze(1),
            k_rope.squeeze(1),
            weight,
            self.v_head_dim,
            self.path,
            cross=True,  # latent holds the whole cache, which transformers manages
            dropout_p=dropout,
            scale=self.scale,
            need_weights=need_weights,
            **where,
        )
        return result if need_weights else (result, None)


def _refuse_split(theirs: nn.Module) -> None:
    for name, layer in theirs.named_children():
        if is_watched(layer) and hasattr(getattr(layer, "weight", None), "to_local"):
            raise ValueError(
                f"attnpack: model: got a {type(theirs).__name__} whose {name} is split by tensor parallelism, "
                "replace_attention wants latent layers whole: leave them as they are, with "
                'model.set_attn_implementation("attnpack")'
            )


def _latent_mask_arguments(mask: Tensor, q_len: int, kv_len: int) -> dict[str, Any]:
    """A mask as arguments of the latent op. The op has no window, and its first query is at the position of the first
    key. A mask that needs a window or a later position is given as a tensor."""
    ranges, plain = split_mask(mask, q_len, kv_len)
    # An offset on another device than the CPU is a tensor. Reading it would wait for that device.
    offset = ranges.q_offset if isinstance(ranges.q_offset, int) else None
    if ranges.window == (-1, -1) and ranges.sequences is None:
        if not ranges.causal or offset == 0:
            return {"mask": plain, "causal": ranges.causal, "kv_lens": ranges.kv_lens}
        if q_len == 1 and offset == kv_len - 1:  # the newest token sees all keys
            return {"mask": plain, "kv_lens": ranges.kv_lens}
    return {"mask": mask.materialise()}
