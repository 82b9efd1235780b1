"""Gemma 4 in GGUF files. Layers with a window have heads, a base and heads of keys of their own; the last layers read
the keys of those before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .gguf_families import _SANDWICH, Architecture, sliding_layers
from .gguf_parts import Recipe, one
from .gguf_rope import ROPE_FREQS
from .gguf_settings import GgufSettings

_TAIL = {"inp_gate": "tail.gate", "proj": "tail.projection", "post_norm": "tail.norm"}
_INPUTS = {
    "per_layer_token_embd.weight": "model.layer_inputs.embed_tokens.weight",
    "per_layer_model_proj.weight": "model.layer_inputs.model_projection.weight",
    "per_layer_proj_norm.weight": "model.layer_inputs.projection_norm.weight",
}
_OF_SLIDING = ("attention.value_length_swa", "rope.dimension_count_swa")


def _options(file: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """Scores are not scaled, and values are normed like keys, without weights."""
    if ROPE_FREQS not in file.file.tensors:
        raise ValueError(f"{file.path}: lacks {ROPE_FREQS}, the divisors of layers without a window; get it again")
    options: dict[str, Any] = {
        "layout": "sandwich",
        "activation": "geglu_tanh",
        "embed_scale": config["embed_dim"] ** 0.5,
        "qk_norm": {"eps": config["eps"], "values": True},
        "scores": {"scale": 1.0},
        "layer_settings": _layers(file, config),
        "tail": {"input_dim": None, "vocab_size": None},
    }
    if file.setting("final_logit_softcapping"):
        options["final_softcap"] = file.number("final_logit_softcapping")
    if file.setting("embedding_length_per_layer_input"):
        rows = file.shapes.get(_INPUTS["per_layer_token_embd.weight"], (config["vocab_size"],))[0]
        options["tail"] = {"input_dim": file.size("embedding_length_per_layer_input"), "vocab_size": rows}
    return options


def _layers(file: GgufSettings, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    count, head_dim = config["num_layers"], file.size("attention.key_length_swa", config["head_dim"])
    for key in _OF_SLIDING:
        if file.setting(key, head_dim) != head_dim:
            raise ValueError(
                f"{file.path}: {file.arch}.{key} is {file.setting(key)!r:.80}, attention.key_length_swa is {head_dim}; "
                "models where they differ are not supported"
            )
    sliding = {
        "window": (file.size("attention.sliding_window") - 1, 0),
        "head_dim": head_dim,
        "rope_base": file.number("rope.freq_base_swa", 10000.0),
        "rope_scaling": {"rope_type": "default"},
    }
    slides = sliding_layers(file, count, 6)
    heads = file.by_layer("attention.head_count_kv", count, config["num_heads"])
    widths = file.by_layer("feed_forward_length", count)
    own = count - _shared_layers(file)
    layers = []
    for i in range(count):
        layer = dict(sliding) if slides[i] else {"window": (-1, -1)}
        layer |= {"num_kv_heads": heads[i], "hidden_dim": widths[i]}
        if i >= own:
            layer["kv_from"] = max((j for j in range(own) if slides[j] == slides[i]), default=None)
            if layer["kv_from"] is None:
                raise ValueError(
                    f"{file.path}: {file.arch}.attention.shared_kv_layers = {count - own} leaves no layer of the kind "
                    f"of layer {i} with keys of its own"
                )
        elif f"model.layers.{i}.self_attn.v_proj.weight" not in file.shapes:
            layer["keys_as_values"] = True
        layers.append(layer)
    return layers


def _shared_layers(file: GgufSettings) -> int:
    key, layers = "attention.shared_kv_layers", file.size("block_count")
    count = file.size(key) if file.setting(key) else 0
    if count >= layers:
        raise ValueError(f"{file.path}: {file.arch}.{key} is {count}, wants less than block_count, {layers}")
    return count


def _recipes(file: GgufSettings) -> list[Recipe]:
    inputs = [one(theirs, ours, rows=True) for theirs, ours in _INPUTS.items()]
    return [*inputs, one("layer_output_scale.weight", "tail.scalar")]


def _unread(file: GgufSettings) -> list[str]:
    """Keys and values that some files have for layers that read those of others."""
    layers = file.size("block_count")
    shared = range(layers - _shared_layers(file), layers)
    return [f"blk.{i}.{name}." for i in shared for name in ("attn_k", "attn_v", "attn_k_norm")]


GEMMA4 = {
    "gemma4": Architecture(
        _options,
        _SANDWICH | _TAIL,
        settings=(
            "final_logit_softcapping",
            "rope.freq_base_swa",
            "attention.key_length_swa",
            "attention.shared_kv_layers",
            *_OF_SLIDING,
        ),
        windows=True,
        listed=("attention.head_count_kv", "feed_forward_length"),
        recipes=_recipes,
        unread=_unread,
    )
}
