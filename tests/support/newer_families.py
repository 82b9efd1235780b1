"""Rows of `families.FAMILIES`: the families that transformers has had since 2025, and older ones with LayerNorm."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
RMS = SIZES | {"rms_norm_eps": 1e-5}
LAYER = SIZES | {"layer_norm_eps": 1e-5}
KINDS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}
WINDOW, NONE = {"window": (4, 0)}, {"window": (-1, -1)}
OURS: dict[str, Any] = {"num_kv_heads": 2, "hidden_dim": 48, "eps": 1e-5, "max_positions": 64}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.7,
}
OURS_GRANITE = {"embed_scale": 3.0, "residual_scale": 0.4, "logit_scale": 1 / 0.7, "scores": {"scale": 0.2}}
LONG = {"type": "log", "llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 6.0}
YARN = {
    "max_position_embeddings": 99,  # as the classes of Ministral 3 and Mistral 4 have by default; it says nothing
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 6,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
OURS_YARN = {
    name: YARN[name] for name in YARN if name not in ("max_position_embeddings", "rope_theta", "llama_4_scaling_beta")
}


def partial(part: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": part}


CHUNKS = {"chunk": 6, "query_scale": False, "experts": False}
FULL = NONE | {
    "head_dim": 16,
    "rope_base": 1e6,
    "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}
OURS_GEMMA4 = OURS | {
    "head_dim": 8,
    "layout": "sandwich",
    "activation": "geglu_tanh",
    "embed_scale": 32**0.5,
    "qk_norm": {"eps": 1e-5, "values": True},
    "scores": {"scale": 1.0},
    "tie_embeddings": True,
}

# name: (class of the configuration, its settings, ours, windows of the layers)
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[int]]] = {
    "smollm3": (
        "SmolLM3Config",
        RMS | {"no_rope_layers": [1, 0, 1], "attention_bias": True, "mlp_bias": True},
        OURS
        | {
            "bias": True,
            "mlp_bias": True,
            "rope_base": 2e6,
            "tie_embeddings": True,
            "layer_settings": [{}, {"rope": False}, {}],
        },
        [],
    ),
    "smollm3_windows": (
        "SmolLM3Config",
        RMS
        | {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 5,
            "tie_word_embeddings": False,
        },
        OURS | {"rope_base": 2e6, "layer_settings": [NONE, {"rope": False, "window": (4, 0)}, NONE]},
        [0, 5, 0],
    ),
    "granite": ("GraniteConfig", RMS | GRANITE | {"mlp_bias": True}, OURS | OURS_GRANITE | {"mlp_bias": True}, []),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        RMS
        | GRANITE
        | {
            "layer_types": ["attention"] * 3,
            "mamba_n_heads": 8,
            "num_local_experts": 4,
            "shared_intermediate_size": 20,
            "position_embedding_type": "rope",
        },
        OURS
        | OURS_GRANITE
        | {
            "hidden_dim": 20,
            "experts": {"hidden_dim": 48, "num_experts": 4, "top_k": 2, "normalize": True, "shared_dim": 20},
        },
        [],
    ),
    "granite_hybrid_dense": (
        "GraniteMoeHybridConfig",
        RMS
        | GRANITE
        | {
            "layer_types": ["attention"] * 3,
            "mamba_n_heads": 8,
            "num_local_experts": 0,
            "shared_intermediate_size": 20,
        },
        OURS | OURS_GRANITE | {"hidden_dim": 20, "position_embedding": "none"},
        [],
    ),
    "cohere2": (
        "Cohere2Config",
        LAYER | KINDS | {"attention_bias": True, "logit_scale": 0.4},
        OURS
        | {
            "bias": True,
            "norm": "layer_no_bias",
            "layout": "parallel",
            "rope_interleaved": True,
            "logit_scale": 0.4,
            "tie_embeddings": True,
            "layer_settings": [WINDOW, NONE | {"rope": False}, WINDOW],
        },
        [5, 0, 5],
    ),
    "glm4": (
        "Glm4Config",
        RMS | {"head_dim": 12, "rope_parameters": partial(0.5)},
        OURS
        | {
            "head_dim": 12,
            "bias": True,
            "out_bias": False,
            "layout": "sandwich",
            "rope_interleaved": True,
            "rope_base": 300.0,
            "scores": {"rope_dim": 6},
        },
        [],
    ),
    "exaone4": (
        "Exaone4Config",
        RMS | KINDS,
        OURS
        | {
            "layout": "output",
            "qk_norm": {"eps": 1e-5},
            "layer_settings": [WINDOW, NONE | {"rope": False}, WINDOW],
        },
        [5, 0, 5],
    ),
    "olmo3": (
        "Olmo3Config",
        RMS
        | KINDS
        | {
            "rope_parameters": {
                "full_attention": YARN | {"llama_4_scaling_beta": 0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
        OURS
        | {
            "layout": "output",
            "qk_norm": {"eps": 1e-5, "all_heads": True},
            "rope_base": 500.0,
            "rope_scaling": OURS_YARN,
            "layer_settings": [
                WINDOW | {"rope_base": 300.0, "rope_scaling": {"rope_type": "default"}},
                NONE,
                WINDOW | {"rope_base": 300.0, "rope_scaling": {"rope_type": "default"}},
            ],
        },
        [5, 0, 5],
    ),
    "ministral": (
        "MinistralConfig",
        RMS | KINDS | {"head_dim": 12},
        OURS | {"head_dim": 12, "layer_settings": [WINDOW, NONE, WINDOW]},
        [5, 0, 5],
    ),
    "ministral3": (
        "Ministral3Config",
        RMS | {"head_dim": 12, "sliding_window": 7, "rope_parameters": YARN},
        OURS
        | {
            "head_dim": 12,
            "window": (6, 0),
            "rope_base": 500.0,
            "rope_scaling": OURS_YARN,
            "scores": {"query_scale": LONG},
        },
        [7, 7, 7],
    ),
    "seed_oss": (
        "SeedOssConfig",
        RMS | {"head_dim": 12, "mlp_bias": True},
        OURS | {"head_dim": 12, "bias": True, "out_bias": False, "mlp_bias": True},
        [],
    ),
    "hunyuan": (
        "HunYuanDenseV1Config",
        RMS
        | {
            "head_dim": 12,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "alpha": 9.0, "factor": 1.0},
        },
        OURS
        | {
            "head_dim": 12,
            "rope_base": 300.0,
            "rope_scaling": {"rope_type": "ntk", "factor": 9.0},
            "qk_norm": {"eps": 1e-5, "after_rope": True},
        },
        [],
    ),
    "ernie4_5": (
        "Ernie4_5Config",
        RMS | {"head_dim": 12, "use_bias": True},
        OURS
        | {
            "head_dim": 12,
            "bias": True,
            "mlp_bias": True,
            "rope_interleaved": True,
            "rope_base": 5e5,
            "tie_embeddings": True,
        },
        [],
    ),
    "helium": (
        "HeliumConfig",
        RMS | {"head_dim": 8, "attention_bias": True},
        OURS | {"bias": True, "out_bias": False, "rope_interleaved": True, "rope_base": 1e5},
        [],
    ),
    "arcee": ("ArceeConfig", RMS, OURS | {"activation": "relu2"}, []),
    "phi": (
        "PhiConfig",
        LAYER | {"rope_parameters": partial(0.5)},
        OURS
        | {
            "norm": "layer",
            "layout": "parallel",
            "bias": True,
            "mlp_bias": True,
            "head_bias": True,
            "activation": "gelu_tanh",
            "rope_base": 300.0,
            "scores": {"rope_dim": 4},
        },
        [],
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {name: size for name, size in LAYER.items() if name != "num_key_value_heads"}
        | {"rope_parameters": partial(0.5)},
        OURS
        | {
            "num_kv_heads": 4,
            "norm": "layer",
            "layout": "parallel_two",
            "bias": True,
            "mlp_bias": True,
            "activation": "gelu",
            "rope_base": 300.0,
            "scores": {"rope_dim": 4},
        },
        [],
    ),
    "stablelm": (
        "StableLmConfig",
        LAYER | {"rope_parameters": partial(0.25), "use_qkv_bias": True},
        OURS | {"norm": "layer", "bias": True, "out_bias": False, "rope_base": 300.0, "scores": {"rope_dim": 2}},
        [],
    ),
    "mixtral": (
        "MixtralConfig",
        RMS | {"num_local_experts": 4, "sliding_window": 6},
        OURS
        | {
            "rope_base": 1e6,
            "window": (5, 0),
            "experts": {"hidden_dim": 48, "num_experts": 4, "top_k": 2, "normalize": True},
        },
        [6, 6, 6],
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        RMS | {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": partial(0.5)},
        OURS
        | {
            "head_dim": 12,
            "rope_base": 300.0,
            "scores": {"rope_dim": 6},
            "qk_norm": {"eps": 1e-5, "all_heads": True},
            "experts": {
                "hidden_dim": 48,
                "num_experts": 4,
                "top_k": 2,
                "scores": "sigmoid",
                "normalize": True,
                "correction": True,
            },
        },
        [],
    ),
    "mistral4": (
        "Mistral4Config",
        RMS
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 7,
            "moe_intermediate_size": 12,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "rope_parameters": YARN,
        },
        {
            "latent": {
                "q_lora_rank": 12,
                "kv_lora_rank": 10,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 7,
                "query_scale": LONG,
            },
            "hidden_dim": 48,
            "eps": 1e-5,
            "max_positions": 64,
            "rope_interleaved": True,
            "rope_base": 500.0,
            "rope_scaling": OURS_YARN,
            "experts": {
                "hidden_dim": 12,
                "num_experts": 6,
                "top_k": 2,
                "normalize": True,
                "scaling": 1.5,
                "shared_dim": 12,
            },
            "layer_settings": [{"experts": False}, {}, {}],
        },
        [],
    ),
    "llama4": (
        "Llama4TextConfig",
        RMS
        | {
            "head_dim": 12,
            "intermediate_size": 20,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 6,
            "floor_scale": 4,
            "attn_scale": 0.5,
            "attention_bias": True,
        },
        OURS
        | {
            "head_dim": 12,
            "bias": True,
            "rope_interleaved": True,
            "rope_base": 5e5,
            "qk_norm": {"eps": 1e-5, "after_rope": True, "weights": False},
            "scores": {"query_scale": {"type": "llama4", "floor_scale": 4.0, "attn_scale": 0.5}},
            "experts": {
                "hidden_dim": 20,
                "num_experts": 4,
                "top_k": 2,
                "scores": "sigmoid",
                "weigh_inputs": True,
                "shared_dim": 20,
            },
            "layer_settings": [CHUNKS, {"rope": False, "qk_norm": False}, CHUNKS],
        },
        [],
    ),
    "gemma4": (
        "Gemma4TextConfig",
        RMS
        | {
            "head_dim": 8,
            "global_head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "sliding_window": 5,
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 96,
            "final_logit_softcapping": 2.0,
        },
        OURS_GEMMA4
        | {
            "final_softcap": 2.0,
            "tail": {"input_dim": 6, "vocab_size": 96},
            "layer_settings": [WINDOW, FULL, FULL | {"kv_from": 1, "hidden_dim": 96}],
        },
        [5, 0, 0],
    ),
    "gemma4_keys_as_values": (
        "Gemma4TextConfig",
        RMS
        | {
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 5,
            "hidden_size_per_layer_input": 0,
        },
        OURS_GEMMA4
        | {"tail": {}, "layer_settings": [WINDOW, WINDOW, FULL | {"num_kv_heads": 1, "keys_as_values": True}]},
        [5, 5, 0],
    ),
}
