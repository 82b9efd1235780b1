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

from .explain import with_article
from .rope import RotaryEmbedding
from .sizes import as_path

ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3", "longrope")
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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises ValueError where it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error}); get the checkpoint again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {with_article(type(value).__name__)}, a JSON object is needed")
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
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: is not a safetensors file ({error}); get the checkpoint again") from error
        if not isinstance(header, dict):
            raise ValueError(f"{path}: is no whole safetensors file (it has {size} bytes); get the checkpoint again")
        header.pop("__metadata__", None)
        self.start = 8 + length
        for name, entry in header.items():
            _check_entry(path, name, entry, size - self.start)
        _check_cover(path, [entry["data_offsets"] for entry in header.values()], size - self.start)
        self.entries = header
        self.shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}

    def dtype(self, name: str) -> torch.dtype:
        """As the tensor is stored."""
        stored = self.entries[name]["dtype"]
        if stored not in _DTYPES:
            raise ValueError(f"{self.path}: tensor {name} is {stored}; readable are {', '.join(_DTYPES)}")
        return _DTYPES[stored]

    def chunks(self, name: str):
        """The tensor's elements in order, as 1-D tensors of its stored dtype."""
        entry, dtype = self.entries[name], self.dtype(name)
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


def _check_entry(path: Path, name: str, entry: Any, size: int) -> None:
    """Raises unless a header's entry is whole, and its bytes are as many as its dtype and shape need, among `size`."""
    values = [entry.get(key) for key in ("dtype", "shape", "data_offsets")] if isinstance(entry, dict) else [None] * 3
    dtype, shape, offsets = values
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    if (
        not isinstance(dtype, str)
        or any(type(n) is not int for n in numbers)
        or len(offsets) != 2
        or min(shape, default=0) < 0
    ):
        raise ValueError(
            f"{path}: tensor {name} is described as {str(entry)[:80]}, not by dtype, shape and two data_offsets; the "
            "file is damaged, get it again"
        )
    begin, end = offsets
    if end > size:
        raise ValueError(
            f"{path}: tensor {name} ends at byte {end} of the data, which has {size}; the file is truncated, get it "
            "again"
        )
    needs = math.prod(shape) * _DTYPES[dtype].itemsize if dtype in _DTYPES else end - begin
    if not 0 <= begin <= end or end - begin != needs:
        raise ValueError(
            f"{path}: tensor {name} has data_offsets {offsets}, but {dtype} of shape {shape} takes {needs} bytes; the "
            "file is damaged, get it again"
        )


def _check_cover(path: Path, offsets: list[list[int]], size: int) -> None:
    """Raises unless the tensors lie side by side and fill the data's `size` bytes, as the format wants."""
    end = 0
    for first, last in sorted(offsets):
        if first != end:
            raise ValueError(
                f"{path}: its tensors {'overlap at' if first < end else 'leave a gap before'} byte {first} of the "
                "data; the file is damaged, get it again"
            )
        end = last
    if end != size:
        raise ValueError(
            f"{path}: has {size - end} bytes behind its last tensor; the file is damaged, or another was appended to "
            "it: get it again"
        )


