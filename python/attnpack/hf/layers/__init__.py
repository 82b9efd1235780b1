"""Which attention layers of transformers have a module of attnpack to replace them, and the replacing."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from .adopted import Adopted
from .grouped import HfGroupedQueryAttention
from .latent import HfLatentAttention

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


def replace(model: PreTrainedModel) -> int:
    """Puts our layers in the place of all that are known; how many are ours then, those of an earlier call too."""
    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if type(child).__module__.startswith("transformers.models.") and type(child).__name__ in KNOWN
    ]
    made = {child: KNOWN[type(child).__name__](child) for _, _, child in found}
    for parent, name, child in found:
        setattr(parent, name, made[child])
        _keep_recording(child, made[child])
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            _record_ours_too(part)
    return sum(isinstance(layer, Adopted) for layer in model.modules())


def _record_ours_too(model: PreTrainedModel) -> None:
    """Adds our classes to those whose weights the model gives for `output_attentions=True`: transformers looks for
    layers by their class, and what it does not find it leaves out without a word."""
    recorded = getattr(model, "_can_record_outputs", None) or {}
    for output, layers in recorded.items():
        layers = list(layers) if isinstance(layers, list) else [layers]
        ours = {KNOWN[layer.__name__] for layer in layers if isinstance(layer, type) and layer.__name__ in KNOWN}
        if new := [layer for layer in ours if layer not in layers]:
            recorded[output] = layers + new


def _keep_recording(theirs: nn.Module, ours: nn.Module) -> None:
    """Hooks on the results of a layer stay: the user's, and transformers' own where it has recorded before."""
    for hooks in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        getattr(ours, hooks).update(getattr(theirs, hooks))
