"""Whole checkpoints with fewer kv heads, read, converted and written layer by layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..causal_lm import CausalLM
from ..causal_lm_io import check_whole
from ..gguf_io import GgufCheckpoint
from ..hf_io import HfCheckpoint, SafetensorsFile
from ..progress import progress
from .hf_config import config_json, write_companions
from .output import SafetensorsWriter, require_finite, whole_directory, write_json
from .streams import Streams, load_tokens
from .weights import Groups, LayerWeights, merge_kv_heads

RECORD = "attnpack_convert.json"
LEARNS_FROM_TEXT = ("similar", "aligned")


@dataclass(frozen=True)
class Request:
    """What to do with a checkpoint; see `attnpack convert --help`."""

    kv_heads: int
    method: str = "mean"
    window: int = 1
    groups: Groups | None = None
    seed: int | None = None
    dtype: torch.dtype | None = None  # default as stored; fp32 from GGUF
    text: Path | None = None  # default the standard library's help topics
    tokens: int = 2048  # of it for the perplexity, and as many others for methods that learn from text; 0 for none


@dataclass(frozen=True)
class Report:
    source: str
    out: str
    method: str
    layers: int
    heads: int
    kv_heads_before: int
    kv_heads: int
    kv_bytes_per_token_before: int  # in the written dtype
    kv_bytes_per_token: int
    tokens: int  # that the perplexities are of
    perplexity_before: float | None
    perplexity: float | None
    notes: list[str]  # what was left out, and why
    seconds: float


class Source:
    """A checkpoint directory or GGUF file that CausalLM reads: `config`, `names`, tensors one by one."""

    def __init__(self, path: Path, dtype: torch.dtype | None) -> None:
        self.checkpoint = HfCheckpoint(path) if path.is_dir() else GgufCheckpoint(path)
        check_whole(CausalLM, self.checkpoint)
        self.path, self.config, self.shapes = path, self.checkpoint.config, self.checkpoint.shapes
        self._dtype = dtype

    def stored_dtype(self, name: str) -> torch.dtype:
        return self._file(name).dtype(name) if isinstance(self.checkpoint, HfCheckpoint) else torch.float32

    def dtype(self, name: str) -> torch.dtype:
        """As it will be written."""
        return self._dtype or self.stored_dtype(name)

    def read(self, name: str) -> Tensor:
        tensor = torch.empty(self.shapes[name], dtype=self.stored_dtype(name))
        self.checkpoint.read(name, tensor)
        require_finite(self.path, name, tensor)
        converted = tensor.to(self.dtype(name))
        if not torch.isfinite(converted).all():
            raise ValueError(f"{self.path}: tensor {name} holds numbers that {converted.dtype} cannot; choose bf16")
        return converted

    def files(self) -> dict[str, list[str]]:
        """Names of tensors by the file to write them to: shards stay as they are."""
        if isinstance(self.checkpoint, GgufCheckpoint):
            return {"model.safetensors": list(self.shapes)}
        files: dict[str, list[str]] = {}
        for name in self.shapes:
            files.setdefault(self._file(name).path.name, []).append(name)
        return files

    def _file(self, name: str) -> SafetensorsFile:
        return self.checkpoint.files[name]


def convert_checkpoint(source: Path, out: Path, request: Request) -> Report:
    """Writes `source` (a Hugging Face directory or a GGUF file) with fewer kv heads to the new directory `out`.

    Holds one layer (or the embedding) and the states of some tokens in memory. Raises ValueError, and leaves nothing,
    where the checkpoint is one that CausalLM does not read, is damaged, or does not fit the request.
    """
    started = time.monotonic()
    checkpoint = Source(source, request.dtype)
    config, notes = checkpoint.config, []
    tokens = load_tokens(
        source, request.text, request.tokens, request.method in LEARNS_FROM_TEXT, config["max_positions"], notes
    )
    streams = Streams(config, *tokens)
    with whole_directory(out) as folder:
        writer = _Writer(checkpoint, folder, request.kv_heads)
        if note := write_companions(checkpoint.checkpoint, folder):
            notes.append(note)
        _convert_layers(checkpoint, writer.put, streams, request)
        perplexities = streams.finish(checkpoint.read)
        writer.close()
        write_json(folder / "config.json", _with_dtype(config_json(checkpoint.checkpoint, request.kv_heads), request))
        report = _report(checkpoint, out, request, streams.tokens, perplexities, notes, time.monotonic() - started)
        write_json(folder / RECORD, asdict(report) | {"source": str(source.absolute())})
    return report


def _with_dtype(config: dict[str, Any], request: Request) -> dict[str, Any]:
    if request.dtype is None:
        return config
    named = str(request.dtype).removeprefix("torch.")
    return {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": named}


def _convert_layers(source: Source, put: Callable[[str, Tensor], None], streams: Streams, request: Request) -> None:
    config = source.config
    per_layer: dict[int, list[str]] = {layer: [] for layer in range(config["num_layers"])}
    others = []
    for name in source.shapes:
        parts = name.split(".")
        (per_layer[int(parts[2])] if parts[1] == "layers" else others).append(name)
    for name in others:
        tensor = source.read(name)
        if name == "model.embed_tokens.weight":
            streams.embed(tensor)
        put(name, tensor)
    for layer, names in progress(per_layer.items(), f"converting {source.path.name}"):
        prefix = f"model.layers.{layer}."
        old = {name.removeprefix(prefix): source.read(name) for name in names}
        new = old | merge_layer(old, config, request, layer, streams.attention_input(old))
        streams.step(old, new)
        for name, tensor in new.items():
            put(prefix + name, tensor)


def merge_layer(
    tensors: dict[str, Tensor], config: dict[str, Any], request: Request, layer: int, calibration: Tensor | None
) -> dict[str, Tensor]:
    """The attention tensors of one layer with fewer kv heads, by their names in the layer."""
    names = {
        field: f"self_attn.{field[0]}_proj.{'bias' if field.endswith('_bias') else 'weight'}"
        for field in LayerWeights._fields
    }
    merged = merge_kv_heads(
        LayerWeights(*(tensors.get(name) for name in names.values())),
        config["num_heads"],
        config["num_kv_heads"],
        request.kv_heads,
        method=request.method,
        window=request.window,
        groups=request.groups,
        seed=None if request.seed is None else (request.seed + 4 * layer) % 2**64,
        calibration=calibration,
        rope_dim=config["head_dim"],
        key_norm=config["qk_norm"],
        reorder=True,
    )
    values = merged.weights._asdict()
    return {name: values[field] for field, name in names.items() if values[field] is not None}


class _Writer:
    """The tensors of the result, in the files they were in, and the index of several."""

    def __init__(self, source: Source, folder: Path, kv_heads: int) -> None:
        self._folder, self._files, self._place = folder, {}, {}
        rows = kv_heads * source.config["head_dim"]

        def shape(name: str) -> tuple[int, ...]:
            grouped = name.split(".")[-2] in ("k_proj", "v_proj")
            return (rows, *source.shapes[name][1:]) if grouped else source.shapes[name]

        for file, names in source.files().items():
            described = {name: (shape(name), source.dtype(name)) for name in names}
            self._files[file] = SafetensorsWriter(folder / file, described)
            self._place |= dict.fromkeys(names, file)

    def put(self, name: str, tensor: Tensor) -> None:
        self._files[self._place[name]].put(name, tensor)

    def close(self) -> None:
        for writer in self._files.values():
            writer.close()
        if list(self._files) != ["model.safetensors"]:
            total = sum(writer.size for writer in self._files.values())
            index = {"metadata": {"total_size": total}, "weight_map": self._place}
            write_json(self._folder / "model.safetensors.index.json", index)


def _report(
    source: Source,
    out: Path,
    request: Request,
    tokens: int,
    perplexities: tuple[float | None, float | None],
    notes: list[str],
    seconds: float,
) -> Report:
    config = source.config
    number = source.dtype("model.layers.0.self_attn.k_proj.weight").itemsize
    per_head = 2 * config["num_layers"] * config["head_dim"] * number
    return Report(
        source=str(source.path),
        out=str(out),
        method=request.method,
        layers=config["num_layers"],
        heads=config["num_heads"],
        kv_heads_before=config["num_kv_heads"],
        kv_heads=request.kv_heads,
        kv_bytes_per_token_before=per_head * config["num_kv_heads"],
        kv_bytes_per_token=per_head * request.kv_heads,
        tokens=tokens,
        perplexity_before=perplexities[0],
        perplexity=perplexities[1],
        notes=notes,
        seconds=round(seconds, 2),
    )
