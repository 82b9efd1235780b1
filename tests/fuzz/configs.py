"""Random small configurations of each family that CausalLM.from_hf reads: the logits of transformers, or refused by a
sentence. A configuration changes some fields of its class, and at times one that another family has.

`python scripts/fuzz.py configs --seconds 60`
"""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from families import FAMILIES, SIZES, Family, peer_from
from hybrid_families import HYBRIDS

from fuzz import loaded
from fuzz.loaded import TEXT, Outcome, compare_logits

BASES = FAMILIES | {
    "mistral": Family("MistralConfig", SIZES | {"sliding_window": 6}, {}),
    "qwen2": Family("Qwen2Config", SIZES, {}),
    "qwen3": Family("Qwen3Config", SIZES | {"head_dim": 12}, {}),
}
BASES |= {name: Family(family.config, family.theirs, family.ours) for name, family in HYBRIDS.items()}
# Fields about tokens, training and saving: the mathematics does not read them.
IGNORED = {
    "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "initializer_range",
    "use_cache", "transformers_version", "model_type", "vocab_size", "return_dict", "output_hidden_states",
    "output_attentions", "is_encoder_decoder", "id2label", "label2id", "problem_type", "chunk_size_feed_forward",
    "_name_or_path", "attn_implementation", "num_labels",
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 100.0},
    {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 3.0},
    {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "rope_theta": 100.0, "partial_rotary_factor": 0.25, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 7.0, "factor": 1.0},
    {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 6, "mscale": 1.0,
     "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.3},
    {"full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 8.0},
     "sliding_attention": {"rope_type": "default", "rope_theta": 70.0}},
    {"full_attention": {"rope_type": "default", "rope_theta": 900.0},
     "sliding_attention": {"rope_type": "linear", "rope_theta": 70.0, "factor": 2.0}},
    {"full_attention": {"rope_type": "proportional", "rope_theta": 900.0, "partial_rotary_factor": 0.5},
     "sliding_attention": {"rope_type": "default", "rope_theta": 70.0}},
]  # fmt: skip
# Fields by name; every other one by the kind of its value. A field of another family stands here too: transformers
# writes whatever it is given.
VALUES: dict[str, Any] = {
    "num_hidden_layers": [1, 2, 3, 4, 5, 7],
    "n_layer": [1, 2, 4],
    "num_attention_heads": [1, 2, 4, 8],
    "n_head": [1, 2, 8],
    "num_key_value_heads": [1, 2, 4, None],
    "num_kv_heads": [1, 2, 4],
    "hidden_size": [16, 32, 48],
    "head_dim": [4, 8, 12, 16],
    "max_position_embeddings": [20, 64],
    "sliding_window": [None, 1, 3, 7, 40],
    "max_window_layers": [0, 1, 2, 9],
    "use_sliding_window": [True, False],
    "rope_parameters": ROPES,
    "rope_theta": [50.0, 1000.0],
    "partial_rotary_factor": [0.25, 0.5, 1.0],
    "hidden_act": ["silu", "gelu", "gelu_pytorch_tanh", "relu", "gelu_new"],
    "hidden_activation": ["silu", "gelu", "gelu_pytorch_tanh", None],
    "activation_function": ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"],
    "attn_logit_softcapping": [None, 0.7, 30.0],
    "final_logit_softcapping": [None, 0.7, 30.0],
    "query_pre_attn_scalar": [5, 20],
    "mlp_only_layers": [[], [0], [1, 2]],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "tie_word_embeddings": [True, False],
    "num_experts_per_tok": [1, 2, 3],
    "attention_dropout": [0.0, 0.3],
    "_sliding_window_pattern": [1, 2, 3, 6],
    "use_bidirectional_attention": [False, True],
    "no_rope_layers": [None, [1, 0, 1, 1, 0, 1, 1], [0] * 7, [1] * 7, [0, 1, 0]],
    "no_rope_layer_interval": [1, 2, 3],
    "attention_chunk_size": [None, 1, 4, 7, 100],
    "floor_scale": [1, 3, 50],
    "moe_layers": [None, [], [0], [0, 1, 2]],
    "num_kv_shared_layers": [0, 1, 2, 3],
    "hidden_size_per_layer_input": [0, 4, 6],
    "global_head_dim": [8, 12, 16],
    "sliding_window_pattern": [1, 2, 3, 4, "LLG"],
    "position_embedding_type": ["rope", None, "nope"],
    "num_local_experts": [0, 1, 2, 5],
    "residual_multiplier": [0.3, 1, 2.0],
    "attention_multiplier": [0.3, 1, 2.0],
    "embedding_multiplier": [0.3, 1, 2.0],
    "logits_scaling": [0.3, 1, 2.0],
    "logit_scale": [0.3, 1, 2.0],
}


