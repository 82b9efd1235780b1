"""How a sequence is dealt out over the ranks of a group.

"contiguous": rank r of R has the r-th of R equal pieces. "zigzag": it has the r-th and the r-th last of 2 R equal
pieces, so that causal attention is the same work for every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import wrong_kind
from .agreement import agree
from .collectives import Group, as_group


def shard_sequence(x: Tensor, group: Group = None, *, dim: int = 1, layout: str = "contiguous") -> Tensor:
    """This rank's part of x, a copy: for example x [B, L, E] -> [B, L / ranks, E].

    Args:
        x: the whole, the same on all ranks; its length along `dim` divides by the ranks (by twice the ranks if zigzag).
        group: a process group, a DeviceMesh of one dim, or None for all processes.
        layout: "contiguous", or "zigzag" for causal attention: equal work for every rank.

    Raises ValueError if the length does not divide.
    """
    _check_kind(x, "the whole sequence")
    return torch.ops.attnpack.shard_sequence(x, as_group(group).group_name, dim, layout)


def unshard_sequence(x: Tensor, group: Group = None, *, dim: int = 1, layout: str = "contiguous") -> Tensor:
    """The whole sequence, on every rank, from the parts x of all ranks: the inverse of `shard_sequence`.

    Its backward takes each rank's own part of the gradient: compute the same loss from the whole on all ranks.

    On the CPU it raises ValueError, on every rank, if parts differ in shape or dtype.
    """
    _check_kind(x, "the part of this rank")
    group = as_group(group)
    agree("unshard_sequence", group, x.device, dim=dim, layout=layout, x=x)
    return torch.ops.attnpack.unshard_sequence(x, group.group_name, dim, layout, True)


def _check_kind(x: Any, of: str) -> None:
    if not isinstance(x, Tensor):
        raise wrong_kind("x", x, f"a tensor, {of}: call torch.as_tensor() on it")
