"""The files of a converted checkpoint besides its tensors: config.json and the tokenizer's files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from .gguf import GgufCheckpoint
from .gguf_stops import gguf_stop_tokens
from .hf_directory import HfCheckpoint
from .strict_json import read_json
from .tokenizer import load_tokenizer
from .writer import write_json, write_text

# Files that are copied unchanged if the source has them.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LONGROPE = (
    "rope_type",
    "factor",
    "short_factor",
    "long_factor",
    "attention_factor",
    "original_max_position_embeddings",
)
CONVERTIBLE = tuple(_CLASSES)
"""The families whose checkpoints can be written again with other heads."""


def config_json(checkpoint: HfCheckpoint | GgufCheckpoint, num_kv_heads: int) -> dict[str, Any]:
    """config.json of the checkpoint with `num_kv_heads`: its own file, or one made from the GGUF metadata."""
    if isinstance(checkpoint, HfCheckpoint):
        stored = read_json(checkpoint.path / "config.json") | {"num_key_value_heads": num_kv_heads}
        stored.pop("quantization_config", None)  # plain weights are written
        return stored
    return _from_gguf(checkpoint) | {"num_key_value_heads": num_kv_heads}


def _from_gguf(checkpoint: GgufCheckpoint) -> dict[str, Any]:
    config = checkpoint.config
    model_type = checkpoint.arch
    if model_type == "llama" and config["window"] is not None:
        model_type = "mistral"
    biases = {"llama": (False, True), "mistral": (False,), "qwen2": (True,), "qwen3": (False, True)}[model_type]
    out_bias = config["bias"] and model_type != "qwen2"
    if config["bias"] not in biases or config["out_bias"] != out_bias or (config["mlp_bias"] and model_type != "llama"):
        raise ValueError(f"{checkpoint.path}: has biases that no config.json of model_type {model_type!r} describes")
    result = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": config["vocab_size"],
        "hidden_size": config["embed_dim"],
        "intermediate_size": config["hidden_dim"],
        "num_hidden_layers": config["num_layers"],
        "num_attention_heads": config["num_heads"],
        "head_dim": config["head_dim"],
        "hidden_act": "silu",
        "max_position_embeddings": config["max_positions"],
        "rms_norm_eps": config["eps"],
        "rope_theta": config["rope_base"],
        "rope_scaling": config["rope_scaling"],
        "tie_word_embeddings": config["tie_embeddings"],
        "attention_bias": config["bias"],
        "mlp_bias": config["mlp_bias"],
        "use_cache": True,
    }
    if config["window"] is not None:
        result |= {"sliding_window": config["window"][0] + 1}
        if model_type != "mistral":  # the window is that of every layer
            result |= {"use_sliding_window": True, "max_window_layers": 0}
    return result | _gguf_tokens(checkpoint)


def _gguf_tokens(checkpoint: GgufCheckpoint) -> dict[str, Any]:
    data, result = checkpoint.file.metadata, {}
    for role, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        if (token := data.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            result[f"{role}_token_id"] = token
    if "tokenizer.ggml.tokens" in data and len(stops := gguf_stop_tokens(checkpoint.path, data)) > 1:
        result["eos_token_id"] = list(stops)
    return result


def latent_config_json(checkpoint: HfCheckpoint | GgufCheckpoint, config: dict[str, Any]) -> dict[str, Any]:
    """config.json of the model with latent attention that `config` describes, keywords of CausalLM: a DeepSeek-V3 whose
    feed-forwards are all dense. The special tokens are those of the checkpoint."""
    if isinstance(checkpoint, HfCheckpoint):
        stored = read_json(checkpoint.path / "config.json")
        kept = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "dtype", "torch_dtype")
        tokens = {"bos_token_id": None, "eos_token_id": None} | {key: stored[key] for key in kept if key in stored}
    else:
        tokens = _gguf_tokens(checkpoint)
    latent, width, layers = config["latent"], config["hidden_dim"], config["num_layers"]
    rope = {key: config["rope_scaling"][key] for key in _LONGROPE}
    no_experts = {
        "first_k_dense_replace": layers,
        "n_routed_experts": 1,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": width,
        "num_nextn_predict_layers": 0,
    }
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": config["vocab_size"],
        "hidden_size": config["embed_dim"],
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": config["num_heads"],
        "num_key_value_heads": config["num_heads"],
        "kv_lora_rank": latent["kv_lora_rank"],
        "q_lora_rank": latent["q_lora_rank"],
        "qk_nope_head_dim": latent["qk_nope_head_dim"],
        "qk_rope_head_dim": latent["qk_rope_head_dim"],
        "v_head_dim": latent["v_head_dim"],
        "hidden_act": "silu",
        "max_position_embeddings": config["max_positions"],
        "rms_norm_eps": config["eps"],
        "rope_theta": config["rope_base"],
        "rope_scaling": rope,
        "rope_interleave": config["rope_interleaved"],
        "tie_word_embeddings": config["tie_embeddings"],
        "attention_bias": True,
        **no_experts,
        "use_cache": True,
        **tokens,
    }


def write_companions(source: Path, out: Path) -> str | None:
    """Copies a directory's tokenizer, or makes one from GGUF. Returns a note for the user if no tokenizer was written,
    else None."""
    if source.is_dir():
        for name in _COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, out / name)
        found = any((out / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
        return None if found else f"{source} has no tokenizer, so none was written"
    try:
        tokenizer = load_tokenizer(source)
    except (ImportError, ValueError) as error:
        return f"the tokenizer was not written: {error}"
    write_text(out / "tokenizer.json", tokenizer.backend.to_str(pretty=True))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokenizer.special,
    }
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    write_json(out / "tokenizer_config.json", settings)
    return None
