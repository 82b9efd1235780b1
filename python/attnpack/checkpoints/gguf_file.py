"""GGUF files: the metadata, and the tensors by name.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes the format. This module reads the header itself,
because `gguf.GGUFReader` costs too much: it keeps every token of the vocabulary as a NumPy view (5 s and 160 MB for
SmolLM2). The package `gguf` dequantises the tensors.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import as_path
from ..file_errors import excerpt, naming
from ..nn.stored import STORED_LAYOUTS

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 20  # of the header, or of dequantised fp32, at a time

# Limits of a header, so that a file that lies costs little. The largest vocabularies take half of them.
_LONGEST = 64_000_000  # bytes
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 16
_MOST_ITEMS = 3_000_000  # of all arrays together
_ARRAY_COST = 10  # of an array in an array, in items
_MOST_DIMS = 4  # as in ggml
_DEEPEST = 16  # arrays in arrays

# The types whose blocks are multiplied as they are, and where a block has numbers in fp16.
_HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


@dataclass(frozen=True)
class GgufTensor:
    shape: tuple[int, ...]  # rows first, as in torch
    type: int  # a gguf.GGMLQuantizationType
    offset: int  # from the start of the file
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


class _Header:
    """Reads values one after the other, and raises at the end of the file and at the limits of a header."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path, self.size, self.at = file, path, os.fstat(file.fileno()).st_size, file.tell()
        self._items = 0
        # A piece of the file, and how much of it is read: a header has millions of small values.
        self._piece, self._next = b"", 0

    def check_left(self, count: int) -> None:
        """Raises unless the file has `count` more bytes."""
        if count > self.size - self.at:
            self._refuse_end()
        self.check_at_most(self.at + count, _LONGEST, "bytes")

    def _refuse_end(self) -> None:
        raise ValueError(
            f"{self.path}: the GGUF header ends early (the file has {self.size} bytes); "
            "the file is truncated or damaged, get it again"
        )

    def check_at_most(self, count: int, most: int, unit: str) -> None:
        if count > most:
            raise ValueError(
                f"{self.path}: the GGUF header has {count} {unit}, where {most} are the most; the file is damaged, get "
                "it again"
            )

    def read_count(self, most: int, unit: str) -> int:
        count = self.read_scalar("Q")
        self.check_at_most(count, most, unit)
        return count

    def read_bytes(self, count: int) -> bytes:
        begin, end = self._next, self._next + count
        if end > len(self._piece):
            self.check_left(count)
            self._piece = self._piece[begin:] + self.file.read(max(count, _CHUNK_BYTES))
            begin, end = 0, count
            if end > len(self._piece):  # somebody has cut the file meanwhile
                self._refuse_end()
        self.at += count
        self._next = end
        return self._piece[begin:end]

    def read_scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.read_bytes(struct.calcsize("<" + code)))[0]

    def read_text(self) -> str:
        (length,) = _LENGTH.unpack(self.read_bytes(8))
        return self.read_bytes(length).decode("utf-8", errors="replace")

    def read_name(self) -> str:
        """A name, strictly decoded: as replaced characters, two names that are not UTF-8 could become the same."""
        return self.read_bytes(self.read_scalar("Q")).decode("utf-8")

    def read_value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.read_text()
        if kind == _ARRAY:
            return self._read_array(depth)
        if kind not in _SCALARS:
            raise ValueError(f"{self.path}: metadata of type {kind}, which GGUF does not define; the file is damaged")
        return self.read_scalar(_SCALARS[kind])

    def _read_array(self, depth: int) -> list[Any]:
        if depth == _DEEPEST:
            raise ValueError(f"{self.path}: metadata with arrays in arrays, {depth} deep; the file is damaged")
        item = self.read_scalar("I")
        cost = _ARRAY_COST if item == _ARRAY else 1
        count = self.read_count((_MOST_ITEMS - self._items) // cost, "values in arrays")
        self._items += count * cost
        if item in _SCALARS:
            form = f"<{count}{_SCALARS[item]}"
            return list(struct.unpack(form, self.read_bytes(struct.calcsize(form))))
        if item == _STRING:
            return [self.read_text() for _ in range(count)]
        return [self.read_value(item, depth + 1) for _ in range(count)]


class GgufFile:
    """The header of a GGUF file: `metadata`, `tensors` by name; `read` gives one tensor. `metadata_places` says where
    each key stands with its value in the file: the first byte and the one behind the last.

    Raises ValueError, naming the file, for anything that is not a whole little-endian GGUF file of version 2 or 3.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = as_path("path", path)
        if self.path.is_dir():
            raise ValueError(f"{self.path}: is a directory; give the path of a .gguf file, or use from_hf")
        if not self.path.is_file():
            raise ValueError(f"{self.path}: no such file; give the path of a .gguf file")
        self.metadata: dict[str, Any] = {}
        self.metadata_places: dict[str, tuple[int, int]] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self.alignment = 32  # of each tensor in the file
        with naming(self.path, "is no GGUF file that can be read", "get it again"), self.path.open("rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                raise ValueError(f"{self.path}: begins with {magic!r}, not with b'GGUF'; give a GGUF file")
            self._read_header(_Header(file, self.path))

    def _read_header(self, header: _Header) -> None:
        version = header.read_scalar("I")
        if version not in (2, 3):
            raise ValueError(f"{self.path}: GGUF version {version}; readable are little-endian versions 2 and 3")
        num_tensors, num_keys = header.read_count(_MOST_TENSORS, "tensors"), header.read_count(_MOST_KEYS, "keys")
        for _ in range(num_keys):
            begin, key, kind = header.at, header.read_name(), header.read_scalar("I")
            self._check_new(key, self.metadata, "the key")
            self.metadata[key] = header.read_value(kind)
            self.metadata_places[key] = begin, header.at
            if key == "general.alignment":
                self.alignment = self._checked_alignment(kind, self.metadata[key])
        infos = [self._read_tensor_info(header) for _ in range(num_tensors)]
        alignment = self.alignment
        start = padded(header.at, alignment)
        blocks = _block_sizes(self.path, {kind for _, _, kind, _ in infos})
        end = 0
        for name, shape, kind, at in infos:
            self._check_new(name, self.tensors, "tensor")
            elements, block_bytes = blocks[kind]
            if shape[-1] % elements:
                raise ValueError(
                    f"{self.path}: tensor {excerpt(name)} has rows of {shape[-1]}, which its type stores in blocks of "
                    f"{elements}; the file is damaged, get it again"
                )
            if at != end:
                raise ValueError(
                    f"{self.path}: tensor {excerpt(name)} begins at byte {at} of the data, but the tensors before it "
                    f"end at {end} (alignment {alignment}); the file is damaged, get it again"
                )
            tensor = GgufTensor(shape, kind, start + at, shape[-1] // elements * block_bytes)
            end = padded(at + tensor.nbytes, alignment)
            self.tensors[name] = tensor
        self._check_size(header.size)

    def _check_new(self, name: str, there: dict[str, Any], what: str) -> None:
        if name in there:
            raise ValueError(f"{self.path}: has {what} {excerpt(name)} twice; the file is damaged, get it again")

    def _checked_alignment(self, kind: int, value: Any) -> int:
        if kind != _UINT32 or value.bit_count() != 1:
            raise ValueError(
                f"{self.path}: general.alignment is {excerpt(repr(value))} (type {kind}), wants a uint32 that is a "
                "power of two; the file is damaged, get it again"
            )
        return value

    def _read_tensor_info(self, header: _Header) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = header.read_name(), header.read_scalar("I")
        if not 1 <= num_dims <= _MOST_DIMS:
            raise ValueError(
                f"{self.path}: tensor {excerpt(name)} has {num_dims} dims, wants 1 to {_MOST_DIMS}; the file is "
                "damaged, get it again"
            )
        dims = [header.read_scalar("Q") for _ in range(num_dims)]
        return name, tuple(reversed(dims)), header.read_scalar("I"), header.read_scalar("Q")

    def _check_size(self, size: int) -> None:
        for name, tensor in self.tensors.items():
            end = tensor.offset + tensor.nbytes
            if end > size:
                raise ValueError(
                    f"{self.path}: tensor {excerpt(name)} ends at byte {end}, but the file has {size}; "
                    "the file is truncated, get it again"
                )

    def check_model(self) -> None:
        """Raises unless the file says that it is a whole model."""
        count, number = (self.metadata.get(f"split.{key}") for key in ("count", "no"))
        if count not in (None, 0, 1):
            part = f"part {number + 1}" if type(number) is int else "a part"
            raise ValueError(
                f"{self.path}: is {part} of a GGUF file that was split into {excerpt(count)} (split.count), wants a "
                "whole one; join the parts with `llama-gguf-split --merge PART1 OUT`"
            )
        kind = self.metadata.get("general.type", "model")
        if kind != "model":
            what = {"adapter": "a LoRA adapter", "imatrix": "an importance matrix", "mmproj": "a multimodal projector"}
            known = what.get(kind, "no model") if isinstance(kind, str) else "no model"
            raise ValueError(
                f"{self.path}: is {known} (general.type is {excerpt(repr(kind))}), wants a model; give the GGUF file "
                "of the model itself"
            )

    def blocks(self, name: str, first: int, rows: int) -> torch.Tensor | None:
        """Rows of tensor `name` as the file holds them, [rows, blocks, bytes] uint8, in memory that is mapped from the
        file. None for a type that is not multiplied as it is stored. Raises for a scale that is not finite."""
        tensor = self.tensors[name]
        halves = _HALVES.get(_type_name(tensor.type))
        if halves is None or len(tensor.shape) < 2:
            return None
        with (
            naming(self.path, f"tensor {excerpt(name)} cannot be mapped", "get it again"),
            self.path.open("rb") as file,
        ):
            at, count = tensor.offset + first * tensor.row_bytes, rows * tensor.row_bytes
            skipped = at % mmap.ALLOCATIONGRANULARITY
            # Private pages: torch wants memory that could be written.
            mapped = mmap.mmap(file.fileno(), skipped + count, access=mmap.ACCESS_COPY, offset=at - skipped)
            found = torch.frombuffer(mapped, dtype=torch.uint8, offset=skipped, count=count)
        size = STORED_LAYOUTS[_type_name(tensor.type)][1]
        blocks = found.view(rows, tensor.row_bytes // size, size)
        for part in blocks.split(max(1, _CHUNK_BYTES // tensor.row_bytes)):
            for half in halves:
                if not part[..., half : half + 2].contiguous().view(torch.float16).isfinite().all():
                    raise ValueError(
                        f"{self.path}: tensor {excerpt(name)} has a scale that is not finite; the file is damaged, get "
                        "it again"
                    )
        return blocks

    def read(self, name: str, out: torch.Tensor, first: int = 0) -> None:
        """Dequantises tensor `name` into `out` (any floating dtype and device), in pieces: as many rows of the last
        dim as `out` has, from row `first` on; of a vector the numbers from `first` on."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
        from numpy import fromfile, uint8

        tensor = self.tensors[name]
        if len(tensor.shape) == 1 and out.shape != tensor.shape:
            whole = torch.empty(tensor.shape, device="cpu")
            self.read(name, whole)
            out.copy_(whole[first : first + out.numel()])
            return
        rows = out.view(-1, tensor.shape[-1])
        step = max(1, _CHUNK_BYTES // (4 * tensor.shape[-1]))
        with naming(self.path, f"tensor {excerpt(name)} cannot be read", "get it again"), self.path.open("rb") as file:
            file.seek(tensor.offset + first * tensor.row_bytes)
            for begin in range(0, rows.shape[0], step):
                chunk = rows[begin : begin + step]
                data = fromfile(file, dtype=uint8, count=chunk.shape[0] * tensor.row_bytes)
                values = dequantize(data.reshape(chunk.shape[0], -1), GGMLQuantizationType(tensor.type))
                chunk.copy_(torch.from_numpy(values))


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(kind).name


def padded(count: int, alignment: int) -> int:
    """The next multiple of alignment."""
    return -(-count // alignment) * alignment


def _block_sizes(path: Path, kinds: set[int]) -> dict[int, tuple[int, int]]:
    """Elements and bytes of one block of each tensor type; raises if a type cannot be dequantised."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
        from numpy import uint8, zeros
    except ImportError as error:
        raise ImportError(f"{path}: reading GGUF needs the package gguf; run `pip install gguf`") from error
    sizes = {}
    for kind in kinds:
        try:
            sizes[kind] = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            dequantize(zeros((1, sizes[kind][1]), dtype=uint8), GGMLQuantizationType(kind))
        except (ValueError, NotImplementedError) as error:
            raise ValueError(
                f"{path}: has tensors of a type the package gguf cannot dequantise ({error}); "
                "use a file of another type, such as Q8_0 or F16, or a newer gguf"
            ) from error
    return sizes
