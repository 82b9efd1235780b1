"""Checkpoint directories that appear whole or not at all, and their safetensors files, written tensor by tensor.

The format of the tensors is the one of https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@contextlib.contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into, which becomes `out` when the block ends well and is removed otherwise.

    Killed, it stays behind as `.NAME.partial`, and the next run takes its place. Raises ValueError where `out` is there
    already or has no folder to lie in, or another process is writing it.
    """
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out}: exists already; choose another name for the output, or remove it first")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out}: lies in no folder that exists; make {out.absolute().parent} first")
    partial = out.absolute().parent / f".{out.name}.partial"
    partial.mkdir(exist_ok=True)
    lock = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{out}: another process is writing it; wait for it, or choose another name") from error
        try:
            for left in partial.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield partial
            os.rename(partial, out.absolute())
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class SafetensorsWriter:
    """A .safetensors file whose tensors are known by shape and dtype before they come, in any order, by `put`."""

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
        self._file = path.open("wb")
        self._file.write(len(header).to_bytes(8, "little") + header)

    def put(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor of the shape and dtype that were announced; raises ValueError where it is not finite."""
        entry = self._entries[name]
        if list(tensor.shape) != entry["shape"] or _NAMES[tensor.dtype] != entry["dtype"]:
            raise AssertionError(f"{name} is {tensor.dtype} {list(tensor.shape)}, announced was {entry}")
        self._file.seek(self._start + entry["data_offsets"][0])
        self._file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        self._missing.discard(name)

    def close(self) -> None:
        """Ends the file and brings it to the disk; every tensor must have come."""
        if self._missing:
            raise AssertionError(f"{self.path}: lacks {', '.join(sorted(self._missing))}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def require_finite(source: Path, name: str, tensor: Tensor) -> None:
    """Raises ValueError for NaN and infinity, which no conversion and no model survives."""
    if not torch.isfinite(tensor).all():
        kind = "NaN" if tensor.isnan().any() else "infinity"
        raise ValueError(f"{source}: tensor {name} holds {kind}; the checkpoint is damaged, get it again")
