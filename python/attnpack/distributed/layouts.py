"""How a sequence is dealt out over the ranks of a group.

"contiguous": rank r of R has the r-th of R equal pieces. "zigzag": it has the r-th and the r-th last of 2 R equal
pieces, so that causal attention is the same work for every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .agreement import agree
from .collectives import Gathered, Group, as_group

LAYOUTS = ("contiguous", "zigzag")


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"attnpack: layout: got {layout!r}, want 'contiguous' or 'zigzag'")


def pieces(layout: str, length: int, ranks: int, rank: int, name: str = "x") -> list[range]:
    """The positions in the whole sequence of a rank's `length` rows, piece by piece; `name` is that of the rows."""
    check_layout(layout)
    if layout == "contiguous":
        return [range(rank * length, (rank + 1) * length)]
    if length % 2:
        raise ValueError(
            f"attnpack: {name}: got {length} positions on a rank, want an even number for the layout 'zigzag', which "
            "gives each rank two pieces: pad the sequence and pass kv_lens, or take the layout 'contiguous'"
        )
    half = length // 2
    last = 2 * ranks - 1 - rank
    return [range(rank * half, (rank + 1) * half), range(last * half, (last + 1) * half)]


def positions(layout: str, length: int, ranks: int, rank: int, device: torch.device | None = None) -> Tensor:
    """The positions [length] in the whole sequence of a rank's rows."""
    own = pieces(layout, length, ranks, rank)
    return torch.cat([torch.arange(piece.start, piece.stop, device=device) for piece in own])


def whole_order(layout: str, length: int, ranks: int, device: torch.device | None = None) -> Tensor | None:
    """Where each position of the whole sequence is among the rows of all ranks, rank after rank, [ranks * length]; None
    if they are in order."""
    if layout == "contiguous":
        return None
    return rank_order(layout, length, ranks, device).argsort()


def rank_order(layout: str, length: int, ranks: int, device: torch.device | None = None) -> Tensor:
    """The positions of the rows of all ranks, rank after rank, [ranks * length]."""
    return torch.cat([positions(layout, length, ranks, rank, device) for rank in range(ranks)])


def shard_sequence(x: Tensor, group: Group = None, *, dim: int = 1, layout: str = "contiguous") -> Tensor:
    """This rank's part of x, a copy: for example x [B, L, E] -> [B, L / ranks, E].

    Args:
        x: the whole, the same on all ranks; its length along `dim` divides by the ranks (by twice the ranks if zigzag).
        group: a process group, a DeviceMesh of one dim, or None for all processes.
        layout: "contiguous", or "zigzag" for causal attention: equal work for every rank.

    Raises ValueError if the length does not divide.
    """
    group = as_group(group)
    check_layout(layout)
    parts = group.size() * (2 if layout == "zigzag" else 1)
    if x.size(dim) % parts:
        raise ValueError(
            f"attnpack: x: got length {x.size(dim)} along dim {dim}, want a multiple of {parts} for {group.size()} "
            f"ranks in the layout {layout!r}: pad it, and pass kv_lens"
        )
    own = pieces(layout, x.size(dim) // group.size(), group.size(), group.rank())
    return torch.cat([x.narrow(dim, piece.start, len(piece)) for piece in own], dim)


def unshard_sequence(x: Tensor, group: Group = None, *, dim: int = 1, layout: str = "contiguous") -> Tensor:
    """The whole sequence, on every rank, from the parts x of all ranks: the inverse of `shard_sequence`.

    Its backward takes each rank's own part of the gradient: compute the same loss from the whole on all ranks.

    On the CPU it raises ValueError, on every rank, if parts differ in shape or dtype.
    """
    group = as_group(group)
    own = pieces(layout, x.size(dim), group.size(), group.rank())  # checks
    assert sum(map(len, own)) == x.size(dim)
    agree("unshard_sequence", group, x.device, dim=dim, layout=layout, x=x)
    whole = Gathered.apply(x.movedim(dim, 0), group, True)
    order = whole_order(layout, x.size(dim), group.size(), x.device)
    return (whole if order is None else whole.index_select(0, order)).movedim(0, dim)
