"""Hugging Face checkpoints: config.json as CausalLM keywords, and the tensors of a directory's safetensors files."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch

from ..errors import as_path
from ..file_errors import brief
from .safetensors import open_files
from .size_checks import check_sizes
from .strict_json import read_json

ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3", "longrope")
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

# Settings that change the mathematics, and the values that mean "off".
_UNSUPPORTED_KEYS = {
    "attn_logit_softcapping": (None, 0, 0.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "attention_dropout": (None, 0, 0.0),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
}


class HfCheckpoint:
    """A checkpoint directory seen as a CausalLM: `config` (its keywords), `shapes` by state_dict name, `read(...)`."""

    def __init__(self, directory: str | os.PathLike, max_positions: int | None = None) -> None:
        self.path = as_path("directory", directory)
        if not (self.path / "config.json").is_file():
            raise ValueError(f"{self.path}: has no config.json; give the directory of a Hugging Face checkpoint")
        self.config = _model_config(self.path, read_json(self.path / "config.json"), max_positions)
        self.files = {name: file for file in open_files(self.path) for name in file.shapes}
        for name in [name for name in self.files if name.endswith(".rotary_emb.inv_freq")]:
            del self.files[name]  # old checkpoints carry it; it follows from the configuration
        if self.config["tie_embeddings"]:
            self._drop_tied_head()
        self.shapes = {name: file.shapes[name] for name, file in self.files.items()}
        check_sizes(self.path, self.shapes, *(self.config[name] for name in ("num_layers", "num_heads", "head_dim")))

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fills `out` with the tensor of state_dict name `name`."""
        self.files[name].read(name, out)

    def _drop_tied_head(self) -> None:
        head, embedding = self.files.pop("lm_head.weight", None), self.files.get("model.embed_tokens.weight")
        if head is None or embedding is None:
            return
        names = "lm_head.weight", "model.embed_tokens.weight"
        alike = head.shapes[names[0]] == embedding.shapes[names[1]] and head.dtype(names[0]) == embedding.dtype(
            names[1]
        )
        pairs = zip(head.chunks(names[0]), embedding.chunks(names[1]), strict=True)
        if not alike or not all(torch.equal(a, b) for a, b in pairs):
            raise ValueError(
                f"{self.path}: config.json sets tie_word_embeddings, but lm_head.weight differs from "
                "model.embed_tokens.weight; set tie_word_embeddings to false"
            )


