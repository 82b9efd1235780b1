"""The settings of a model that its GGUF file holds, checked as they are read."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..file_errors import excerpt
from .gguf_file import GgufFile


class GgufSettings:
    """The settings of a file's architecture, and `shapes`, those of its tensors by state_dict name."""

    shapes: dict[str, tuple[int, ...]]

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.path = file.path
        self.arch = file.metadata.get("general.architecture")

    def setting(self, key: str, default: Any = None) -> Any:
        """The metadata of the file's architecture."""
        return self.file.metadata.get(f"{self.arch}.{key}", default)

    def refuse(self, *keys: str, usual: tuple[Any, ...] = ()) -> None:
        """Raises where a setting changes the mathematics in a way that CausalLM does not have."""
        for key in keys:
            if (value := self.setting(key)) and value not in usual:
                raise ValueError(f"{self.path}: {self.arch}.{key} = {excerpt(repr(value))} is not supported yet")

    def required_setting(self, key: str) -> Any:
        if not (value := self.setting(key)):
            raise ValueError(f"{self.path}: metadata lacks {self.arch}.{key}, or it is 0; the file is damaged")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A setting that is an int of at least 1. Without a default it must be there."""
        value = self.required_setting(key) if default is None else self.setting(key, default)
        if type(value) is not int or value < 1:
            raise ValueError(f"{self.path}: {self.arch}.{key} is {excerpt(repr(value))}, wants an int of at least 1")
        return value

    def by_layer(self, key: str, layers: int, default: int | None = None, least: int = 1) -> list[int]:
        """A setting that is an int of at least 1 for all layers, or lists ints of at least `least`, one for each."""
        listed = self.setting(key)
        if not isinstance(listed, list):
            return [self.size(key, default)] * layers
        if len(listed) != layers:
            raise ValueError(
                f"{self.path}: {self.arch}.{key} lists {len(listed)} counts, wants one for each of {layers} layers"
            )
        if not all(type(each) is int and each >= least for each in listed):
            raise ValueError(f"{self.path}: {self.arch}.{key} is {listed!r:.80}, wants ints of at least {least}")
        return listed

    def number(self, key: str, default: float | None = None) -> float:
        """A setting that is a number above 0. Without a default it must be there."""
        value = self.required_setting(key) if default is None else self.setting(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"{self.path}: {self.arch}.{key} is {excerpt(repr(value))}, wants a number above 0")
        return float(value)

    def vector(self, name: str, length: int) -> list[float] | None:
        """The numbers of a tensor of that length; None if the file has no such tensor."""
        if name not in self.file.tensors:
            return None
        shape = self.file.tensors[name].shape
        if shape != (length,):
            raise ValueError(
                f"{self.path}: {name} has shape {list(shape)}, RoPE over {2 * length} dims asks for {[length]}"
            )
        values = torch.empty(shape, device="cpu")
        self.file.read(name, values)
        return values.tolist()
