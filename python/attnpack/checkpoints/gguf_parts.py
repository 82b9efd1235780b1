"""Tensors of a GGUF file that hold a CausalLM's otherwise: other rows, other shapes, other numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, cat, empty

from ..file_errors import excerpt


class Part(NamedTuple):
    """A layer's tensor by its state_dict name, and how it is made of the file's."""

    name: str
    make: Callable[[Tensor], Tensor] = lambda x: x
    rows: bool = False
    """It only chooses and moves rows, so that blocks of stored weights may take their places as well."""

    def shape(self, path: str | os.PathLike, tensor: str, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that it has, made of one of shape `stored`. Raises where that does not fit."""
        try:
            return tuple(self.make(empty(stored, device="meta")).shape)
        except (RuntimeError, IndexError) as error:
            raise ValueError(
                f"{path}: {excerpt(tensor)} has shape {list(stored)}, which its configuration does not fit; get the "
                "file again"
            ) from error


def log_decay(x: Tensor) -> Tensor:
    """A_log of a decay that is stored as -exp(A_log)."""
    return (-x).log()


def channels_first(x: Tensor) -> Tensor:
    """A convolution by channel, [channels, 1, taps], of one that is stored as [channels, taps]."""
    return x.unsqueeze(1)


def cut_heads(heads: int, sizes: tuple[int, ...], which: int) -> Callable[[Tensor], Tensor]:
    """Rows that lie head by head, as pieces of these sizes: piece `which` of all heads."""

    def make(x: Tensor) -> Tensor:
        whole = x.unflatten(0, (heads, sum(sizes)))
        return whole.narrow(1, sum(sizes[:which]), sizes[which]).reshape(heads * sizes[which], *x.shape[1:])

    return make


def group_heads(groups: int, heads: int, first: int = 0, dim: int = 0) -> Callable[[Tensor], Tensor]:
    """Heads group by group, as they share their keys, of those that are stored by turns: one of each group, then the
    next of each. The first numbers along the dim belong to no head."""

    def make(x: Tensor) -> Tensor:
        before, turns = x.split([first, x.shape[dim] - first], dim)
        by_turn = turns.unflatten(dim, (heads // groups, groups, -1))
        return cat([before, by_turn.transpose(dim, dim + 1).reshape(turns.shape)], dim)

    return make
