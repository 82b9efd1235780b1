"""Error sentences for sizes, dtypes and paths that no C++ twin checks."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from .explain import wrong_kind

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""The dtypes by their names on the command line."""


def check_dtype(dtype: object) -> None:
    """Checks that the dtype of a module, if given, is a floating one: parameters have gradients."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise wrong_kind("dtype", dtype, "a torch.dtype such as torch.float32, or None")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"attnpack: dtype is {dtype}, wants a floating one such as torch.float32")


def check_size(name: str, size: object, least: int = 1) -> None:
    """Checks that a size is an int of at least `least`."""
    if not isinstance(size, int) or isinstance(size, bool):
        raise wrong_kind(name, size, "an int")
    if size < least:
        raise ValueError(f"attnpack: {name}: got {size}, want {'at least 1' if least else '0 or more'}")


def as_path(name: str, path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise wrong_kind(name, path, "a path: a str or a pathlib.Path")
    return Path(path)
