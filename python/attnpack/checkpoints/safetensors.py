"""Safetensors files, also in shards, checked by the rules of https://github.com/huggingface/safetensors.

They are read piece by piece and not mapped: the pages of a mapped file would count as resident memory in addition to
the converted weights.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..file_errors import brief, naming
from .strict_json import LONGEST, parse_json, read_json

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Bits per element of every dtype that the format knows.
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}
_MOST_TENSORS = 100_000  # of a checkpoint, so that a lie costs little; Llama 3.1 405B has 1,137
_MOST_VALUES = 20 * _MOST_TENSORS  # of one header; a tensor of four dims has 14
_CHUNK_ELEMENTS = 1 << 20
_AGAIN = "get the checkpoint again"


class SafetensorsFile:
    """The header of one .safetensors file: `shapes` by name; `read` and `chunks` give its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with naming(path, "is not a safetensors file", _AGAIN), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"{path}: is no whole safetensors file (it has {size} bytes); {_AGAIN}")
            if length > LONGEST:
                raise ValueError(f"its header has {length} bytes, which may be {LONGEST}")
            header = parse_json(file.read(length), _MOST_VALUES)
        if not isinstance(header, dict):
            raise ValueError(f"{path}: its header is no JSON object; {_AGAIN}")
        _check_metadata(path, header.pop("__metadata__", None))
        _check_count(path, len(header))
        self.start = 8 + length
        for name, entry in header.items():
            _check_entry(path, brief(name), entry, size - self.start)
        _check_cover(path, [entry["data_offsets"] for entry in header.values()], size - self.start)
        self.entries = header
        self.shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which the tensor is stored."""
        stored = self.entries[name]["dtype"]
        if stored not in _DTYPES:
            raise ValueError(f"{self.path}: tensor {brief(name)} is {stored}; readable are {', '.join(_DTYPES)}")
        return _DTYPES[stored]

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor's elements in order, as 1-D tensors of its stored dtype."""
        entry, dtype = self.entries[name], self.dtype(name)
        remaining = math.prod(entry["shape"])
        with naming(self.path, f"tensor {brief(name)} cannot be read", _AGAIN), self.path.open("rb") as file:
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


def _check_count(path: Path, count: int) -> None:
    if count > _MOST_TENSORS:
        raise ValueError(f"{path}: describes {count} tensors, where {_MOST_TENSORS} are the most; {_AGAIN}")


def _check_metadata(path: Path, metadata: Any) -> None:
    words = metadata.values() if isinstance(metadata, dict) else [None]
    if metadata is not None and not all(isinstance(word, str) for word in words):
        raise ValueError(f"{path}: __metadata__ is no object of strings; the file is damaged, get it again")


def _check_entry(path: Path, name: str, entry: Any, size: int) -> None:
    """Raises unless an entry of the header is complete, has the bytes that its dtype and shape need, and ends within
    the data's `size` bytes."""
    values = [entry.get(key) for key in ("dtype", "shape", "data_offsets")] if isinstance(entry, dict) else [None] * 3
    dtype, shape, offsets = values
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in numbers) or len(offsets) != 2:
        raise ValueError(
            f"{path}: tensor {name} is described as {brief(entry)}, not by dtype, shape and two data_offsets; the "
            "file is damaged, get it again"
        )
    if dtype not in _BITS:
        raise ValueError(f"{path}: tensor {name} has the dtype {brief(dtype)}, which is unknown; {_AGAIN}")
    begin, end = offsets
    if end > size:
        raise ValueError(
            f"{path}: tensor {name} ends at byte {end} of the data, which has {size}; the file is truncated, get it "
            "again"
        )
    bits = _bits(dtype, shape)
    if bits is None or begin > end or 8 * (end - begin) != bits:
        needs = "more bytes than can be" if bits is None else f"{bits / 8:.15g} bytes"
        raise ValueError(
            f"{path}: tensor {name} has data_offsets {offsets}, but {dtype} of shape {brief(shape)} takes {needs}; the "
            "file is damaged, get it again"
        )


def _bits(dtype: str, shape: list[int]) -> int | None:
    """Bits that a tensor takes; None if a product on the way needs more than 64 bits."""
    bits = 1
    for size in (*shape, _BITS[dtype]):
        bits *= size
        if bits >= 2**64:
            return None
    return bits


def _check_cover(path: Path, offsets: list[list[int]], size: int) -> None:
    """Raises unless the tensors lie one after the other and fill the data's `size` bytes, as the format wants."""
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
            f"{path}: has {size - end} bytes after its last tensor; the file is damaged, or another was appended to "
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
    """The files that an index's weight_map names; raises unless the weight_map names each tensor of these files, with
    the right file, and no other tensor.

    Each file is compared with the index before the next one is opened: to open a file may cost much.
    """
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index}: has no weight_map, which names each tensor's file; {_AGAIN}")
    _check_count(index, len(places))
    wanted: dict[str, set[str]] = {}
    for name, shard in places.items():
        # A conversion writes the shards under these names. Its other files have other suffixes, so no shard can
        # overwrite them.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ValueError(
                f"{index}: names the file {brief(repr(shard))}, wants the name of one in the same folder, "
                "NAME.safetensors"
            )
        wanted.setdefault(shard, set()).add(name)
    for shard in wanted:
        if not (directory / shard).is_file():
            raise ValueError(f"{directory}: lacks {brief(shard)}, which {index.name} names; {_AGAIN}")
    return [_open_shard(directory / shard, index, places, wanted[shard]) for shard in sorted(wanted)]


def _open_shard(path: Path, index: Path, places: dict[str, str], wanted: set[str]) -> SafetensorsFile:
    file = SafetensorsFile(path)
    shard, there = brief(path.name), file.shapes.keys()
    if missing := wanted - there:
        raise ValueError(f"{index}: says that {brief(min(missing))} is in {shard}, which lacks it; {_AGAIN}")
    if others := there - wanted:
        name = min(others)
        if name not in places:
            raise ValueError(f"{index}: does not name {brief(name)} of {shard}; {_AGAIN}")
        raise ValueError(f"{index}: says that {brief(name)} is in {brief(places[name])}, but {shard} has it; {_AGAIN}")
    return file
