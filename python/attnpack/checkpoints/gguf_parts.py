"""Tensors of a GGUF file that hold a CausalLM's otherwise: other rows, other shapes, other numbers, or several of them
as one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, cat

from ..file_errors import excerpt


@dataclass(frozen=True)
class Recipe:
    """How tensors of a layer, by their state_dict names, are made of tensors of the file, all at once. Names come
    without the number of the layer."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    make: Callable[..., Sequence[Tensor]]
    rows: bool = False
    """Whether it only chooses and moves rows of one source: then it can do so with blocks of stored weights."""

    def shapes(
        self, path: str | os.PathLike, names: Sequence[str], stored: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, ...]]:
        """The shapes of the targets, made of sources of that name in the file and of these shapes. Raises where they do
        not fit."""
        try:
            return [tuple(made.shape) for made in self.make(*(torch.empty(s, device="meta") for s in stored))]
        except (RuntimeError, IndexError) as error:
            given = ", ".join(f"{excerpt(n)} has shape {list(s)}" for n, s in zip(names, stored, strict=True))
            raise ValueError(f"{path}: {given}, which its configuration does not fit; get the file again") from error


def one(source: str, target: str, make: Callable[[Tensor], Tensor] = lambda x: x, rows: bool = False) -> Recipe:
    """A recipe that makes one tensor of one source."""
    return Recipe((source,), (target,), lambda x: (make(x),), rows)


def log_decay(x: Tensor) -> Tensor:
    """A_log of a decay that is stored as -exp(A_log)."""
    return (-x).log()


def channels_first(x: Tensor) -> Tensor:
    """A convolution by channel, [channels, 1, taps], of one that is stored as [channels, taps], or that with dims of
    1."""
    return x.reshape(-1, 1, x.shape[-1])


def cut_heads(heads: int, *sizes: int) -> Callable[[Tensor], list[Tensor]]:
    """Rows that lie head by head, as pieces of these sizes: each piece of all heads."""

    def make(x: Tensor) -> list[Tensor]:
        whole = x.unflatten(0, (heads, sum(sizes)))
        return [piece.reshape(-1, *x.shape[1:]) for piece in whole.split(sizes, 1)]

    return make


def group_heads(groups: int, heads: int, first: int = 0, dim: int = 0) -> Callable[[Tensor], Tensor]:
    """Heads group by group, as they share their keys, of those that are stored by turns: one of each group, then the
    next of each. The first numbers along the dim belong to no head."""

    def make(x: Tensor) -> Tensor:
        before, turns = x.split([first, x.shape[dim] - first], dim)
        by_turn = turns.unflatten(dim, (heads // groups, groups, -1))
        return cat([before, by_turn.transpose(dim, dim + 1).reshape(turns.shape)], dim)

    return make


def latent_heads(keys: Tensor, values: Tensor) -> list[Tensor]:
    """kv_b_proj of a file that holds its two halves for absorbed heads: W_UK [heads, rank, qk_nope_head_dim] and W_UV
    [heads, v_head_dim, rank]."""
    return [cat([keys.transpose(1, 2), values], 1).flatten(0, 1)]
