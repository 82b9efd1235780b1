"""Hugging Face checkpoints. C++ reads config.json and knows the families (csrc/attnpack/models/detail)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from .._C import checkpoints
from ..errors import as_path
from .safetensors import SafetensorsFile

MODEL_TYPES: tuple[str, ...] = checkpoints.MODEL_TYPES


class HfCheckpoint:
    """A checkpoint directory seen as a CausalLM: `config` (its keywords), `shapes` by state_dict name, `read(...)`."""

    def __init__(self, directory: str | bytes | os.PathLike, max_positions: int | None = None) -> None:
        self.path = as_path("directory", directory)
        opened = checkpoints.HfCheckpoint(self.path, max_positions)
        self.config: dict[str, Any] = opened.config
        if (window := self.config["window"]) is not None:
            self.config["window"] = tuple(window)
        self.shapes: dict[str, tuple[int, ...]] = opened.shapes
        self.is_plain: bool = opened.is_plain
        """Whether the stored tensors are those of the state dict, under the same names."""
        self._opened = opened
        files: dict[Path, SafetensorsFile] = {}
        for file in opened.files.values():
            if file.path not in files:
                files[file.path] = SafetensorsFile(file.path, file)
        self.files = {name: files[file.path] for name, file in opened.files.items()}

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the stored tensor of state_dict name `name`; bf16 for one that is stored in FP8 or MXFP4."""
        return self._opened.dtype(name)

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fills `out` with the tensor of state_dict name `name`."""
        if self.is_plain:
            self.files[name].read(name, out)
        else:
            self._opened.read(name, out)
