"""Safetensors files, also in shards. C++ checks and reads them (csrc/attnpack/weights)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from .._C import checkpoints
from ..errors import as_path, wrong_kind


class SafetensorsFile:
    """A .safetensors file whose header has been checked: `shapes` by name; `read` gives its tensors."""

    def __init__(self, path: Path, opened: checkpoints.SafetensorsFile | None = None) -> None:
        self.path = path
        self._opened = checkpoints.SafetensorsFile(path) if opened is None else opened
        self.shapes: dict[str, tuple[int, ...]] = self._opened.shapes

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which the weight is stored; raises ValueError if it is no floating one."""
        return self._opened.dtype(name)

    def read(self, name: str, out: Tensor) -> None:
        """Copies a weight into `out` of its shape, converted piece by piece."""
        self._opened.read(name, out)


def open_files(directory: Path) -> list[SafetensorsFile]:
    """The safetensors of a checkpoint directory: model.safetensors, or the shards of an index."""
    return [SafetensorsFile(file.path, file) for file in checkpoints.open_safetensors(directory)]


def load_safetensors(path: str | bytes | os.PathLike) -> dict[str, Tensor]:
    """The tensors of a .safetensors file or of a checkpoint directory, by name.

    The files are mapped: memory grows as tensors are read, and writes to a tensor never reach the file. The file must
    keep its length while tensors of it live. Raises ValueError, naming the file, for what Rust's reader refuses.
    """
    return checkpoints.load_safetensors(as_path("path", path))


def save_safetensors(
    tensors: Mapping[str, Tensor], path: str | bytes | os.PathLike, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors of any strides, dtype and device as a .safetensors file, with `metadata` (default
    {"format": "pt"}).

    The file appears whole or not at all, in place of what stood at `path`; a link there is replaced. Raises ValueError
    for a tensor without numbers (meta, sparse, quantised), and if the disk is full.
    """
    if not isinstance(tensors, Mapping):
        raise wrong_kind("tensors", tensors, "a dict of tensors by name, such as a state_dict()")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise wrong_kind("tensors", {name: tensor}, "a dict of tensors by name, such as a state_dict()")
    words = {"format": "pt"} if metadata is None else dict(metadata)
    checkpoints.save_safetensors(dict(tensors), as_path("path", path), words)
