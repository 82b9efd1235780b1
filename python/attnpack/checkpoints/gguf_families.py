"""The architectures of GGUF files: how llama.cpp's converter names and fuses their tensors, and what their models have
beside Llama's. A setting that llama.cpp keeps in its code, and not in the file, stands here too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .gguf_experts import (
    CORRECTION,
    EXPERTS,
    SHARED,
    SOFTMAX,
    dense_first,
    grouped_experts,
    join_layers,
    plain_experts,
    wide_experts,
)
from .gguf_parts import Recipe, latent_heads
from .gguf_settings import GgufSettings

_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture. `options(file, config)` gives the keywords of CausalLM beside Llama's."""

    options: Callable[[GgufSettings, Mapping[str, Any]], dict[str, Any]] = lambda file, config: {}
    names: Mapping[str, str] = field(default_factory=dict)
    """State dict names of a layer's tensors beside Llama's; `*` stands for the number of an expert."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors whose rows are those of several projections, beside attn_qkv."""
    interleaved: bool = False
    """The rows of q and k are stored as interleaved RoPE pairs."""
    layer_norm: bool = False
    """The norms are LayerNorms."""
    settings: tuple[str, ...] = ()
    """Settings beside Llama's that `options` reads."""
    windows: bool = False
    """`options` says the window of each layer."""
    listed: tuple[str, ...] = ()
    """Settings that may list a number for each layer; `options` reads them."""
    recipes: Callable[[GgufSettings], Sequence[Recipe]] = lambda file: ()
    """Tensors that hold other rows, shapes or numbers than the state dict, or several of it."""
    unread: Callable[[GgufSettings], Sequence[str]] = lambda file: ()
    """How the names of tensors begin that nothing reads."""

    def layer_names(self, tensors: Collection[str]) -> dict[str, str]:
        if "blk.0.attn_norm_2.weight" in tensors:  # of Falcon-40B, in which attn_norm is that of the feed-forward
            two = {"attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"}
            return {**_LLAMA, **self.names, **two}
        return {**_LLAMA, **self.names}


