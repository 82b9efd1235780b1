"""Converts whole checkpoints to fewer kv heads: reads, converts and writes layer by layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...atomic_write import atomic_directory
from ...checkpoints.companions import write_companions
from ...checkpoints.writer import Announced, ShardWriter, write_json
from ...file_errors import naming
from ...progress import progress
from ..weights import Groups, LayerWeights, merge_kv_heads
from .sources import Attention, DecoderOnly, Source, open_source
from .streams import Streams, load_tokens

RECORD = "attnpack_convert.json"
LEARNS_FROM_TEXT = ("similar", "aligned")


@dataclass(frozen=True)
class Request:
    """The settings of a conversion; see `attnpack convert --help`."""

    kv_heads: int
    method: str = "mean"  # the command's default is "aligned"
    window: int = 1
    groups: Groups | None = None
    seed: int | None = None
    dtype: torch.dtype | None = None  # default the stored dtype; fp32 from GGUF
    text: Path | None = None  # default the standard library's help topics
    tokens: int = 2048  # of the text for the perplexity, and as many more for methods that learn from text; 0 for none
    encoder: bool = False  # convert the encoder of an encoder-decoder model too


@dataclass(frozen=True)
class ConversionReport:
    source: str
    out: str
    method: str
    layers: int
    heads: int
    kv_heads_before: int
    kv_heads: int
    kv_bytes_per_token_before: int  # in the written dtype
    kv_bytes_per_token: int
    tokens: int  # on which the perplexities are measured
    perplexity_before: float | None
    perplexity: float | None
    notes: list[str]  # parts that were left out, with the reasons
    warnings: list[str]  # why the result is worse than it could be, and what to do
    seconds: float


def convert_checkpoint(source: Path, out: Path, request: Request) -> ConversionReport:
    """Writes `source` (a Hugging Face directory or a GGUF file) with fewer kv heads to the new directory `out`.

    Memory holds one layer (or the embedding) and the states of some tokens. Raises ValueError, and leaves no output, if
    the checkpoint is of an unknown kind, is damaged, or does not fit the request.
    """
    started = time.monotonic()
    with naming(source, "cannot be converted", "get the checkpoint again, or give another"):
        checkpoint, notes = open_source(source, request.dtype, request.encoder), []
    check_outside(source, out)
    _check_kv_heads(checkpoint, request.kv_heads)
    streams = _make_streams(checkpoint, request, notes)
    with atomic_directory(out) as folder:
        writer = ShardWriter(folder, _announced(checkpoint, request.kv_heads))
        if note := write_companions(source, folder):
            notes.append(note)
        _convert_layers(checkpoint, writer.write_tensor, streams, request)
        perplexities = streams.perplexities(checkpoint.read)
        writer.close()
        write_json(folder / "config.json", with_dtype(checkpoint.config_json(request.kv_heads), request.dtype))
        remarks = {"notes": notes, "warnings": _warnings(checkpoint, request, streams)}
        report = _make_report(
            checkpoint, out, request, streams.tokens, perplexities, remarks, time.monotonic() - started
        )
        write_json(folder / RECORD, asdict(report) | {"source": str(source.absolute())})
    return report


def check_outside(source: Path, out: Path) -> None:
    if source.resolve() in out.resolve().parents:
        raise ValueError(f"{out}: lies in {source}, which stays as it is; choose a place outside of it")


def _check_kv_heads(source: Source, kv_heads: int) -> None:
    """Layers can have groups of unlike sizes, and a checkpoint cannot: its config names only the number of kv heads."""
    present = source.config["num_kv_heads"]
    if present > kv_heads and present % kv_heads:
        fitting = [n for n in range(1, present) if present % n == 0]
        raise ValueError(
            f"num_kv_heads: got {kv_heads}, which does not divide the {present} key-value heads of {source.path}; "
            f"choose {' or '.join(map(str, fitting))}"
        )


def _make_streams(source: Source, request: Request, notes: list[str]) -> Streams:
    learns = request.method in LEARNS_FROM_TEXT
    if not isinstance(source, DecoderOnly):
        notes.append(f"perplexity {'and calibration are' if learns else 'is'} left out: {source.path} is no causal LM")
        return Streams(source.config, None, None)
    positions = source.config["max_positions"]
    return Streams(source.config, *load_tokens(source.path, request.text, request.tokens, learns, positions, notes))


def _warnings(source: Source, request: Request, streams: Streams) -> list[str]:
    if request.method != "aligned" or streams.learns or request.kv_heads == source.config["num_kv_heads"]:
        return []
    advice = "take --method mean"
    if isinstance(source, DecoderOnly):
        advice = "give --tokens 2048 and a checkpoint with its tokenizer, or " + advice
    return [
        "--method aligned has no text to learn from, and then it can be worse than mean (on SmolLM2 the perplexity is "
        f"72,989 instead of 16,080): {advice}"
    ]


def with_dtype(config: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """config.json of a checkpoint that is written in that dtype; None: in that of the source."""
    if dtype is None:
        return config
    named = str(dtype).removeprefix("torch.")
    return {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": named}


def _convert_layers(
    source: Source, write_tensor: Callable[[str, Tensor], None], streams: Streams, request: Request
) -> None:
    layers = source.layers()
    for name in layers.pop(""):
        tensor = source.read(name)
        if name == "model.embed_tokens.weight":
            streams.embed_tokens(tensor)
        write_tensor(name, tensor)
    for number, (prefix, names) in enumerate(progress(layers.items(), f"converting {source.path.name}")):
        old = {name: source.read(name) for name in names}
        seen = streams.attention_input(prefix, old)
        new = dict(old)
        for attention in source.attentions(prefix):
            new |= merge_layer(old, attention, request, number, seen)
        streams.pass_layer(prefix, old, new)
        for name, tensor in new.items():
            write_tensor(name, tensor)


def merge_layer(
    tensors: dict[str, Tensor], attention: Attention, request: Request, number: int, calibration: Tensor | None
) -> dict[str, Tensor]:
    """The tensors of one attention layer with fewer kv heads, by name."""
    names = {
        field: f"{attention.prefix}{field[0]}_proj.{'bias' if field.endswith('_bias') else 'weight'}"
        for field in LayerWeights._fields
    }
    kind = 4 * (2 * number + ("cross" in attention.prefix))  # a layer has up to two attentions, with four seeds each
    merged = merge_kv_heads(
        LayerWeights(*(tensors.get(name) for name in names.values())),
        attention.num_heads,
        attention.num_kv_heads,
        request.kv_heads,
        method=request.method,
        window=request.window,
        groups=request.groups,
        seed=None if request.seed is None else (request.seed + kind) % 2**64,
        calibration=calibration,
        rope_dim=attention.head_dim,
        key_norm=attention.key_norm,
        reorder=True,
    )
    values = merged.weights._asdict()
    return {name: values[field] for field, name in names.items() if values[field] is not None}


def _announced(source: Source, kv_heads: int) -> Announced:
    """The tensors of the result by file. Each shard becomes a file of the same name."""
    rows = {
        f"{attention.prefix}{projection}": kv_heads * attention.head_dim
        for layer in source.layers()
        if layer
        for attention in source.attentions(layer)
        for projection in ("k_proj", "v_proj")
    }

    def shape(name: str) -> tuple[int, ...]:
        sizes = source.shapes[name]
        return (rows.get(name.rpartition(".")[0], sizes[0]), *sizes[1:])

    files = source.by_file().items()
    return {file: {name: (shape(name), source.dtype(name)) for name in names} for file, names in files}


def _make_report(
    source: Source,
    out: Path,
    request: Request,
    tokens: int,
    perplexities: tuple[float | None, float | None],
    remarks: dict[str, list[str]],
    seconds: float,
) -> ConversionReport:
    config = source.config
    number = source.dtype(next(name for name in source.shapes if name.endswith("k_proj.weight"))).itemsize
    per_head = 2 * config["num_layers"] * config["head_dim"] * number
    return ConversionReport(
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
        **remarks,
        seconds=round(seconds, 2),
    )
