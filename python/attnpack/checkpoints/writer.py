"""Writes a checkpoint's files: JSON, and safetensors tensor by tensor. Each file must be new, so no link is followed.

https://github.com/huggingface/safetensors#format describes the format of the tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


class SafetensorsWriter:
    """A .safetensors file. The constructor takes shapes and dtypes, `write_tensor` the tensors in any order."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self.path = path
        self._entries: dict[str, dict[str, Any]] = {}
        end = 0
        for name, (shape, dtype) in tensors.items():
            begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            self._entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._entries}).encode()
        header += b" " * (-len(header) % 8)
        self.size = end
        self._start = 8 + len(header)
        self._missing = set(tensors)
        self._file = path.open("xb")
        self._file.write(len(header).to_bytes(8, "little") + header)

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor, which must have the announced shape and dtype."""
        entry = self._entries[name]
        if list(tensor.shape) != entry["shape"] or _NAMES[tensor.dtype] != entry["dtype"]:
            raise AssertionError(f"{name} is {tensor.dtype} {list(tensor.shape)}, announced was {entry}")
        self._file.seek(self._start + entry["data_offsets"][0])
        self._file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        self._missing.discard(name)

    def close(self) -> None:
        """Closes the file after it is on the disk; every tensor must have been written."""
        if self._missing:
            raise AssertionError(f"{self.path}: lacks {', '.join(sorted(self._missing))}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def require_finite(source: Path, name: str, tensor: Tensor) -> None:
    """Raises ValueError for NaN and infinity, which make any conversion and any model useless."""
    if not torch.isfinite(tensor).all():
        kind = "NaN" if tensor.isnan().any() else "infinity"
        raise ValueError(f"{source}: tensor {name} holds {kind}; the checkpoint is damaged, get it again")
