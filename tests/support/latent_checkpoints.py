"""Checkpoints of transformers that become checkpoints of latent attention."""

from hf_checkpoints import CONFIGS, LINEAR, LLAMA3, LONGROPE, MHA, SIZES, YARN
from newer_families import GRANITE
from transformers import GraniteConfig, LlamaConfig, MistralConfig

FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "llama-mha": LlamaConfig(**MHA),
    "llama-one-kv-head": LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, rms_norm_eps=1e-3),
    "llama-linear-rope": LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "llama3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama-longrope": LlamaConfig(**SIZES, rope_parameters=LONGROPE),
    "mistral-wide-heads": MistralConfig(**SIZES, head_dim=24, sliding_window=None),
    "granite": GraniteConfig(**SIZES, **GRANITE),
    "granite-tied": GraniteConfig(**SIZES, **GRANITE, tie_word_embeddings=True),
    "qwen2": CONFIGS["qwen2"],
    "qwen2-tied": CONFIGS["qwen2-tied"],
}


def head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_width(config) -> int:
    """The numbers that all key heads have together."""
    return config.num_key_value_heads * head_dim(config)
