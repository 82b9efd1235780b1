"""Hugging Face checkpoints: a directory with config.json and safetensors, as CausalLM keywords and state_dict names.

The format of the tensors is the one of https://github.com/huggingface/safetensors#format. They are read piece by piece
rather than mapped: the pages of a mapped file would count as resident memory on top of the converted weights.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_ELEMENTS = 1 << 20

# Settings that change the mathematics, and the values that mean "off".
_UNSUPPORTED_KEYS = {
    "attn_logit_softcapping": (None, 0, 0.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "attention_dropout": (None, 0, 0.0),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "use_bidirectional_attention": (None, False),
}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error}); get the checkpoint again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}, a JSON object is needed")
    return value


class SafetensorsFile:
    """The header of one .safetensors file: `shapes` by name; `read` and `chunks` give its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length)) if 8 + length <= size else None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: is not a safetensors file ({error}); get the checkpoint again") from error
        if not isinstance(header, dict):
            raise ValueError(f"{path}: is no whole safetensors file (it has {size} bytes); get the checkpoint again")
        header.pop("__metadata__", None)
        self.entries = header
        self.shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        self.start = 8 + length
        for name, entry in header.items():
            if self.start + entry["data_offsets"][1] > size:
                raise ValueError(
                    f"{path}: tensor {name} ends at byte {self.start + entry['data_offsets'][1]}, but the file has "
                    f"{size}; the file is truncated, get it again"
                )

    def chunks(self, name: str):
        """The tensor's elements in order, as 1-D tensors of its stored dtype."""
        entry = self.entries[name]
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{self.path}: tensor {name} is {entry['dtype']}; readable are {', '.join(_DTYPES)}")
        dtype = _DTYPES[entry["dtype"]]
        remaining = math.prod(entry["shape"])
        with self.path.open("rb") as file:
            file.seek(self.start + entry["data_offsets"][0])
            while remaining > 0:
                count = min(remaining, _CHUNK_ELEMENTS)
                yield torch.frombuffer(bytearray(file.read(count * dtype.itemsize)), dtype=dtype)
                remaining -= count

    def read(self, name: str, out: torch.Tensor) -> None:
        flat, first = out.view(-1), 0
        for chunk in self.chunks(name):
            flat[first : first + chunk.numel()].copy_(chunk)
            first += chunk.numel()


class HfCheckpoint:
    """A checkpoint directory seen as a CausalLM: `config` (its keywords), `shapes` by state_dict name, `read(...)`."""

    def __init__(self, directory: str | os.PathLike, max_positions: int | None = None) -> None:
        self.path = Path(directory)
        if not (self.path / "config.json").is_file():
            raise ValueError(f"{self.path}: has no config.json; give the directory of a Hugging Face checkpoint")
        self.config = _model_config(self.path, _read_json(self.path / "config.json"), max_positions)
        self.files = {name: file for file in self._open_files() for name in file.shapes}
        for name in [name for name in self.files if name.endswith(".rotary_emb.inv_freq")]:
            del self.files[name]  # old checkpoints carry it; it follows from the configuration
        if self.config["tie_embeddings"]:
            self._drop_tied_head()
        self.shapes = {name: file.shapes[name] for name, file in self.files.items()}

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fills `out` with the tensor of state_dict name `name`."""
        self.files[name].read(name, out)

    def _open_files(self) -> list[SafetensorsFile]:
        single, index = self.path / "model.safetensors", self.path / "model.safetensors.index.json"
        if single.is_file():
            return [SafetensorsFile(single)]
        if not index.is_file():
            raise ValueError(
                f"{self.path}: has neither {single.name} nor {index.name}; "
                "save the checkpoint in safetensors form (transformers: model.save_pretrained)"
            )
        weight_map = _read_json(index).get("weight_map", {})
        return [SafetensorsFile(self.path / shard) for shard in sorted(set(weight_map.values()))]

    def _drop_tied_head(self) -> None:
        head, embedding = self.files.pop("lm_head.weight", None), self.files.get("model.embed_tokens.weight")
        if head is None or embedding is None:
            return
        pairs = zip(head.chunks("lm_head.weight"), embedding.chunks("model.embed_tokens.weight"), strict=False)
        if not all(torch.equal(a, b) for a, b in pairs):
            raise ValueError(
                f"{self.path}: config.json sets tie_word_embeddings, but lm_head.weight differs from "
                "model.embed_tokens.weight; set tie_word_embeddings to false"
            )


def _model_config(path: Path, config: dict[str, Any], max_positions: int | None) -> dict[str, Any]:
    """CausalLM keywords for a Hugging Face configuration; raises for every setting the model would silently lack."""
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"{path}: model_type {model_type!r} is not supported; from_hf reads {', '.join(MODEL_TYPES)}")
    for key, off in _UNSUPPORTED_KEYS.items():
        if config.get(key) not in off:
            raise ValueError(f"{path}: {key} = {config[key]!r} in config.json is not supported yet")
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"{path}: hidden_act {act!r} in config.json is not supported; it must be 'silu'")

    def need(key: str) -> Any:
        if config.get(key) is None:
            raise ValueError(f"{path}: config.json lacks {key}")
        return config[key]

    num_heads = need("num_attention_heads")
    positions = min(need("max_position_embeddings"), max_positions or math.inf)
    _check_window(path, config, positions)
    base, scaling = _rope(path, config)
    bias = {"mistral": False, "qwen2": True}.get(model_type, bool(config.get("attention_bias")))
    return {
        "vocab_size": need("vocab_size"),
        "embed_dim": need("hidden_size"),
        "num_layers": need("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or (128 if model_type == "qwen3" else need("hidden_size") // num_heads),
        "hidden_dim": need("intermediate_size"),
        "max_positions": positions,
        "rope_base": base,
        "rope_scaling": scaling,
        "eps": config.get("rms_norm_eps", 1e-6),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "qk_norm": model_type == "qwen3",
        "bias": bias,
        "out_bias": bias and model_type != "qwen2",
        "mlp_bias": model_type == "llama" and bool(config.get("mlp_bias")),
    }


def _check_window(path: Path, config: dict[str, Any], positions: int) -> None:
    """Raises if a layer's sliding window (of W tokens, its own included) is shorter than the context asked for."""
    window = config.get("sliding_window", 4096 if config["model_type"] == "mistral" else None)
    if config["model_type"] in ("qwen2", "qwen3"):
        types = config.get("layer_types") or []
        later = config.get("max_window_layers", 28) < config["num_hidden_layers"]
        slides = "sliding_attention" in types if types else later
        window = window if config.get("use_sliding_window") and slides else None
    elif config["model_type"] == "llama":
        window = None
    if window and window < positions:
        raise ValueError(
            f"{path}: sliding_window is {window}, shorter than the context of {positions}; sliding windows are not "
            f"supported yet, pass max_positions={window} or less"
        )


def _rope(path: Path, config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{path}: partial_rotary_factor = {rope['partial_rotary_factor']} is not supported yet")
    if kind == "default":
        return base, None
    if kind != "linear":
        raise ValueError(f"{path}: rope_type {kind!r} in config.json is not supported yet; only 'default' and 'linear'")
    return base, {"rope_type": "linear", "factor": rope["factor"]}
