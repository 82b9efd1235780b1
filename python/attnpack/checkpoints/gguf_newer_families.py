"""The architectures of GGUF files that llama.cpp has had since 2025, and older ones with LayerNorm: as
`gguf_families`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..file_errors import excerpt
from .gguf_experts import CORRECTION, EXPERTS, SHARED, sigmoid_experts, wide_experts
from .gguf_families import _SANDWICH, Architecture, _rotated, sliding_layers
from .gguf_settings import GgufSettings

_OUTPUT_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_FACTORS = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")


def windows_in_turns(
    file: GgufSettings, config: Mapping[str, Any], period: int, **without: Any
) -> list[dict[str, Any]] | None:
    """Settings by layer where some have a window; `without` are those of the others. None without a window."""
    if not file.setting("attention.sliding_window"):
        return None
    window = (file.size("attention.sliding_window") - 1, 0)
    slides = sliding_layers(file, config["num_layers"], period)
    return [{"window": window} if each else {"window": (-1, -1), **without} for each in slides]


def _smollm3(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer_settings": [{"rope": i % 4 != 3} for i in range(config["num_layers"])]}


def _granite(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    scale = file.number("attention.scale") if file.setting("attention.scale") else None
    rotates = file.setting("rope.scaling.finetuned", True)  # which says that here
    return {
        "embed_scale": file.number("embedding_scale", 1.0),
        "residual_scale": file.number("residual_scale", 1.0),
        "logit_scale": 1 / file.number("logit_scale", 1.0),
        "scores": {"scale": scale},
        "position_embedding": "rope" if rotates else "none",
    }


def _granite_moe(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    shared = file.setting("expert_shared_feed_forward_length")
    width = file.size("expert_shared_feed_forward_length") if shared else None
    return _granite(file, config) | {"experts": wide_experts(file, shared_dim=width)}


def _cohere2(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "norm": "layer_no_bias",
        "layout": "parallel",
        "rope_interleaved": True,
        "logit_scale": file.number("logit_scale", 1.0),
        "layer_settings": windows_in_turns(file, config, 4, rope=False),
    }


def _glm4(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    return _rotated(file, config) | {"layout": "sandwich", "rope_interleaved": True}


def _exaone4(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"layout": "output", "layer_settings": windows_in_turns(file, config, 4, rope=False)}


def _olmo2(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """OLMo 2 and 3. Layers with a window rotate by only the base."""
    options: dict[str, Any] = {"layout": "output", "qk_norm": {"all_heads": True, "eps": config["eps"]}}
    layers = windows_in_turns(file, config, 4)
    if layers is None or config["rope_scaling"] is None:
        return options | {"layer_settings": layers}
    plain = {"rope_type": "default"}
    layers = [layer if layer["window"] == (-1, -1) else layer | {"rope_scaling": plain} for layer in layers]
    return options | {"layer_settings": layers}


def _mistral3(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if config["rope_scaling"] is not None and file.setting("rope.scaling.yarn_log_multiplier"):
        options["rope_scaling"] = config["rope_scaling"] | {"attention_factor": 1.0}
    if file.setting("attention.temperature_scale"):
        growth = {"llama_4_scaling_beta": file.number("attention.temperature_scale")}
        growth["original_max_position_embeddings"] = float(file.size("rope.scaling.original_context_length"))
        options["scores"] = {"query_scale": {"type": "log", **growth}}
    return options


def _hunyuan(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"qk_norm": {"eps": config["eps"], "after_rope": True}}


def _parallel(file: GgufSettings, usual: bool) -> bool:
    if type(parallel := file.setting("use_parallel_residual", usual)) is not bool:
        raise ValueError(f"{file.path}: {file.arch}.use_parallel_residual is {parallel!r:.80}, wants True or False")
    return parallel


def _phi2(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    more = {"layout": "parallel", "activation": "gelu_tanh", "head_bias": "lm_head.bias" in file.shapes}
    return _rotated(file, config) | more


def _gptneox(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    layout = "parallel_two" if _parallel(file, True) else None
    return _rotated(file, config) | {"layout": layout, "activation": "gelu"}


def _stablelm(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    if "model.layers.0.self_attn.q_norm.weight" in file.shapes:
        raise ValueError(
            f"{file.path}: has a norm for the queries of each head (attn_q_norm), which is not supported yet"
        )
    return _rotated(file, config) | {"layout": "parallel" if _parallel(file, True) else None}


def _minimax_m2(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    experts = sigmoid_experts(file, normalize=True, correction=True)
    return _rotated(file, config) | {"qk_norm": {"all_heads": True, "eps": config["eps"]}, "experts": experts}


# llama.cpp has these numbers of Llama 4 in its code: the width of a chunk, how scores grow behind it, and the number
# of experts of the model whose queries and keys have no norm.
_CHUNK, _GROWTH, _WITHOUT_NORM = 8192, {"type": "llama4", "floor_scale": 8192.0, "attn_scale": 0.1}, 128


def _llama4(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers that rotate have chunks, and norms without weights behind the rotation; the scores of every fourth, which
    does not, grow with the position. Weights of experts are factors on their inputs."""
    if (window := file.setting("attention.sliding_window", _CHUNK)) != _CHUNK:
        raise ValueError(
            f"{file.path}: {file.arch}.attention.sliding_window is {excerpt(repr(window))}, wants {_CHUNK} or no such "
            "key: llama.cpp reads no model of this architecture with other chunks"
        )
    chunked, step = sliding_layers(file, config["num_layers"], 4), file.size("interleave_moe_layer_step")
    width = file.size("expert_feed_forward_length")
    experts = sigmoid_experts(file, normalize=False, weigh_inputs=True, shared_dim=width)
    normed = experts["num_experts"] != _WITHOUT_NORM
    layers = [
        {"rope": i % 4 != 3, "qk_norm": i % 4 != 3, "query_scale": i % 4 == 3, "experts": (i + 1) % step == 0}
        | ({"chunk": _CHUNK} if each else {})
        for i, each in enumerate(chunked)
    ]
    return {
        "rope_interleaved": True,
        "qk_norm": {"eps": config["eps"], "after_rope": True, "weights": False} if normed else False,
        "scores": {"query_scale": _GROWTH},
        "experts": experts,
        "layer_settings": layers,
    }