def _rotated(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """The first dims of a head that rotate, if not all do."""
    dims = file.size("rope.dimension_count", config["head_dim"])
    return {} if dims == config["head_dim"] else {"scores": {"rope_dim": dims}}


def sliding_layers(file: GgufSettings, layers: int, period: int) -> list[bool]:
    """Whether each layer has the window: the file lists it, or all but the last of each `period` do."""
    pattern = file.setting("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        if len(pattern) != layers or not all(type(slides) is bool for slides in pattern):
            raise ValueError(
                f"{file.path}: {file.arch}.attention.sliding_window_pattern is {pattern!r:.80}, wants True or False "
                f"for each of {layers} layers"
            )
        return pattern
    every = file.size("attention.sliding_window_pattern", period)
    return [i % every != every - 1 for i in range(layers)]


def _windows(file: GgufSettings, width: int, period: int) -> list[dict[str, Any]]:
    """Settings by layer: those that slide see the last `width` tokens, the others all."""
    slides = sliding_layers(file, file.size("block_count"), period)
    return [{"window": (width - 1, 0) if each else (-1, -1)} for each in slides]


def _gemma(file: GgufSettings, config: Mapping[str, Any], largest: int) -> dict[str, Any]:
    """Norms are stored as 1 + weight. The largest model, with that many layers, scales by the mean width of a head."""
    wide = config["num_layers"] == largest
    scale = (config["embed_dim"] // config["num_heads"] if wide else config["head_dim"]) ** -0.5
    return {
        "layout": "sandwich",
        "activation": "geglu_tanh",
        "embed_scale": config["embed_dim"] ** 0.5,
        "scores": {"scale": scale},
    }


def _gemma2(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    options = _gemma(file, config, largest=46)
    options["scores"]["softcap"] = file.number("attn_logit_softcapping", 50.0)
    return options | {
        "final_softcap": file.number("final_logit_softcapping", 30.0),
        "layer_settings": _windows(file, file.size("attention.sliding_window", 4096), 2),
    }


def _gemma3(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    options = _gemma(file, config, largest=62)
    if file.setting("final_logit_softcapping"):
        options["final_softcap"] = file.number("final_logit_softcapping")
    if file.setting("attention.sliding_window"):
        layers = _windows(file, file.size("attention.sliding_window"), 6)
        base, scaling = file.number("rope.freq_base_swa", 10000.0), config["rope_scaling"]
        for layer in layers:
            whole = layer["window"] == (-1, -1)
            layer |= {"rope_scaling": scaling} if whole and scaling else {} if whole else {"rope_base": base}
        options |= {"layer_settings": layers, "rope_scaling": None}
    return options


def _phi3(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    options, rotated = _rotated(file, config), file.size("rope.dimension_count", config["head_dim"])
    factors = {length: file.vector(f"rope_factors_{length}.weight", rotated // 2) for length in ("short", "long")}
    if factors["long"] is not None:
        options["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": factors["short"] or factors["long"],
            "long_factor": factors["long"],
            "original_max_position_embeddings": file.size("rope.scaling.original_context_length"),
            "attention_factor": file.number("rope.scaling.attn_factor", 1.0),
        }
    else:
        file.refuse("rope.scaling.attn_factor", usual=(1.0,))
    return options


def _falcon(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    if (parallel := file.setting("use_parallel_residual", True)) is not True:
        raise ValueError(
            f"{file.path}: {file.arch}.use_parallel_residual is {parallel!r:.80}, wants True or no such key"
        )
    two = "model.layers.0.post_attention_layernorm.weight" in file.shapes
    return {"layout": "parallel_two" if two else "parallel", "activation": "gelu"}


def _learned(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"position_embedding": "learned", "activation": "gelu_tanh"}


def _llama(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """Llama, or Mixtral."""
    return {"experts": wide_experts(file)} if file.setting("expert_count") else {}


def _gpt_oss(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    more = {"gate_bias": True, "bias": True, "activation": "clamped_swiglu"}
    options: dict[str, Any] = {
        "scores": {"sinks": True},
        "experts": plain_experts(file, normalize=True, **more),
        "layer_settings": _windows(file, file.size("attention.sliding_window"), 2),
        "mlp_bias": False,
    }
    if config["rope_scaling"] is not None:
        options["rope_scaling"] = config["rope_scaling"] | {"truncate": False}
    return options


def latent(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """Latent attention. Files with attn_k_b and attn_v_b give the widths of the absorbed heads as key_length and
    value_length, and those of the heads themselves as key_length_mla and value_length_mla."""
    rotated, key_dim = file.size("rope.dimension_count"), file.size("attention.key_length_mla", config["head_dim"])
    sizes = {
        "kv_lora_rank": file.size("attention.kv_lora_rank"),
        "qk_nope_head_dim": key_dim - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": file.size("attention.value_length_mla", file.size("attention.value_length", key_dim)),
    }
    if file.setting("attention.q_lora_rank"):
        sizes["q_lora_rank"] = file.size("attention.q_lora_rank")
    return {"num_kv_heads": None, "head_dim": None, "out_bias": None, "latent": sizes}


def join_latent_heads(file: GgufSettings) -> list[Recipe]:
    return [Recipe(("attn_k_b.weight", "attn_v_b.weight"), ("self_attn.kv_b_proj.weight",), latent_heads)]


def _deepseek2(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek-V2 and V3, and Mistral's models of their kind, whose scores grow with the position."""
    options = latent(file, config) | {"rope_interleaved": True}
    if file.setting("attention.temperature_scale"):
        growth = {"llama_4_scaling_beta": file.number("attention.temperature_scale")}
        growth["original_max_position_embeddings"] = float(file.size("attention.temperature_length"))
        options["latent"]["query_scale"] = {"type": "log", **growth}
    scaling = config["rope_scaling"]
    if scaling is not None:  # the file holds 0.1 * mscale_all_dim, and llama.cpp takes mscale to be the same number
        power = {"mscale_all_dim": file.number("rope.scaling.yarn_log_multiplier", 1.0) / 0.1}
        scaling = scaling | {"attention_factor": 1.0}
        scaling |= power if file.setting("rope.scaling.yarn_log_multiplier") else {}
    options["rope_scaling"] = scaling
    if not file.setting("expert_count"):
        return options
    mixture = {"experts": grouped_experts(file, normalize=False, gating=SOFTMAX)}
    return join_layers(options | mixture, dense_first(file, config["num_layers"]))


_DEEPSEEK2 = Architecture(
    _deepseek2,
    EXPERTS | SHARED | CORRECTION | LATENT,
    settings=(
        "expert_count",
        "attention.temperature_scale",
        "attention.value_length",
        "rope.dimension_count",
        "rope.scaling.yarn_log_multiplier",
    ),
    recipes=join_latent_heads,
)
ARCHITECTURES = {
    "llama": Architecture(_llama, EXPERTS, interleaved=True, settings=("expert_count",)),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "qwen3moe": Architecture(
        lambda file, config: {"experts": plain_experts(file, normalize=True)}, EXPERTS, settings=("expert_count",)
    ),
    "gemma2": Architecture(
        _gemma2, _SANDWICH, settings=("attn_logit_softcapping", "final_logit_softcapping"), windows=True
    ),
    "gemma3": Architecture(
        _gemma3, _SANDWICH, settings=("final_logit_softcapping", "rope.freq_base_swa"), windows=True
    ),
    "phi3": Architecture(
        _phi3,
        fused={"ffn_up": ("mlp.gate_proj", "mlp.up_proj")},
        settings=("rope.dimension_count", "rope.scaling.attn_factor"),
    ),
    "starcoder2": Architecture(lambda file, config: {"activation": "gelu_tanh"}, layer_norm=True),
    "gpt2": Architecture(_learned, layer_norm=True),
    "starcoder": Architecture(_learned, layer_norm=True),
    "falcon": Architecture(
        _falcon, layer_norm=True, settings=("use_parallel_residual",)
    ),
    "gpt-oss": Architecture(
        _gpt_oss,
        EXPERTS | {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
        settings=("expert_count",),
        windows=True,
    ),
    "deepseek2": _DEEPSEEK2,
    "mistral4": _DEEPSEEK2,
}  # fmt: skip
