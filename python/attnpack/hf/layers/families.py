"""Which classes of transformers have layers that a module of ours computes, and how these layers differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

# How a model gives the r/2 angles of a row of its RoPE table: twice, in two equal halves; once; or each twice in turn.
HALVES, ONCE, IN_TURN = "halves", "once", "in turn"


class Grouped(NamedTuple):
    """How a layer with q_proj, k_proj, v_proj and o_proj differs from Llama's. Its window is in its mask."""

    gate: str = ""
    """The child that gives the gate of the heads' outputs; "q_proj" gives each head's queries and then its gate."""
    gate_activation: str = "sigmoid"
    plus_one: bool = False
    """q_norm and k_norm multiply by 1 + weight."""
    all_heads: bool = False
    """q_norm and k_norm are over all heads together."""
    softcap: str = ""
    """The attribute with the soft cap."""
    interleaved: bool = False
    table: str = HALVES
    rotates: Callable[[nn.Module], bool] = lambda _: True
    """Whether a layer rotates at all."""


class Latent(NamedTuple):
    """How a layer of latent attention differs from DeepSeek-V3's."""

    gate: str = ""
    interleaved: bool | None = None
    """None: as the setting rope_interleave says."""
    selects: bool = False
    """Its indexer, or that of an earlier layer, names the keys of a query."""
    hands_on: bool = False
    """It also returns the selection, for later layers."""


def _in_windows(layer: nn.Module) -> bool:
    return layer.sliding_window is not None


def _in_windows_of_some(layer: nn.Module) -> bool:
    return layer.sliding_window is None or layer.is_sliding


_GATED = Grouped(gate="q_proj", plus_one=True)
_ALL_HEADS = Grouped(all_heads=True)
_SOME_ROTATE = Grouped(rotates=_in_windows_of_some)
_LIKE_DEEPSEEK = (
    "DeepseekV2Attention",
    "DeepseekV3Attention",
    "Glm4MoeLiteAttention",
    "YoutuAttention",
    "AXK1Attention",
)
GROUPED: dict[str, Grouped] = {
    **dict.fromkeys(
        (
            "LlamaAttention",
            "MistralAttention",
            "MixtralAttention",
            "Qwen2Attention",
            "Qwen2MoeAttention",
            "Qwen3Attention",
            "Qwen3MoeAttention",
            "ArceeAttention",
            "Dots1Attention",
            "Glm4MoeAttention",
            "GraniteAttention",
            "GraniteMoeAttention",
            "GraniteSWAAttention",
            "GraniteMoeSWAAttention",
            "HYV3Attention",
            "MellumAttention",
        ),
        Grouped(),
    ),
    **dict.fromkeys(("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"), _GATED),
    "Step3p7Attention": Grouped(gate="g_proj", plus_one=True),
    "Lfm3Attention": Grouped(gate="g_proj"),
    "LagunaAttention": Grouped(gate="g_proj", gate_activation="softplus"),
    "AfmoeAttention": Grouped(gate="gate_proj", rotates=lambda layer: layer.is_local_attention),
    "GptOssAttention": Grouped(table=ONCE),
    "FlintAttention": Grouped(rotates=_in_windows),
    **dict.fromkeys(("MiniMaxM2Attention", "Olmo2Attention", "Olmo3Attention", "FlexOlmoAttention"), _ALL_HEADS),
    "MiniMaxM3VLAttention": Grouped(plus_one=True),
    **dict.fromkeys(
        ("Exaone4Attention", "ExaoneMoeAttention", "Kolibri1Attention"), Grouped(rotates=_in_windows_of_some)
    ),
    "SmolLM3Attention": Grouped(rotates=lambda layer: bool(layer.use_rope)),
    "Gemma2Attention": Grouped(softcap="attn_logit_softcapping"),
    "Gemma3Attention": Grouped(plus_one=True),
    "Cohere2Attention": Grouped(interleaved=True, table=IN_TURN, rotates=_in_windows),
    **dict.fromkeys(("Ernie4_5Attention", "Ernie4_5_MoeAttention", "Glm4Attention"), Grouped(interleaved=True)),
}
LATENT: dict[str, Latent] = {
    "DeepseekV2Attention": Latent(),
    "DeepseekV3Attention": Latent(),
    "Glm4MoeLiteAttention": Latent(),
    "YoutuAttention": Latent(),
    "AXK1Attention": Latent(),
    "MiniCPM3Attention": Latent(interleaved=False),
    "BailingHybridAttention": Latent(gate="g_proj", interleaved=True),
    "KimiLinearAttention": Latent(),
    "DeepseekV32Attention": Latent(selects=True, interleaved=True),
    "GlmMoeDsaAttention": Latent(selects=True, interleaved=True, hands_on=True),
}
