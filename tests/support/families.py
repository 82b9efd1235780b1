"""Tiny random models of transformers, one for each family that CausalLM has, and the options that give ours.

Each differs from Llama in as much as the family can: a window shorter than the text, RoPE bases by layer, soft caps low
enough to matter.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from newer_families import RMS as SIZES
from newer_families import ROWS
from torch import Tensor
from transformers import AutoModelForCausalLM

OF_STARCODER2 = {name: size for name, size in SIZES.items() if name != "rms_norm_eps"}
OF_FALCON = {
    name: size for name, size in OF_STARCODER2.items() if name not in ("intermediate_size", "num_key_value_heads")
}
OF_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 96}
TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 7}
EXPERTS = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
KINDS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}
WINDOWS = [{"window": (4, 0)}, {"window": (-1, -1)}, {"window": (4, 0)}]

OURS = {"num_kv_heads": 2, "hidden_dim": 48, "eps": 1e-5, "max_positions": 64}
OURS_GPT2 = {
    "hidden_dim": 128,
    "eps": 1e-5,
    "max_positions": 64,
    "norm": "layer",
    "bias": True,
    "mlp_bias": True,
    "position_embedding": "learned",
    "tie_embeddings": True,
}
OURS_FALCON = {
    "hidden_dim": 128,
    "eps": 1e-5,
    "norm": "layer",
    "activation": "gelu",
    "tie_embeddings": True,
    "max_positions": 64,
}


@dataclass(frozen=True)
class Family:
    config: str
    theirs: dict[str, Any]
    ours: dict[str, Any]
    latent: bool = False
    windows: list[int] = field(default_factory=list)
    """The number of tokens that each layer sees, 0 for all."""


FAMILIES = {
    "llama": Family("LlamaConfig", SIZES, OURS),
    "qwen2_windows": Family(
        "Qwen2Config",
        SIZES | KINDS | {"use_sliding_window": True},
        OURS | {"bias": True, "out_bias": False, "layer_settings": WINDOWS},
        windows=[5, 0, 5],
    ),
    "gemma2": Family(
        "Gemma2Config",
        SIZES
        | KINDS
        | {
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        },
        OURS
        | {
            "head_dim": 12,
            "norm": "rms_plus_one",
            "layout": "sandwich",
            "activation": "geglu_tanh",
            "embed_scale": 32**0.5,
            "final_softcap": 2.0,
            "scores": {"scale": 20**-0.5, "softcap": 1.5},
            "layer_settings": WINDOWS,
            "tie_embeddings": True,
            "rope_base": 700.0,
        },
        windows=[5, 0, 5],
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        SIZES
        | KINDS
        | {
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        OURS
        | {
            "head_dim": 12,
            "norm": "rms_plus_one",
            "layout": "sandwich",
            "activation": "geglu_tanh",
            "embed_scale": 32**0.5,
            "qk_norm": {"eps": 1e-5, "plus_one": True},
            "scores": {"scale": 20**-0.5},
            "layer_settings": [
                {"window": (4, 0), "rope_base": 100.0},
                {"rope_base": 900.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
                {"window": (4, 0), "rope_base": 100.0},
            ],
            "tie_embeddings": True,
        },
        windows=[5, 0, 5],
    ),
    "phi3": Family(
        "Phi3Config",
        SIZES
        | {
            "sliding_window": 7,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.2],
                "long_factor": [2.0, 5.0],
            },
            "original_max_position_embeddings": 16,
        },
        OURS
        | {
            "window": (6, 0),
            "rope_base": 300.0,
            "scores": {"rope_dim": 4},
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.2],
                "long_factor": [2.0, 5.0],
                "original_max_position_embeddings": 16,
                "factor": 4.0,
            },
        },
        windows=[7, 7, 7],
    ),
    "olmo2": Family("Olmo2Config", SIZES, OURS | {"layout": "output", "qk_norm": {"eps": 1e-5, "all_heads": True}}),
    "starcoder2": Family(
        "Starcoder2Config",
        OF_STARCODER2 | {"sliding_window": 6, "norm_epsilon": 1e-5},
        OURS
        | {
            "norm": "layer",
            "bias": True,
            "mlp_bias": True,
            "activation": "gelu_tanh",
            "window": (5, 0),
            "tie_embeddings": True,
        },
        windows=[6, 6, 6],
    ),
    "gpt2": Family("GPT2Config", OF_GPT2 | TOKENS, OURS_GPT2 | {"activation": "gelu_tanh"}),
    "gpt_oss": Family(
        "GptOssConfig",
        SIZES
        | KINDS
        | {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": YARN | {"truncate": False},
        },
        OURS
        | {
            "bias": True,
            "rope_base": 500.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "truncate": False,
            },
            "scores": {"sinks": True},
            "layer_settings": WINDOWS,
            "experts": {
                "hidden_dim": 48,
                "num_experts": 4,
                "top_k": 2,
                "normalize": True,
                "gate_bias": True,
                "bias": True,
                "activation": "clamped_swiglu",
            },
        },
        windows=[5, 0, 5],
    ),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        SIZES | EXPERTS | {"head_dim": 12, "num_experts": 6, "norm_topk_prob": True, "mlp_only_layers": [1]},
        OURS
        | {
            "head_dim": 12,
            "qk_norm": {"eps": 1e-5},
            "experts": {"hidden_dim": 12, "num_experts": 6, "top_k": 2, "normalize": True},
            "layer_settings": [{}, {"experts": False}, {}],
        },
    ),
    "deepseek_v2": Family(
        "DeepseekV2Config",
        SIZES
        | LATENT
        | EXPERTS
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        },
        {
            "latent": {name: size for name, size in LATENT.items() if name != "q_lora_rank"},
            "hidden_dim": 48,
            "eps": 1e-5,
            "max_positions": 64,
            "rope_interleaved": True,
            "rope_base": 500.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 0.7,
                "mscale_all_dim": 0.7,
            },
            "experts": {
                "hidden_dim": 12,
                "num_experts": 6,
                "top_k": 2,
                "num_groups": 3,
                "top_groups": 2,
                "scaling": 1.5,
                "shared_dim": 24,
            },
            "layer_settings": [{"experts": False}, {}, {}],
        },
        latent=True,
    ),
    "deepseek_v3": Family(
        "DeepseekV3Config",
        SIZES
        | LATENT
        | EXPERTS
        | {
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "attention_bias": True,
        },
        {
            "latent": LATENT,
            "hidden_dim": 48,
            "eps": 1e-5,
            "max_positions": 64,
            "bias": True,
            "rope_interleaved": True,
            "rope_base": 500.0,
            "experts": {
                "hidden_dim": 12,
                "num_experts": 8,
                "top_k": 2,
                "scores": "sigmoid",
                "normalize": True,
                "num_groups": 4,
                "top_groups": 2,
                "scaling": 2.5,
                "correction": True,
                "shared_dim": 12,
            },
            "layer_settings": [{"experts": False}, {}, {}],
        },
        latent=True,
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeConfig", OF_GPT2 | TOKENS, OURS_GPT2 | {"num_kv_heads": 1, "activation": "gelu_tanh"}
    ),
    "gpt_bigcode_heads": Family(
        "GPTBigCodeConfig", OF_GPT2 | TOKENS | {"multi_query": False}, OURS_GPT2 | {"activation": "gelu_tanh"}
    ),
    "falcon_7b": Family("FalconConfig", OF_FALCON, OURS_FALCON | {"num_kv_heads": 1, "layout": "parallel"}),
    "falcon_40b": Family(
        "FalconConfig",
        OF_FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
        OURS_FALCON | {"num_kv_heads": 2, "layout": "parallel_two"},
    ),
    "falcon_in_turn": Family(
        "FalconConfig",
        OF_FALCON | {"multi_query": False, "parallel_attn": False, "bias": True},
        OURS_FALCON | {"num_kv_heads": 4, "bias": True, "mlp_bias": True},
    ),
}


FAMILIES |= {
    name: Family(config, theirs, ours, latent="latent" in ours, windows=windows)
    for name, (config, theirs, ours, windows) in ROWS.items()
}


def peer_from(config: Any) -> torch.nn.Module:
    """transformers' model of the configuration, in evaluation mode. Its Auto classes lack Mistral 4."""
    own = getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"), None)
    make = AutoModelForCausalLM.from_config if own is None else own._from_config
    return make(config, attn_implementation="eager").eval()


