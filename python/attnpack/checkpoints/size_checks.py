"""Checks of the sizes in a checkpoint's configuration, before anything is built: a file may lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_WIDEST = 1 << 20  # limit of heads * head_dim: a layer holds a number per head, RoPE a number per pair of dims


def check_sizes(path: Path, shapes: Mapping[str, tuple[int, ...]], num_layers: int, heads: int, head_dim: int) -> None:
    """Raises for sizes that no tensor of the checkpoint has, and that would cost much before shapes are compared."""
    if num_layers > len(shapes):
        raise ValueError(
            f"{path}: its configuration asks for {num_layers} layers, but it has {len(shapes)} tensors; the "
            "configuration is of another checkpoint, get both again"
        )
    if heads * head_dim > _WIDEST:
        raise ValueError(
            f"{path}: its configuration asks for {heads} heads of head_dim {head_dim}, together {_WIDEST} is the most; "
            "get the checkpoint again"
        )


def check_shapes(path: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises unless the checkpoint has exactly the tensors of the model that its configuration describes."""
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    if missing or extra:
        parts = [f"{kind} {_some(names)}" for kind, names in (("lacks", missing), ("has unexpected", extra)) if names]
        raise ValueError(f"{path}: {' and '.join(parts)}; its configuration asks for other tensors")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(f"{path}: {name} has shape {list(found[name])}, its configuration asks for {list(shape)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
