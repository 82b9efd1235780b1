"""Collectives of a process group, as torch's functional ops, each with its derivative.

`all_reduce` and `all_gather` are plain; `Copied`, `Summed`, `Gathered` and `Exchanged` are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import errors

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


@contextmanager
def explained(group: dist.ProcessGroup) -> Iterator[None]:
    """A context for collectives: says in words what an error of the backend means."""
    try:
        yield
    except RuntimeError as error:
        if str(error).startswith("attnpack:"):
            raise
        raise RuntimeError(
            f"attnpack: a collective of {group.size()} processes failed on rank {group.rank()}: another process died, "
            "called something else, or did not come within the group's timeout; results of this step are lost, so "
            f"start the processes again from a checkpoint ({error})"
        ) from error


def begin(op: Callable[..., Tensor], x: Tensor, *arguments: Any, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Starts a functional collective of x; the function returned waits for its result."""
    with explained(group):
        started = op(x.contiguous(), *arguments, group.group_name)

    def wait() -> Tensor:
        with explained(group):
            return torch.ops._c10d_functional.wait_tensor(started)

    return wait


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the x of all ranks."""
    return begin(torch.ops._c10d_functional.all_reduce, x, "sum", group=group)()


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:  # [n, ...] -> [ranks * n, ...]
    """The x of all ranks, one after the other."""
    return begin(torch.ops._c10d_functional.all_gather_into_tensor, x, group.size(), group=group)()


def pass_on(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begins to send x to the next rank; the function returned waits for the x of the rank before, of the same shape.
    Ranks stand in a ring."""
    ranks, rank = group.size(), group.rank()
    receive, send = [0] * ranks, [0] * ranks
    receive[(rank - 1) % ranks] = send[(rank + 1) % ranks] = x.numel()
    flat = begin(torch.ops._c10d_functional.all_to_all_single, x.reshape(-1), receive, send, group=group)
    return lambda: flat().view(x.shape)


class Copied(torch.autograd.Function):
    """x, which all ranks hold alike and use differently: its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class Summed(torch.autograd.Function):
    """The sum over the ranks, which all ranks use alike: the gradient of each part is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Gathered(torch.autograd.Function):
    """The parts [n, ...] of all ranks as [ranks * n, ...].

    If the ranks use the whole differently, a part's gradient is the sum over the ranks. If they use it alike, it is
    that of the part in any one of them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, alike: bool) -> Tensor:
        ctx.group, ctx.alike, ctx.size = group, alike, x.size(0)
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        group = ctx.group
        if ctx.alike:
            return grad.narrow(0, group.rank() * ctx.size, ctx.size), None, None
        op = torch.ops._c10d_functional.reduce_scatter_tensor
        return begin(op, grad, "sum", group.size(), group=group)(), None, None


class Exchanged(torch.autograd.Function):
    """Each rank's piece of x [n] for each other rank: send[r] numbers go to rank r, receive[r] come from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.receive, ctx.send = group, receive, send
        return _exchange(x, receive, send, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.send, ctx.receive, ctx.group), None, None, None


def _exchange(x: Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    op = torch.ops._c10d_functional.all_to_all_single
    return begin(op, x, list(receive), list(send), group=group)()
