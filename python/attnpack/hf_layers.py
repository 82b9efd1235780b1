"""Whole attention layers of transformers' models as attnpack's modules, around the same parameters.

B batch, L / Lkv lengths of queries and keys, Hq / Hkv query / kv heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .attention import GroupedQueryAttention
from .cache import KVCache
from .hf_attention import attention_forward
from .norm import RMSNorm
from .ops import apply_rope

# Classes of transformers whose layers are q_proj, k_proj, v_proj, o_proj, RoPE on half-split pairs and, if at all,
# norms over head_dim before it; their masks carry the windows.
GROUPED = (
    "LlamaAttention",
    "MistralAttention",
    "MixtralAttention",
    "Qwen2Attention",
    "Qwen2MoeAttention",
    "Qwen3Attention",
    "Qwen3MoeAttention",
)


class HfGroupedQueryAttention(GroupedQueryAttention):
    """GroupedQueryAttention in the place of a layer of transformers: its parameters, its way of being called.

    The model rotates by tables that it makes once for all layers, and hands in its mask and its cache.

    Args:
        theirs: a layer of one of the classes in `GROUPED`; its projections become this module's own.
    """

    is_causal = True  # what transformers reads where it gives no mask

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
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, getattr(theirs, name))
        for name in ("q_norm", "k_norm"):
            norm = getattr(theirs, name, None)
            setattr(self, name, None if norm is None else _shared_norm(norm))
        self.config = config
        self.layer_idx = theirs.layer_idx
        self.num_key_value_groups = theirs.num_key_value_groups
        self.train(theirs.training)

    def forward(
        self,
        hidden_states: Tensor,  # [B, L, embed_dim]
        position_embeddings: tuple[Tensor, Tensor],  # each [B, L, D]
        attention_mask: Tensor | None = None,  # [B, 1, L, Lkv]
        past_key_values: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As the layer of transformers: (out [B, L, embed_dim], probabilities [B, Hq, L, Lkv] or None).

        Args:
            position_embeddings: (cos, sin) of the model's RoPE.
            attention_mask: as `attnpack.hf` makes it for the model, or None for causal.
            past_key_values: a cache of transformers, which keeps the rotated keys of layer `layer_idx`.

        Raises:
            TypeError: past_key_values is a cache of attnpack.
        """
        if past_key_values is not None and not hasattr(past_key_values, "update"):
            kind = "an attnpack" if isinstance(past_key_values, KVCache) else "a"
            raise TypeError(
                f"attnpack: past_key_values is {kind} {type(past_key_values).__name__}, a replaced layer wants a cache "
                "of transformers: transformers.DynamicCache() or StaticCache"
            )
        query, key, value = self._heads(hidden_states, None, None)
        query, key = (_rotated(heads, *position_embeddings) for heads in (query, key))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        joined, weights = attention_forward(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.dropout if self.training else 0.0,
            scaling=self.scale,
            **others,
        )
        return self._output(joined.flatten(2)), weights

    def _make_cpp(self, device: str | None) -> Any:
        if device == "meta" and "config" not in self.__dict__:
            return super()._make_cpp(device)  # the constructor asks for its arguments to be judged
        raise TypeError(
            "attnpack: a layer that replaces one of transformers has no C++ twin, because the model rotates for it; "
            "load the checkpoint with attnpack.CausalLM.from_hf for a model that runs in C++"
        )


def _shared_norm(theirs: nn.Module) -> RMSNorm:
    """Our RMSNorm on the weight of one of transformers'."""
    norm = RMSNorm(theirs.weight.numel(), eps=theirs.variance_epsilon, device="meta")
    norm.weight = theirs.weight
    return norm


def _rotated(
    x: Tensor,  # [B, H, L, D]
    cos: Tensor,  # [B, L, D], each half of it the same
    sin: Tensor,
) -> Tensor:
    half = cos.size(-1) // 2
    return apply_rope(x, cos[:, None, :, :half].float(), sin[:, None, :, :half].float())


def replace(model: nn.Module) -> int:
    """Puts our layers in the place of all that are known; how many."""
    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in list(parent.named_children())
        if _is_known(child)
    ]
    made: dict[nn.Module, nn.Module] = {}
    for parent, name, child in found:
        if child not in made:
            made[child] = HfGroupedQueryAttention(child)
        setattr(parent, name, made[child])
    return len(found)


def _is_known(layer: nn.Module) -> bool:
    return type(layer).__name__ in GROUPED and type(layer).__module__.startswith("transformers.models.")
