"""GGUF checkpoints. C++ reads the settings and knows the architectures (csrc/attnpack/models/detail)."""

from __future__ import annotations

import os
from typing import Any

import torch

from .._C import checkpoints
from .gguf_file import GgufFile

ARCHITECTURES: tuple[str, ...] = checkpoints.ARCHITECTURES


class GgufCheckpoint:
    """A GGUF file seen as a CausalLM: `config` (its keywords), `shapes` by state_dict name, `read(name, out)`."""

    def __init__(self, path: str | bytes | os.PathLike, max_positions: int | None = None) -> None:
        self.file = GgufFile(path)
        self.path = self.file.path
        self._opened = checkpoints.GgufCheckpoint(self.file.opened, max_positions)
        self.arch: str = self._opened.architecture
        self.config: dict[str, Any] = self._opened.config
        if (window := self.config["window"]) is not None:
            self.config["window"] = tuple(window)
        self.shapes: dict[str, tuple[int, ...]] = self._opened.shapes

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fills `out` with the tensor of state_dict name `name`, q and k rows in Hugging Face's order."""
        self._opened.read(name, out)

    def blocks(self, name: str) -> torch.Tensor | None:
        """The weight of state_dict name `name` as the file holds it (`GgufFile.blocks`), q and k rows in Hugging Face's
        order: only these are copied. None if the file holds it otherwise."""
        return self._opened.blocks(name)