NEWER = {
    "smollm3": Architecture(_smollm3, interleaved=True),
    "granite": Architecture(_granite, interleaved=True, settings=_FACTORS),
    "granitemoe": Architecture(_granite_moe, EXPERTS | SHARED, interleaved=True, settings=(*_FACTORS, "expert_count")),
    "cohere2": Architecture(_cohere2, layer_norm=True, settings=("logit_scale",), windows=True),
    "glm4": Architecture(
        _glm4, _SANDWICH, fused={"ffn_up": ("mlp.gate_proj", "mlp.up_proj")}, settings=("rope.dimension_count",)
    ),
    "exaone4": Architecture(_exaone4, _OUTPUT_NORMS, windows=True),
    "olmo2": Architecture(_olmo2, _OUTPUT_NORMS, windows=True),
    "mistral3": Architecture(
        _mistral3, interleaved=True, settings=("attention.temperature_scale", "rope.scaling.yarn_log_multiplier")
    ),
    "seed_oss": Architecture(names={"post_attention_norm": "post_attention_layernorm"}),
    "hunyuan-dense": Architecture(_hunyuan),
    "ernie4_5": Architecture(lambda file, config: {"rope_interleaved": True}),
    "arcee": Architecture(lambda file, config: {"activation": "relu2"}, interleaved=True),
    "phi2": Architecture(_phi2, layer_norm=True, settings=("rope.dimension_count",)),
    "gptneox": Architecture(
        _gptneox,
        layer_norm=True,
        settings=("rope.dimension_count", "use_parallel_residual"),
    ),
    "stablelm": Architecture(_stablelm, layer_norm=True, settings=("rope.dimension_count", "use_parallel_residual")),
    "minimax-m2": Architecture(
        _minimax_m2,
        EXPERTS | CORRECTION,
        settings=("rope.dimension_count", "expert_count"),
    ),
    "llama4": Architecture(_llama4, EXPERTS | SHARED, settings=("expert_count",), windows=True),
}
