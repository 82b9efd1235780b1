"""Which attention layers of transformers have a module of attnpack to replace them, and the replacing."""

from __future__ import annotations

from torch import nn

from .hf_grouped import HfGroupedQueryAttention
from .hf_latent import HfLatentAttention

# Classes of transformers whose layers are q_proj, k_proj, v_proj, o_proj, RoPE on half-split pairs and, if at all,
# norms over head_dim before it; their masks carry the windows.
_GROUPED = (
    "LlamaAttention",
    "MistralAttention",
    "MixtralAttention",
    "Qwen2Attention",
    "Qwen2MoeAttention",
    "Qwen3Attention",
    "Qwen3MoeAttention",
)
# Classes whose layers are those of DeepSeek-V2 and V3.
_LATENT = ("DeepseekV2Attention", "DeepseekV3Attention", "Glm4MoeLiteAttention", "YoutuAttention")
KNOWN: dict[str, type[nn.Module]] = {
    **dict.fromkeys(_GROUPED, HfGroupedQueryAttention),
    **dict.fromkeys(_LATENT, HfLatentAttention),
}


def replace(model: nn.Module) -> int:
    """Puts our layers in the place of all that are known; how many."""
    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if type(child).__module__.startswith("transformers.models.") and type(child).__name__ in KNOWN
    ]
    made = {child: KNOWN[type(child).__name__](child) for _, _, child in found}
    for parent, name, child in found:
        setattr(parent, name, made[child])
    return len(found)