def _model_config(path: Path, config: dict[str, Any], max_positions: int | None) -> dict[str, Any]:
    """CausalLM keywords for a Hugging Face configuration; raises for a setting that CausalLM does not have."""
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"{path}: model_type {brief(repr(model_type))} is not supported; from_hf reads {', '.join(MODEL_TYPES)}"
        )
    for key, off in _UNSUPPORTED_KEYS.items():
        if config.get(key) not in off:
            raise ValueError(f"{path}: {key} = {brief(repr(config[key]))} in config.json is not supported yet")
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"{path}: hidden_act {brief(repr(act))} in config.json is not supported; it must be 'silu'")

    def need(key: str, default: int | None = None) -> int:
        value = default if config.get(key) is None else config[key]
        if value is None:
            raise ValueError(f"{path}: config.json lacks {key}")
        if type(value) is not int or value < 1:
            raise ValueError(f"{path}: {key} in config.json is {brief(repr(value))}, wants an int of at least 1")
        return value

    num_heads = need("num_attention_heads")
    if num_heads % need("num_key_value_heads", num_heads):
        raise ValueError(
            f"{path}: num_attention_heads {num_heads} in config.json is no multiple of num_key_value_heads "
            f"{config['num_key_value_heads']}; a Hugging Face checkpoint has groups of one size"
        )
    positions = min(need("max_position_embeddings"), max_positions or math.inf)
    base, scaling = _rope(path, config)
    head_dim = need("head_dim", 128 if model_type == "qwen3" else need("hidden_size") // num_heads)
    bias = {"mistral": False, "qwen2": True}.get(model_type, bool(config.get("attention_bias")))
    return {
        "vocab_size": need("vocab_size"),
        "embed_dim": need("hidden_size"),
        "num_layers": need("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": need("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "hidden_dim": need("intermediate_size"),
        "max_positions": positions,
        "rope_base": base,
        "rope_scaling": scaling,
        "eps": _number(path, "rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "qk_norm": model_type == "qwen3",
        "window": _window(path, config, positions),
        "bias": bias,
        "out_bias": bias and model_type != "qwen2",
        "mlp_bias": model_type == "llama" and bool(config.get("mlp_bias")),
    }


def _window(path: Path, config: dict[str, Any], positions: int) -> tuple[int, int] | None:
    """The window of every layer: (W - 1, 0) for a sliding_window of W tokens, the token itself included.

    Raises if only some layers have a window and `positions` is larger than the window.
    """
    model_type = config["model_type"]
    if model_type == "llama":
        return None
    used = model_type == "mistral" or config.get("use_sliding_window")
    width = config.get("sliding_window", 4096) if used else None
    some, every = _sliding_layers(path, config, width is not None)
    if not some:
        return None
    if type(width) is not int or width < 1:
        raise ValueError(
            f"{path}: sliding_window in config.json is {brief(repr(width))}, wants an int of at least 1, or null"
        )
    if every:
        return width - 1, 0
    if width < positions:
        raise ValueError(
            f"{path}: sliding_window is {width} in some layers only, which is not supported yet, and shorter than the "
            f"context of {positions}; pass max_positions={width} or less"
        )
    return None


def _sliding_layers(path: Path, config: dict[str, Any], has_window: bool) -> tuple[bool, bool]:
    """Whether some layers slide, and whether every one does."""
    kinds, layers = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is None:
        first = 0 if config["model_type"] == "mistral" else config.get("max_window_layers", 28)
        return has_window and first < layers, has_window and first <= 0
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ValueError(
            f"{path}: layer_types in config.json is {brief(repr(kinds))}, wants {' or '.join(map(repr, known))} for "
            f"each of {layers} layers"
        )
    some = "sliding_attention" in kinds
    if some and not has_window:
        raise ValueError(
            f"{path}: layer_types in config.json has 'sliding_attention', but no sliding_window is in use; get the "
            "checkpoint again"
        )
    return some, "full_attention" not in kinds


def _rope(path: Path, config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    sources = [name for name in ("rope_parameters", "rope_scaling") if config.get(name)] or ["rope_scaling"]
    found = [_rope_of(path, source, config) for source in sources]
    if found[0] != found[-1]:
        raise ValueError(
            f"{path}: rope_parameters and rope_scaling in config.json say different things "
            f"({brief(repr(config[sources[0]]))}, {brief(repr(config[sources[1]]))}); leave out the wrong one"
        )
    return found[0]


def _rope_of(path: Path, source: str, config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    rope = config.get(source) or {}
    if not isinstance(rope, dict):
        raise ValueError(
            f"{path}: {source} in config.json is {brief(repr(rope))}, wants an object with rope_type, or null"
        )
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise ValueError(
            f"{path}: {source} for kinds of layers ({brief(', '.join(nested))}) in config.json is not supported yet"
        )
    base = _number(path, "rope_theta", rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{path}: partial_rotary_factor = {brief(rope['partial_rotary_factor'])} is not supported yet")
    if kind == "default":
        return base, None
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"{path}: rope_type {brief(repr(kind))} in config.json is not supported; from_hf knows 'default', "
            + ", ".join(map(repr, ROPE_TYPES))
        )
    if kind == "linear":
        return base, {"rope_type": "linear", "factor": _number(path, f"factor of {source}", rope.get("factor"))}
    return base, _scaling(path, source, kind, rope, config)


def _scaling(path: Path, source: str, kind: str, rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The dict for RotaryEmbedding. As in transformers, missing lengths come from elsewhere in the configuration."""
    longest = config.get("max_position_embeddings")
    trained = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or longest
    if kind == "dynamic":
        trained = longest  # as transformers does
    dropped = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
    scaling = {key: value for key, value in rope.items() if key not in dropped and value is not None}
    scaling |= {"rope_type": kind, "original_max_position_embeddings": trained}
    if kind in ("yarn", "longrope") and "factor" not in scaling:
        scaling["factor"] = longest / _number(path, f"original_max_position_embeddings of {source}", trained)
    return scaling


def _number(path: Path, name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{path}: {name} in config.json is {brief(repr(value))}, wants a number above 0")
    return float(value)
