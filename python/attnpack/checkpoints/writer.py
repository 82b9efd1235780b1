"""Writes a checkpoint's files: JSON, and safetensors tensor by tensor. Each file must be new: no link is followed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._C import checkpoints


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


class SafetensorsWriter:
    """A .safetensors file. The constructor takes shapes and dtypes, `write_tensor` the tensors in any order."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._writer = checkpoints.SafetensorsWriter(path, dict(tensors))
        self.size: int = self._writer.size  # bytes of the data

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor, which must have the announced shape and dtype."""
        self._writer.write_tensor(name, tensor)

    def close(self) -> None:
        """Closes the file after it is on the disk; every tensor must have been written."""
        self._writer.close()


Announced = Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
"""Shapes and dtypes of the tensors of a checkpoint, by file."""


class ShardWriter:
    """The .safetensors files of a checkpoint in `folder`, and their index if there are several."""

    def __init__(self, folder: Path, announced: Announced) -> None:
        self._folder = folder
        self._files = {file: SafetensorsWriter(folder / file, tensors) for file, tensors in announced.items()}
        self._place = {name: file for file, tensors in announced.items() for name in tensors}

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        self._files[self._place[name]].write_tensor(name, tensor)

    def close(self) -> None:
        for writer in self._files.values():
            writer.close()
        if list(self._files) != ["model.safetensors"]:
            total = sum(writer.size for writer in self._files.values())
            index = {"metadata": {"total_size": total}, "weight_map": self._place}
            write_json(self._folder / "model.safetensors.index.json", index)


def require_finite(source: Path, name: str, tensor: Tensor) -> None:
    """Raises ValueError for NaN and infinity, which make any conversion and any model useless."""
    if not torch.isfinite(tensor).all():
        kind = "NaN" if tensor.isnan().any() else "infinity"
        raise ValueError(f"{source}: tensor {name} holds {kind}; the checkpoint is damaged, get it again")
