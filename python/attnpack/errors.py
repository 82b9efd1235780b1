"""Checks of arguments, and the form of the errors. C++ has the rules and the sentences (``attnpack._C.checks``): both
languages raise the same.

While a graph is traced, no check runs here: the operators check shapes and dtypes of each call. A rule that no operator
sees is checked in traced calls too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ._C import checks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""The dtypes by their names on the command line."""

LAYER_CACHE = "an attnpack.DynamicCache() or StaticCache"
MODEL_CACHE = "an attnpack.ModelCache(num_layers)"

with_article = checks.with_article
_is_compiling = torch.compiler.is_compiling


def wrong_kind(name: str, value: object, wanted: str) -> TypeError:
    return TypeError(checks.wrong_kind(name, value, wanted))


def reject_keywords(unknown: dict[str, Any], cache: str | None = LAYER_CACHE, function: str = "forward") -> None:
    """Raises TypeError for keywords that `function` does not have; `cache` says in words what its cache= takes, None if
    it has no such argument."""
    for name in unknown:
        checks.unexpected_keyword(function, name, ["mask"] if cache is None else ["mask", "cache"], cache or "")


def check_input(name: str, tensor: Tensor, width: int, projection: nn.Module | None) -> None:
    """Raises unless `tensor` is [B, L, width] in the dtype and on the device of a plain linear `projection`."""
    if not _is_compiling():
        checks.input(name, tensor, width, projection)


def check_tokens(name: str, tensor: Tensor, width: int, projection: nn.Module | None) -> None:
    """As `check_input` for [..., width], which norms and feed-forwards take."""
    if not _is_compiling():
        checks.tokens(name, tensor, width, projection)


def check_inputs(
    x: Tensor,
    context: Tensor | None,
    value_context: Tensor | None,
    cache: object | None,
    *projections: tuple[int, nn.Module | None],
) -> None:
    """Checks x [B, L, width], context and value_context against the widths and projections of q, k and v. Context and
    cache must not be given together, nor value_context without context; lengths and batch sizes must agree."""
    if not _is_compiling() or (context is None and value_context is not None):
        (q_width, q_proj), (k_width, k_proj), (v_width, v_proj) = projections
        checks.inputs(x, context, value_context, cache is not None, q_width, q_proj, k_width, k_proj, v_width, v_proj)


def check_positions(positions: Tensor | None, x: Tensor, dim: int = -2) -> None:
    """Checks that positions, if given, are int64 [L] or [B, L] for x [B, ..., L, ...], whose L is at `dim`."""
    if positions is not None and not _is_compiling():
        checks.positions(positions, x.size(0), x.size(dim))


def check_lengths(name: str, lengths: Tensor | None, x: Tensor) -> None:
    """Checks that lengths, if given, are int32 or int64, one for each sequence of x [B, L, ...], and from 0 to L.

    Values are checked only on the CPU: reading them on another device would wait for it.
    """
    if lengths is not None and not _is_compiling():
        checks.lengths(name, lengths, x)


def check_ids(name: str, ids: Tensor, weight: Tensor | None = None) -> None:
    """Checks that ids are token numbers [B, L], on the device of `weight`. `check_vocabulary` finds wrong values."""
    if not _is_compiling():
        checks.ids(name, ids, weight)


def check_vocabulary(embedding: nn.Module | None, name: str, ids: Tensor) -> None:
    """Raises for an id outside the vocabulary. Call it after a look-up has failed: a good call then pays nothing, and
    CUDA does not wait."""
    rows = getattr(embedding, "num_embeddings", None)  # of an embedding of torch's or of stored weights
    if isinstance(rows, int):
        checks.vocabulary(name, ids, rows)


def check_dtype(dtype: object) -> None:
    """Checks that the dtype of a module, if given, is a floating one: parameters have gradients."""
    if dtype is not None:
        checks.dtype(dtype)


def check_size(name: str, size: object) -> None:
    """Checks that a size is an int of at least 1."""
    checks.size(name, size)


def as_path(name: str, path: object) -> Path:
    """The path of a file, whose name need not be text: bytes that are no UTF-8 become half characters, as in
    `os.fsdecode`."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise wrong_kind(name, path, "a path: a str, bytes or a pathlib.Path")
    words = os.fsdecode(path)
    try:
        is_name = b"\0" not in os.fsencode(words)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise ValueError(f"attnpack: {name}: got {words!r}, which names no file; give the name as the system has it")
    return Path(words)


def values_of(tensor: Tensor) -> list[Any] | None:
    """The values to check, or None if they cannot be read.

    A traced tensor has no values: the op checks those of each run. Reading from another device would wait for it.
    """
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or _is_compiling():
        return None
    try:
        return tensor.tolist()
    except RuntimeError:  # a tensor inside a transform of torch.func has no values either
        return None
