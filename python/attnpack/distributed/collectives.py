"""Process groups, and collectives with their derivatives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _C, errors

if not hasattr(_C, "distributed"):
    raise ImportError(
        "attnpack.distributed: this build of attnpack has no process groups, want one with them: build it again "
        "without -DATTNPACK_DISTRIBUTED=OFF"
    )

Group = dist.ProcessGroup | DeviceMesh | None
"""A process group, a mesh of one dim, or None for all processes."""


def as_group(group: Group) -> dist.ProcessGroup:
    """The process group; raises if there is none, or if this process is not in it."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "attnpack: group: torch.distributed is not initialised, want a process group: call "
            "torch.distributed.init_process_group first"
        )
    if group is None:
        return dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"attnpack: group: got a mesh of {group.ndim} dims, want one: pass mesh['name']")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise errors.wrong_kind("group", group, "a process group, a DeviceMesh of one dim, or None for all processes")
    return group


def from_first(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rank 0's x, on all ranks. All give an x of this shape. No gradient."""
    return torch.ops.attnpack.copy_of_first_rank(x, group.group_name)


def copied(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x, which all ranks hold alike and use differently: its gradient is the sum over the ranks."""
    return torch.ops.attnpack.copy_to_ranks(x, group.group_name)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, which all ranks use alike: the gradient of each part is that of the sum."""
    return torch.ops.attnpack.sum_over_ranks(x, group.group_name)


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts [n, ...] of all ranks as [ranks * n, ...], which all ranks use alike: the gradient of a part is that of
    the part in any one of them."""
    return torch.ops.attnpack.gather_from_ranks(x, group.group_name, True)