def with_noise(model: torch.nn.Module) -> torch.nn.Module:
    """The model, its weights now random and large enough to tell."""
    with torch.no_grad():
        for weight, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and not weight.endswith(("inv_freq", "embed_scale")):
                tensor.add_(0.15 * torch.randn_like(tensor))
    return model


@functools.cache
def peer_of(name: str) -> torch.nn.Module:
    """The model of transformers, with random weights."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    return with_noise(peer_from(getattr(transformers, family.config)(**copy.deepcopy(family.theirs))))


def model_of(name: str, **changed: Any) -> Any:
    """Our model with the weights of the peer."""
    import attnpack

    model = attnpack.CausalLM(96, 32, 3, 4, **(FAMILIES[name].ours | changed)).eval()
    model.load_state_dict(state_of(name), strict=True)
    return model


def state_of(name: str, gradients: bool = False) -> dict[str, Tensor]:
    """The weights of the peer, or their gradients, under our names."""
    peer, state = peer_of(name), {}
    given = peer.state_dict()
    if gradients:
        given = {weight: parameter.grad for weight, parameter in peer.named_parameters()}
    for key, value in given.items():
        for ours, part in _parts(peer.config, key, value):
            state[ours] = part.contiguous().clone()
    if FAMILIES[name].ours.get("tie_embeddings"):
        state.pop("lm_head.weight", None)
    return state


_RENAMED = {
    "transformer.h.": "model.layers.",
    "transformer.wte": "model.embed_tokens",
    "transformer.word_embeddings": "model.embed_tokens",
    "transformer.wpe": "model.embed_positions",
    "transformer.ln_f": "model.norm",
    ".self_attention.": ".self_attn.",
    ".attn.": ".self_attn.",
    ".self_attn.c_proj": ".self_attn.o_proj",
    ".self_attn.dense": ".self_attn.o_proj",
    ".ln_1.": ".input_layernorm.",
    ".ln_2.": ".post_attention_layernorm.",
    ".ln_attn.": ".input_layernorm.",
    ".ln_mlp.": ".post_attention_layernorm.",
    ".mlp.c_fc": ".mlp.up_proj",
    ".mlp.c_proj": ".mlp.down_proj",
    ".mlp.dense_h_to_4h": ".mlp.up_proj",
    ".mlp.dense_4h_to_h": ".mlp.down_proj",
    ".mlp.router.": ".mlp.gate.",
}


_RENAMED_IN = {
    "glm4": {
        ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
        ".post_self_attn_layernorm.": ".post_attention_layernorm.",
        ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
    },
    "hunyuan_v1_dense": {".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm."},
    "phi": {".fc1.": ".up_proj.", ".fc2.": ".down_proj.", ".final_layernorm.": ".norm."},
    "gpt_neox": {
        "gpt_neox.embed_in.": "model.embed_tokens.",
        "gpt_neox.layers.": "model.layers.",
        "gpt_neox.final_layer_norm.": "model.norm.",
        ".attention.": ".self_attn.",
    },
    "minimax_m2": {".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias"},
    "granitemoehybrid": {".block_sparse_moe.router.": ".mlp.gate.", ".block_sparse_moe.": ".mlp."},
    "llama4_text": {
        ".feed_forward.router.": ".mlp.gate.",
        ".feed_forward.shared_expert.": ".mlp.shared_experts.",
        ".feed_forward.": ".mlp.",
    },
    "gemma4_text": {
        ".per_layer_input_gate.": ".tail.gate.",
        ".per_layer_projection.": ".tail.projection.",
        ".post_per_layer_input_norm.": ".tail.norm.",
        ".layer_scalar": ".tail.scalar",
        "model.embed_tokens_per_layer.": "model.layer_inputs.embed_tokens.",
        "model.per_layer_model_projection.": "model.layer_inputs.model_projection.",
        "model.per_layer_projection_norm.": "model.layer_inputs.projection_norm.",
    },
}


def _parts(config: Any, key: str, value: Tensor) -> list[tuple[str, Tensor]]:
    kind = config.model_type
    for theirs, ours in (_RENAMED_IN.get(kind, {}) | _RENAMED).items():
        key = key.replace(theirs, ours)
    if ".shared_mlp." in key:
        stem = key.partition(".shared_mlp.")[0] + (".mlp.shared_experts." if config.num_local_experts else ".mlp.")
        if "output_linear" in key:
            return [(f"{stem}down_proj.weight", value)]
        halves = zip(("gate_proj", "up_proj"), value.chunk(2), strict=True)
        return [(f"{stem}{name}.weight", half) for name, half in halves]
    if kind == "gpt2" and key.endswith("weight") and value.dim() == 2 and "embed" not in key:
        value = value.T
    stem, _, last = key.rpartition(".")
    base, _, layer = stem.rpartition(".")
    if layer in ("c_attn", "qkv_proj", "query_key_value"):
        names = [f"{base}.{name}.{last}" for name in ("q_proj", "k_proj", "v_proj")]
        return list(zip(names, _split_heads(config, value), strict=True))
    if layer == "gate_up_proj":
        return [
            (f"{base}.{name}.{last}", part) for name, part in zip(("gate_proj", "up_proj"), value.chunk(2), strict=True)
        ]
    if stem.endswith("experts"):
        return [pair for e, part in enumerate(value) for pair in _expert(kind, f"{stem}.{e}", last, part)]
    return [(key, value)]


def _expert(kind: str, stem: str, last: str, value: Tensor) -> list[tuple[str, Tensor]]:
    what = "bias" if last.endswith("_bias") else "weight"
    if kind in ("gpt_oss", "llama4_text") and what == "weight":
        value = value.T
    if last.startswith("down_proj"):
        return [(f"{stem}.down_proj.{what}", value)]
    halves = (value[::2], value[1::2]) if kind == "gpt_oss" else value.chunk(2)
    return [(f"{stem}.{name}.{what}", half) for name, half in zip(("gate_proj", "up_proj"), halves, strict=True)]


def _split_heads(config: Any, value: Tensor) -> tuple[Tensor, ...]:
    heads, dim, rest = config.num_attention_heads, config.hidden_size // config.num_attention_heads, value.shape[1:]
    if config.model_type == "falcon":
        kv = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
    elif config.model_type == "gpt_bigcode":
        kv = 1 if config.multi_query else heads
    elif config.model_type == "gpt_neox":
        kv = heads
    else:
        return value.split([heads * dim, *[(value.size(0) - heads * dim) // 2] * 2])
    if config.model_type == "gpt_bigcode" and kv == 1:
        return value.split([heads * dim, dim, dim])
    groups = value.reshape(kv, heads // kv + 2, dim, *rest)
    return groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)