def layer_types(rng: random.Random, count: int) -> list[str] | None:
    return rng.choice([None, [KINDS[0]] * count, [KINDS[1]] * count, [rng.choice(KINDS) for _ in range(count)]])


def other_value(rng: random.Random, name: str, value: Any) -> Any:
    if name in VALUES:
        return copy.deepcopy(rng.choice(VALUES[name]))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return max(0, value + rng.choice([-1, 1, 2]))
    if isinstance(value, float):
        return rng.choice([0.0, value * 0.5, value * 2 + 0.1])
    return value


def drawn(seed: int) -> tuple[str, dict[str, Any]]:
    """(family, the settings of its config class)"""
    rng = random.Random(seed)
    name = rng.choice(sorted(BASES))
    base = BASES[name]
    defaults = getattr(transformers, base.config)().to_dict()
    settings = copy.deepcopy(base.theirs)  # transformers writes into the objects that it is given
    fields = [field for field in defaults if field not in IGNORED]
    chosen = rng.sample(fields, min(len(fields), rng.choice([1, 2, 3, 5])))
    if rng.random() < 0.2:
        chosen.append(rng.choice(sorted(VALUES)))
    if rng.random() < 0.5:
        chosen.append("n_layer" if "n_layer" in settings else "num_hidden_layers")
    for field in chosen:
        settings[field] = other_value(rng, field, settings.get(field, defaults.get(field)))
    count = settings.get("num_hidden_layers", settings.get("n_layer", 3))
    if name == "llama4" and rng.random() < 0.5:
        kinds = ["chunked_attention", "full_attention"]
        settings["layer_types"] = [rng.choice(kinds) for _ in range(count)]
    elif name == "gemma4" and rng.random() < 0.7:
        settings["layer_types"] = [rng.choice(KINDS) for _ in range(count - 1)] + ["full_attention"]
    elif name in HYBRIDS:
        if "layer_types" in base.theirs:
            words = base.theirs["layer_types"] if rng.random() < 0.9 else KINDS
            settings["layer_types"] = [rng.choice(words) for _ in range(count)]
    elif name.startswith("granite_hybrid"):
        settings["layer_types"] = [rng.choice(["attention", "full_attention"])] * count
    elif "layer_types" in fields or rng.random() < 0.1:
        settings["layer_types"] = layer_types(rng, count)
        if settings["layer_types"] is None:
            del settings["layer_types"]
    return name, settings


def make_model(name: str, settings: dict[str, Any]) -> Any:
    """transformers' model on random weights, or None where it has none of these settings."""
    torch.manual_seed(0)
    try:
        config = getattr(transformers, BASES[name].config)(**settings)
        model = peer_from(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            logits = model(TEXT).logits
    except Exception:  # of any kind: transformers checks little
        return None
    return model if logits.isfinite().all() else None


def compare(name: str, settings: dict[str, Any], folder: Path) -> Outcome:
    import attnpack

    model = make_model(name, settings)
    if model is None:
        return "no model", ""
    changed = f"{name} { ({k: v for k, v in settings.items() if BASES[name].theirs.get(k, ...) != v}) }"
    directory = folder / "model"
    shutil.rmtree(directory, ignore_errors=True)
    try:
        model.save_pretrained(directory)
    except Exception:
        return "no model", ""
    # The model is compared as transformers reads it from the file, where some settings mean something else.
    # A Mistral with layer_types is a Ministral there.
    loader = transformers.AutoModelForCausalLM if name == "mistral" else type(model)
    again = loader.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = again(TEXT).logits
    return compare_logits(attnpack.CausalLM.from_hf, directory, wanted, changed)


def run(seed: int, count: int, seconds: float) -> tuple[dict[str, int], list[str]]:
    """As `loaded.run`."""
    return loaded.run(lambda number, folder: compare(*drawn(number), folder), seed, count, seconds)


def main(seed: int, seconds: float) -> int:
    return loaded.report("configs", seed, run(seed, 10**9 if seconds else 1, seconds))
