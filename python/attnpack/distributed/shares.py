"""Which share of each parameter a rank has under tensor parallelism, by the kind of module.

A unit is a module that computes on this rank's shares: attention, a feed-forward, an embedding, a head. Rows of q, k
and v, and the columns of o, are shared by heads; kv heads that do not divide stay whole, and a rank reads the rows of
the heads that its query heads read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .. import _C
from ..nn.attention import GroupedQueryAttention, MultiHeadLatentAttention
from ..nn.feed_forward import FeedForward

COLUMNS, ROWS, WHOLE = Shard(0), Shard(1), Replicate()  # of a linear layer's outputs and inputs


@dataclass(frozen=True)
class Share:
    """How a rank gets a parameter for its call."""

    placement: Placement = WHOLE
    summed: bool = False
    """Every rank reads the whole for its own heads: the gradient is the sum over the ranks."""
    rows: tuple[int, ...] | None = None
    """The rows of the whole that this rank reads."""
    added_last: bool = False
    """A bias that is added after the sum over the ranks."""


@dataclass(frozen=True)
class Plan:
    """How a unit runs on one rank."""

    parameters: dict[str, Share]
    settings: dict[str, Any] = field(default_factory=dict)
    """Attributes of the module during a call: those of this rank's heads."""
    heads: range | None = None
    num_heads: int = 0


_KINDS = (GroupedQueryAttention, MultiHeadLatentAttention, FeedForward)


def plan_of(module: nn.Module, ranks: int, rank: int) -> Plan | None:
    """The plan of a module that has shares; None for one that every rank runs whole.

    Raises ValueError if it cannot be shared. Which part of which parameter a rank has is a list of C++.
    """
    kind = next((kind for kind in _KINDS if isinstance(module, kind)), None)
    if kind is None:
        return None
    owner, names = type(module).__name__, [name for name, _ in module.named_parameters(remove_duplicate=False)]
    shares = {
        "outputs": Share(COLUMNS),
        "inputs": Share(ROWS),
        "added": Share(added_last=True),
        "whole": Share(summed=True),
    }
    heads, settings = None, {}
    if kind is not FeedForward:
        _C.distributed.check_heads(owner, module.num_heads, ranks)
        heads = range(*_C.distributed.share_of(module.num_heads, ranks, rank))
        settings["num_heads"] = len(heads)
    if kind is GroupedQueryAttention:
        shares["keys"], of_heads = _keys_and_settings(module, heads, ranks)
        settings |= of_heads
    parts = _C.distributed.parts_of(kind.__name__, owner, names)
    parameters = {name: shares[part] for name, part in zip(names, parts, strict=True)}
    return Plan(parameters, settings, heads, 0 if heads is None else module.num_heads)


def _keys_and_settings(module: GroupedQueryAttention, heads: range, ranks: int) -> tuple[Share, dict[str, Any]]:
    """The share of k_proj and v_proj, and the module's attributes for this rank's heads."""
    dim, kv_heads = module.head_dim, module.num_kv_heads
    _C.distributed.check_norm_of_heads(getattr(module.q_norm, "dim", dim) != dim, module.num_heads)
    read, local_map = _C.distributed.kv_heads_of(heads.start, heads.stop, module.num_heads, kv_heads, module.head_map)
    if module.head_map is None and kv_heads % ranks == 0:
        keys = Share(COLUMNS)
    else:
        keys = Share(summed=True, rows=tuple(head * dim + i for head in read for i in range(dim)))
    slopes = module._slopes[heads.start : heads.stop]
    return keys, {"num_kv_heads": len(read), "head_map": local_map, "_slopes": slopes}


def rows_of(size: int, ranks: int, rank: int) -> range:
    """The rows of a rank where DTensors divide `size` rows: pieces of one size, the last ones shorter or empty."""
    each = -(-size // ranks)
    return range(min(rank * each, size), min((rank + 1) * each, size))


def shared_like(whole: Tensor, parameter: DTensor) -> DTensor:
    """A tensor that all ranks have, with the placements of a parameter. No rank sends anything.

    fully_shard, whose dims of the mesh come first, divides the rows that tensor parallelism has left to a rank.
    """
    mesh, local = parameter.device_mesh, whole
    for dim in reversed(range(mesh.ndim)):
        placement = parameter.placements[dim]
        if not placement.is_replicate():
            rows = rows_of(local.size(placement.dim), mesh.size(dim), mesh.get_local_rank(dim))
            local = local.narrow(placement.dim, rows.start, len(rows))
    sizes = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(local.contiguous(), mesh, parameter.placements, run_check=False, **sizes)


def tensor_of(parameter: Tensor) -> Tensor:
    """This rank's share of a DTensor, with a gradient that reaches it; another tensor as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def select_rows(x: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Rows of x; a view if they are consecutive."""
    if rows == tuple(range(rows[0], rows[0] + len(rows))):
        return x.narrow(0, rows[0], len(rows))
    return x.index_select(0, torch.tensor(rows, device=x.device))
