"""The architectures of GGUF files: how llama.cpp's converter names and fuses their tensors, and what their models have
beside Llama's. A setting that llama.cpp keeps in its code, and not in the file, stands here too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from .gguf_parts import Part
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
_EXPERTS = {"ffn_gate_inp": "mlp.gate"} | {
    f"ffn_{name}_exps": f"mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
} | {f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture. `options(file, config)` gives the keywords of CausalLM beside Llama's."""

    options: Callable[[GgufSettings, Mapping[str, Any]], dict[str, Any]] = lambda file, config: {}
    names: Mapping[str, str] = field(default_factory=dict)
    """State dict names of a layer's tensors beside Llama's; `*` stands for the number of an expert."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors whose rows are those of several projections."""
    interleaved: bool = False
    """The rows of q and k are stored as interleaved RoPE pairs."""
    layer_norm: bool = False
    """The norms are LayerNorms."""
    settings: tuple[str, ...] = ()
    """Settings beside Llama's that `options` reads."""
    windows: bool = False
    """`options` says the window of each layer."""
    hybrid: bool = False
    """Some layers may be recurrent. Where head counts are listed, these have no heads of keys."""
    parts: Callable[[GgufSettings], Mapping[str, tuple[Part, ...]]] = lambda file: {}
    """Tensors of a layer, by their whole names, that hold other rows, shapes or numbers than the state dict."""

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


def _plain_experts(file: GgufSettings, normalize: bool, **more: Any) -> dict[str, Any]:
    """Experts that softmax scores, without groups."""
    file.refuse("expert_shared_count", "expert_group_count", "expert_group_used_count", usual=(0, 1))
    file.refuse("expert_weights_scale", usual=(0.0, 1.0))
    file.refuse("expert_gating_func", usual=(1, 3))  # softmax, of all experts or of those chosen
    if file.setting("expert_weights_norm", normalize) is not normalize:
        raise ValueError(f"{file.path}: {file.arch}.expert_weights_norm is not {normalize}, which is not supported yet")
    return _experts(file, normalize, **more)


def _wide_experts(file: GgufSettings, **more: Any) -> dict[str, Any]:
    """Experts each as wide as feed_forward_length: llama.cpp writes no width of theirs for these architectures."""
    width = file.size("expert_feed_forward_length", file.size("feed_forward_length"))
    return _plain_experts(file, normalize=True, **more) | {"hidden_dim": width}


def _experts(file: GgufSettings, normalize: bool, **more: Any) -> dict[str, Any]:
    used = file.size("expert_used_count")
    return {
        "hidden_dim": file.size("expert_feed_forward_length", max(file.size("feed_forward_length") // used, 1)),
        "num_experts": file.size("expert_count"),
        "top_k": used,
        "normalize": normalize,
        **more,
    }


def _llama(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """Llama, or Mixtral."""
    return {"experts": _wide_experts(file)} if file.setting("expert_count") else {}


def _gpt_oss(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    more = {"gate_bias": True, "bias": True, "activation": "clamped_swiglu"}
    options: dict[str, Any] = {
        "scores": {"sinks": True},
        "experts": _plain_experts(file, normalize=True, **more),
        "layer_settings": _windows(file, file.size("attention.sliding_window"), 2),
        "mlp_bias": False,
    }
    if config["rope_scaling"] is not None:
        options["rope_scaling"] = config["rope_scaling"] | {"truncate": False}
    return options


def _deepseek2(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek-V2 and V3. Files with attn_k_b and attn_v_b give the widths of the absorbed heads as key_length and
    value_length, and those of the heads themselves as key_length_mla and value_length_mla."""
    rotated, key_dim = file.size("rope.dimension_count"), file.size("attention.key_length_mla", config["head_dim"])
    latent = {
        "kv_lora_rank": file.size("attention.kv_lora_rank"),
        "qk_nope_head_dim": key_dim - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": file.size("attention.value_length_mla", file.size("attention.value_length", key_dim)),
    }
    if file.setting("attention.q_lora_rank"):
        latent["q_lora_rank"] = file.size("attention.q_lora_rank")
    heads = {"num_kv_heads": None, "head_dim": None, "out_bias": None, "rope_interleaved": True, "latent": latent}
    scaling = config["rope_scaling"]
    if scaling is not None:  # the file holds 0.1 * mscale_all_dim, and llama.cpp takes mscale to be the same number
        power = {"mscale_all_dim": file.number("rope.scaling.yarn_log_multiplier", 1.0) / 0.1}
        scaling = scaling | {"attention_factor": 1.0}
        scaling |= power if file.setting("rope.scaling.yarn_log_multiplier") else {}
    heads["rope_scaling"] = scaling
    if not file.setting("expert_count"):
        return heads
    file.refuse("expert_gating_func", usual=(1, 2))  # softmax, sigmoid
    if type(normalize := file.setting("expert_weights_norm", False)) is not bool:
        raise ValueError(f"{file.path}: {file.arch}.expert_weights_norm is {normalize!r:.80}, wants True or False")
    width, shared = file.size("expert_feed_forward_length"), file.setting("expert_shared_count")
    experts = _experts(
        file,
        normalize=normalize,
        scores="sigmoid" if file.size("expert_gating_func", 1) == 2 else "softmax",
        scaling=file.number("expert_weights_scale", 1.0),
        num_groups=file.size("expert_group_count", 1),
        top_groups=file.size("expert_group_used_count", 1),
        shared_dim=width * file.size("expert_shared_count") if shared else None,
        correction=any(name.endswith("e_score_correction_bias") for name in file.shapes),
    )
    dense = file.size("leading_dense_block_count") if file.setting("leading_dense_block_count") else 0
    layers = [{"experts": i >= dense} for i in range(config["num_layers"])]
    return heads | {"experts": experts, "layer_settings": layers}


ARCHITECTURES = {
    "llama": Architecture(_llama, _EXPERTS, interleaved=True, settings=("expert_count",)),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "qwen3moe": Architecture(
        lambda file, config: {"experts": _plain_experts(file, normalize=True)}, _EXPERTS, settings=("expert_count",)
    ),
    "gemma2": Architecture(
        _gemma2, _SANDWICH, settings=("attn_logit_softcapping", "final_logit_softcapping"), windows=True
    ),
    "gemma3": Architecture(
        _gemma3, _SANDWICH, settings=("final_logit_softcapping", "rope.freq_base_swa"), windows=True
    ),
    "phi3": Architecture(
        _phi3,
        fused={"attn_qkv": _QKV, "ffn_up": ("mlp.gate_proj", "mlp.up_proj")},
        settings=("rope.dimension_count", "rope.scaling.attn_factor"),
    ),
    "starcoder2": Architecture(lambda file, config: {"activation": "gelu_tanh"}, layer_norm=True),
    "gpt2": Architecture(_learned, fused={"attn_qkv": _QKV}, layer_norm=True),
    "starcoder": Architecture(_learned, fused={"attn_qkv": _QKV}, layer_norm=True),
    "falcon": Architecture(
        _falcon, fused={"attn_qkv": _QKV}, layer_norm=True, settings=("use_parallel_residual",)
    ),
    "gpt-oss": Architecture(
        _gpt_oss,
        _EXPERTS | {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
        settings=("expert_count",),
        windows=True,
    ),
    "deepseek2": Architecture(
        _deepseek2,
        _EXPERTS | _LATENT,
        settings=("expert_count", "attention.value_length", "rope.dimension_count", "rope.scaling.yarn_log_multiplier"),
    ),
}  # fmt: skip
