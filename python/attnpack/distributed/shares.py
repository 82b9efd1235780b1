"""Which share of each parameter a rank has under tensor parallelism, by the kind of module.

A unit is a module that computes on this rank's shares: attention, a feed-forward, an embedding, a head. Rows of q, k
and v, and the columns of o, are shared by heads; kv heads that do not divide stay whole, and a rank reads the rows of
the heads that its query heads read.
"""

from __future__ import annotations

from collections.abc import Callable
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


def plan_of(module: nn.Module, ranks: int, rank: int) -> Plan | None:
    """The plan of a module that has shares; None for one that every rank runs whole.

    Raises ValueError if it cannot be shared.
    """
    for kind, plan in _PLANS.items():
        if isinstance(module, kind):
            made = plan(module, ranks, rank)
            for name in dict(module.named_parameters()):
                if name not in made.parameters:
                    raise ValueError(
                        f"attnpack: {type(module).__name__} has a parameter {name!r}, which tensor_parallel "
                        "does not know how to shard: call it before layers are wrapped, or leave this module out"
                    )
            return made
    return None


def _linear(name: str, weight: Share, bias: Share | None = None) -> dict[str, Share]:
    return {f"{name}.weight": weight, f"{name}.bias": weight if bias is None else bias}


def _joined(name: str) -> dict[str, Share]:
    return _linear(name, Share(ROWS), Share(added_last=True))


def _low_rank_queries() -> dict[str, Share]:
    whole = Share(summed=True)
    return _linear("q_a_proj", whole) | {"q_a_layernorm.weight": whole} | _linear("q_b_proj", Share(COLUMNS))


def _heads_of_rank(module: nn.Module, ranks: int, rank: int) -> range:
    if module.num_heads % ranks:
        raise ValueError(
            f"attnpack: num_heads: got {module.num_heads} heads of {type(module).__name__} for {ranks} ranks, want a "
            "number that the ranks divide: take a mesh of fewer ranks"
        )
    return range(*_C.distributed.share_of(module.num_heads, ranks, rank))


def _grouped(module: GroupedQueryAttention, ranks: int, rank: int) -> Plan:
    heads, dim, kv_heads = _heads_of_rank(module, ranks, rank), module.head_dim, module.num_kv_heads
    if getattr(module.q_norm, "dim", dim) != dim:
        raise ValueError(
            f"attnpack: qk_norm: got a norm over all {module.num_heads} heads, of which a rank has a share, want one "
            "over head_dim: share this model's batch or sequences instead (FSDP2, context_parallel)"
        )
    read, local_map = _C.distributed.kv_heads_of(heads.start, heads.stop, module.num_heads, kv_heads, module.head_map)
    if module.head_map is None and kv_heads % ranks == 0:
        kv = Share(COLUMNS)
    else:
        kv = Share(summed=True, rows=tuple(head * dim + i for head in read for i in range(dim)))
    return Plan(
        _linear("q_proj", Share(COLUMNS))
        | _low_rank_queries()
        | _linear("gate_proj", Share(COLUMNS))
        | _linear("k_proj", kv)
        | _linear("v_proj", kv)
        | _joined("o_proj")
        | {"sinks": Share(COLUMNS), "q_norm.weight": Share(summed=True), "k_norm.weight": Share(summed=True)},
        {
            "num_heads": len(heads),
            "num_kv_heads": len(read),
            "head_map": local_map,
            "_slopes": module._slopes[heads.start : heads.stop],
        },
        heads,
        module.num_heads,
    )


def _latent(module: MultiHeadLatentAttention, ranks: int, rank: int) -> Plan:
    heads, whole = _heads_of_rank(module, ranks, rank), Share(summed=True)
    shares = _linear("q_proj", Share(COLUMNS)) | _low_rank_queries() | _linear("gate_proj", Share(COLUMNS))
    shares |= _linear("kv_b_proj", Share(COLUMNS)) | _joined("o_proj") | _linear("kv_a_proj_with_mqa", whole)
    shares["kv_a_layernorm.weight"] = whole
    return Plan(shares, {"num_heads": len(heads)}, heads, module.num_heads)


def _feed_forward(module: FeedForward, ranks: int, rank: int) -> Plan:
    columns = Share(COLUMNS)
    return Plan(_linear("gate_proj", columns) | _linear("up_proj", columns) | _joined("down_proj"))


_PLANS: dict[type, Callable[[Any, int, int], Plan]] = {
    GroupedQueryAttention: _grouped,
    MultiHeadLatentAttention: _latent,
    FeedForward: _feed_forward,
}


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