def open_files(directory: Path) -> list[SafetensorsFile]:
    """The safetensors of a checkpoint directory: model.safetensors, or the shards of an index."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [SafetensorsFile(single)]
    if not index.is_file():
        raise ValueError(
            f"{directory}: has neither {single.name} nor {index.name}; "
            "save the checkpoint in safetensors form (transformers: model.save_pretrained)"
        )
    return _open_shards(directory, index, read_json(index).get("weight_map"))


def _open_shards(directory: Path, index: Path, places: Any) -> list[SafetensorsFile]:
    """The files that an index's weight_map names; raises unless it says of each tensor where it is, and no more."""
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index}: has no weight_map, which names each tensor's file; get the checkpoint again")
    files = {}
    for shard in dict.fromkeys(places.values()):
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index}: names the file {shard!r}, wants the name of one beside it")
        if not (directory / shard).is_file():
            raise ValueError(f"{directory}: lacks {shard}, which {index.name} names; get the checkpoint again")
        files[shard] = SafetensorsFile(directory / shard)
    for name, shard in places.items():
        if name not in files[shard].shapes:
            raise ValueError(f"{index}: says that {name} is in {shard}, which lacks it; get the checkpoint again")
    for shard, file in files.items():
        for name in file.shapes:
            if places.get(name) != shard:
                raise ValueError(f"{index}: does not name {name} of {shard}; get the checkpoint again")
    return [files[shard] for shard in sorted(files)]


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

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fills `out` with the tensor of state_dict name `name`."""
        self.files[name].read(name, out)

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

    def need(key: str, default: int | None = None) -> int:
        value = default if config.get(key) is None else config[key]
        if value is None:
            raise ValueError(f"{path}: config.json lacks {key}")
        if type(value) is not int or value < 1:
            raise ValueError(f"{path}: {key} in config.json is {value!r}, wants an int of at least 1")
        return value

    num_heads = need("num_attention_heads")
    if num_heads % need("num_key_value_heads", num_heads):
        raise ValueError(
            f"{path}: num_attention_heads {num_heads} in config.json is no multiple of num_key_value_heads "
            f"{config['num_key_value_heads']}; uneven groups are no such checkpoint's"
        )
    positions = min(need("max_position_embeddings"), max_positions or math.inf)
    base, scaling = _rope(path, config)
    head_dim = need("head_dim", 128 if model_type == "qwen3" else need("hidden_size") // num_heads)
    try:
        RotaryEmbedding(head_dim, base=base, scaling=scaling)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: RoPE in config.json: {str(error).removeprefix('attnpack: ')}") from None
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
    """The window of every layer for a sliding_window of W tokens, their own included; raises where only some layers
    slide and the context asked for is longer."""
    width = config.get("sliding_window", 4096 if config["model_type"] == "mistral" else None)
    some, every = False, config["model_type"] == "mistral"
    if config["model_type"] in ("qwen2", "qwen3") and config.get("use_sliding_window"):
        first = config.get("max_window_layers", 28)
        kinds = config.get("layer_types") or [
            "full_attention" if layer < first else "sliding_attention" for layer in range(config["num_hidden_layers"])
        ]
        some = "sliding_attention" in kinds
        every = some and set(kinds) == {"sliding_attention"}
    if width is None or not (some or every):
        return None
    if type(width) is not int or width < 1:
        raise ValueError(f"{path}: sliding_window in config.json is {width!r}, wants an int of at least 1, or null")
    if every:
        return width - 1, 0
    if width < positions:
        raise ValueError(
            f"{path}: sliding_window is {width} in some layers only, which is not supported yet, and shorter than the "
            f"context of {positions}; pass max_positions={width} or less"
        )
    return None


def _rope(path: Path, config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    source = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(source) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{path}: {source} in config.json is {rope!r}, wants an object with rope_type, or null")
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise ValueError(
            f"{path}: {source} for kinds of layers ({', '.join(nested)}) in config.json is not supported yet"
        )
    base = _number(path, "rope_theta", rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{path}: partial_rotary_factor = {rope['partial_rotary_factor']} is not supported yet")
    if kind == "default":
        return base, None
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"{path}: rope_type {kind!r} in config.json is not supported; from_hf knows 'default', "
            + ", ".join(map(repr, ROPE_TYPES))
        )
    if kind == "linear":
        return base, {"rope_type": "linear", "factor": _number(path, f"factor of {source}", rope.get("factor"))}
    return base, _scaling(path, source, kind, rope, config)


def _scaling(path: Path, source: str, kind: str, rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The dict for RotaryEmbedding, with the lengths that transformers takes from elsewhere in the configuration."""
    longest = config.get("max_position_embeddings")
    trained = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or longest
    if kind == "dynamic":
        trained = longest  # transformers takes this one
    dropped = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
    scaling = {key: value for key, value in rope.items() if key not in dropped and value is not None}
    scaling |= {"rope_type": kind, "original_max_position_embeddings": trained}
    if kind in ("yarn", "longrope") and "factor" not in scaling:
        scaling["factor"] = longest / _number(path, f"original_max_position_embeddings of {source}", trained)
    return scaling


def _number(path: Path, name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{path}: {name} in config.json is {value!r}, wants a number above 0")
    return float(value)
