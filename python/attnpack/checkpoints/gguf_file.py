"""GGUF files: the metadata, and the tensors by name. C++ reads them (csrc/attnpack/weights).

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes the format. The package `gguf` dequantises the types
that C++ does not read, such as Q2_K and IQ4_XS.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._C import checkpoints
from ..errors import as_path

padded = checkpoints.padded
"""padded(count, alignment): the next multiple of alignment."""


@dataclass(frozen=True)
class GgufTensor:
    shape: tuple[int, ...]  # rows first, as in torch
    type: int  # a gguf.GGMLQuantizationType
    offset: int  # from the start of the file
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


class GgufFile:
    """The header of a GGUF file: `metadata`, `tensors` by name; `read` gives one tensor. `metadata_places` says where
    each key stands with its value in the file: the first byte and the one behind the last.

    Raises ValueError, naming the file, for anything that is not a whole little-endian GGUF file of version 2 or 3;
    ImportError if the package `gguf` is missing and the file has a type that C++ does not read.
    """

    def __init__(self, path: str | bytes | os.PathLike) -> None:
        self.path = as_path("path", path)
        self.opened = checkpoints.GgufFile(self.path, functools.partial(block_size, self.path), widen)
        """The file as C++ has opened it."""
        self.alignment: int = self.opened.alignment  # of each tensor in the file
        self.tensors = {name: GgufTensor(*described) for name, described in self.opened.tensors.items()}

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        return self.opened.metadata

    @property
    def metadata_places(self) -> dict[str, tuple[int, int]]:
        return self.opened.metadata_places

    def check_model(self) -> None:
        """Raises unless the file says that it is a whole model."""
        self.opened.check_model()

    def blocks(self, name: str, first: int, rows: int) -> torch.Tensor | None:
        """Rows of tensor `name` as the file holds them, [rows, blocks, bytes] uint8, in memory that is mapped from the
        file. None for a type that is not multiplied as it is stored. Raises for a scale that is not finite."""
        return self.opened.blocks(name, first, rows)

    def read(self, name: str, out: torch.Tensor, first: int = 0) -> None:
        """Dequantises tensor `name` into `out` (any floating dtype and device), in pieces: as many rows of the last
        dim as `out` has, from row `first` on; of a vector the numbers from `first` on."""
        self.opened.read(name, out, first)


def block_size(path: Path, kind: int) -> tuple[int, int]:
    """Numbers and bytes of one block of a type that C++ does not read; raises if the package gguf cannot dequantise
    it."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
        from numpy import uint8, zeros
    except ImportError as error:
        raise ImportError(
            f"{path}: has tensors of GGUF type {kind}, which needs the package gguf; run `pip install gguf`"
        ) from error
    try:
        sizes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        dequantize(zeros((1, sizes[1]), dtype=uint8), GGMLQuantizationType(kind))
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"{path}: has tensors of a type the package gguf cannot dequantise ({error}); "
            "use a file of another type, such as Q8_0 or F16, or a newer gguf"
        ) from error
    return sizes


def widen(kind: int, rows: torch.Tensor) -> torch.Tensor:
    """The numbers of rows of that type [rows, bytes], in fp32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType(kind)))
