"""Tiny random models of transformers in which most layers are recurrent, and the options that give ours."""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any, NamedTuple

import torch
from newer_families import GRANITE, OURS, OURS_GRANITE
from newer_families import RMS as SIZES
from transformers import AutoModelForCausalLM

KINDS = ["linear_attention", "full_attention", "linear_attention"]
DELTA = {"layer_types": KINDS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
         "linear_value_head_dim": 6}  # fmt: skip
HALF = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
OURS_DELTA = {"kind": "gated_delta_net", "num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 8, "head_v_dim": 6}
OURS_QWEN = OURS | {
    "head_dim": 8, "norm": "rms_plus_one", "qk_norm": {"plus_one": True, "eps": 1e-5}, "rope_base": 500.0,
    "scores": {"gate": "element", "rope_dim": 4}, "recurrent": OURS_DELTA,
}  # fmt: skip
ATTENDS = [{}, {"recurrent": False}, {}]


class Hybrid(NamedTuple):
    folder: str
    config: str
    theirs: dict[str, Any]
    ours: dict[str, Any]


HYBRIDS = {
    "qwen3_5": Hybrid(
        "qwen3_5", "Qwen3_5TextConfig", SIZES | DELTA | {"head_dim": 8, "rope_parameters": HALF},
        OURS_QWEN | {"layer_settings": ATTENDS},
    ),
    "qwen3_next": Hybrid(
        "qwen3_next", "Qwen3NextConfig",
        SIZES | DELTA | {"head_dim": 8, "rope_parameters": HALF, "num_experts": 4, "num_experts_per_tok": 2,
                         "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
        OURS_QWEN | {
            "experts": {"hidden_dim": 12, "num_experts": 4, "top_k": 2, "normalize": True, "shared_dim": 20,
                        "shared_gate": True},
            "layer_settings": [{}, {"recurrent": False, "experts": False}, {}],
        },
    ),
    "olmo_hybrid": Hybrid(
        "olmo_hybrid", "OlmoHybridConfig",
        SIZES | DELTA | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        OURS | {"rope_base": 500.0, "qk_norm": {"all_heads": True, "eps": 1e-5},
                "recurrent": OURS_DELTA | {"norm_eps": 1e-5, "allow_neg_eigval": True},
                "layer_settings": [{}, {"recurrent": False, "layout": "output"}, {}]},
    ),
    "kimi_linear": Hybrid(
        "kimi_linear", "KimiLinearConfig",
        SIZES | {"num_key_value_heads": 4, "layer_types": KINDS, "linear_num_heads": 3, "linear_head_dim": 8,
                 "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 7, "q_lora_rank": None,
                 "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 2,
                 "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        {"hidden_dim": 48, "eps": 1e-5, "max_positions": 64, "position_embedding": "none",
         "latent": {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 7},
         "recurrent": {"kind": "kimi_delta_attention", "num_v_heads": 3, "head_k_dim": 8},
         "experts": {"hidden_dim": 12, "num_experts": 4, "top_k": 2, "scores": "sigmoid", "correction": True,
                     "normalize": True, "scaling": 2.446, "num_groups": 2, "top_groups": 1, "shared_dim": 12},
         "layer_settings": [{"experts": False}, {"recurrent": False}, {}]},
    ),
    "granitemoehybrid": Hybrid(
        "granitemoehybrid", "GraniteMoeHybridConfig",
        SIZES | GRANITE | {"layer_types": KINDS, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6,
                           "num_local_experts": 4, "shared_intermediate_size": 20, "position_embedding_type": "rope"},
        OURS | OURS_GRANITE | {
            "hidden_dim": 20, "experts": {"hidden_dim": 48, "num_experts": 4, "top_k": 2, "normalize": True,
                                          "shared_dim": 20},
            "recurrent": {"kind": "mamba2", "num_v_heads": 8, "num_k_heads": 2, "head_k_dim": 6, "head_v_dim": 8},
            "layer_settings": ATTENDS},
    ),
    "bamba": Hybrid(
        "bamba", "BambaConfig",
        SIZES | {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 6, "mamba_proj_bias": True,
                 "mamba_conv_bias": False, "rope_parameters": HALF},
        OURS | {"rope_base": 500.0, "scores": {"rope_dim": 4}, "layer_settings": ATTENDS,
                "recurrent": {"kind": "mamba2", "num_v_heads": 4, "head_k_dim": 6, "head_v_dim": 16, "bias": True,
                              "conv_bias": False}},
    ),
    "lfm2": Hybrid(
        "lfm2", "Lfm2Config",
        {name: size for name, size in SIZES.items() if name != "rms_norm_eps"} | {
            "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-5, "block_multiple_of": 8,
            "conv_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        OURS | {"hidden_dim": 32, "tie_embeddings": True, "rope_base": 500.0, "qk_norm": {"eps": 1e-5},
                "recurrent": {"kind": "gated_convolution", "conv_kernel_size": 3, "bias": True},
                "layer_settings": ATTENDS},
    ),
    "lfm2_moe": Hybrid(
        "lfm2_moe", "Lfm2MoeConfig",
        {name: size for name, size in SIZES.items() if name != "rms_norm_eps"} | {
            "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-5, "num_dense_layers": 1,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        OURS | {"tie_embeddings": True, "rope_base": 500.0, "qk_norm": {"eps": 1e-5},
                "recurrent": {"kind": "gated_convolution", "conv_kernel_size": 3},
                "experts": {"hidden_dim": 12, "num_experts": 4, "top_k": 2, "scores": "sigmoid", "correction": True,
                            "normalize": True},
                "layer_settings": [{"experts": False}, {"recurrent": False}, {}]},
    ),
    "qwen3_5_moe": Hybrid(
        "qwen3_5_moe", "Qwen3_5MoeTextConfig",
        {name: size for name, size in SIZES.items() if name != "intermediate_size"} | DELTA
        | {"head_dim": 8, "rope_parameters": HALF, "num_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
        OURS_QWEN | {
            "experts": {"hidden_dim": 12, "num_experts": 4, "top_k": 2, "normalize": True, "shared_dim": 20,
                        "shared_gate": True},
            "layer_settings": ATTENDS,
        },
    ),
}  # fmt: skip


@functools.cache
def hybrid_peer(name: str) -> torch.nn.Module:
    return changed_peer(name)


def changed_peer(name: str, **changes: Any) -> torch.nn.Module:
    """The model of transformers, with random weights that are large enough to tell, and some settings changed."""
    family = HYBRIDS[name]
    torch.manual_seed(0)
    settings = copy.deepcopy(family.theirs | changes)
    config = getattr(importlib.import_module(f"transformers.models.{family.folder}"), family.config)(**settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and "inv_freq" not in weight:
                tensor.add_(0.15 * torch.randn_like(tensor))
            if weight.endswith("A_log"):
                tensor.uniform_(-2, 1)
    return model
