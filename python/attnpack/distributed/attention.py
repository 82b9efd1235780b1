"""Context parallelism: attention over a sequence that is dealt out over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import ops, signatures
from ..errors import wrong_kind
from .agreement import agree, hash_of
from .block_attention import Rules
from .collectives import Group, as_group
from .gathered import attend_gathered
from .layouts import check_layout, pieces
from .ring import RingAttention
from .ulysses import attend_ulysses


def _ring(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, key, value, rules, group, layout = arguments
    return RingAttention.apply(query, key, value, rules.sinks, rules, group, layout)


class SplitRules(signatures.Rules, total=False):
    """Keywords of `attention`."""

    kv_lens: Tensor | None


METHODS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "allgather": attend_gathered,
    "ulysses": attend_ulysses,
    "ring": _ring,
}


@overload
def attention(query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = False,
              group: Group = None, method: str = "allgather", layout: str = "contiguous",
              **rules: Unpack[SplitRules]) -> Tensor: ...  # fmt: skip
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True],
              group: Group = None, method: str = "allgather", layout: str = "contiguous",
              **rules: Unpack[SplitRules]) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool,
              group: Group = None, method: str = "allgather", layout: str = "contiguous",
              **rules: Unpack[SplitRules]) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@signatures.spelled_out(SplitRules)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group = None,
    method: str = "allgather",
    layout: str = "contiguous",
    return_lse: bool = False,
    **rules: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attnpack.attention` over a sequence that is sharded over the ranks; differentiable.

    Args:
        query: [B, Hq, Lq / ranks, D], key: [B, Hkv, Lkv / ranks, D], value: [B, Hkv, Lkv / ranks, Dv], this rank's
            part, as `shard_sequence` deals it out. Each row and key has its position in the whole sequence.
        group: a process group, a DeviceMesh of one dim, or None for all processes.
        method: "allgather" (every rank gets all kv heads; no more of them than num_kv_heads travel), "ulysses" (ranks
            exchange parts of the sequence for heads) or "ring" (keys travel piece by piece while ranks compute; a rank
            holds two pieces at a time).
        layout: "contiguous", or "zigzag": equal work for every rank in causal attention.
        kv_lens: [B], valid keys of the whole sequences; the same on all ranks.

    The other arguments are those of `attnpack.attention`, the same on all ranks. sinks' gradient is this rank's share:
    its sum over the ranks is that of one process, as for the weights of a model under context parallelism.

    Returns:
        out [B, Hq, Lq / ranks, Dv], or (out, lse [B, Hq, Lq / ranks]): the rows of this rank.

    Raises:
        ValueError: a tensor or a rule does not fit on one of the ranks, or differs between them: all ranks raise. Mask,
            dropout_p, q_offset, and a method or layout that does not exist are refused before the ranks compare:
            where only one rank gives such an argument, the others wait for it until the group's timeout.
        RuntimeError: another process died, or did not come within the group's timeout.
    """
    query_scale = rules.pop("query_scale", None)
    of_parts = {name: rules.pop(name) for name in Rules.__dataclass_fields__ if name in rules}
    refuse(rules)
    check_method(method)
    check_layout(layout)
    _check_kinds(query=query, key=key, value=value)
    group = as_group(group)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    query = ops.scale_queries(query, query_scale)
    placed = Rules(**of_parts)
    agree_on(query, key, value, placed, group, method, layout)
    out, lse = METHODS[method](query, key, value, placed, group, layout)
    return (out, lse) if return_lse else out


def _check_kinds(**tensors: Any) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.is_nested:
            raise wrong_kind(name, x, "a padded tensor [batch, heads, length, head_dim]: this rank's part")
        if isinstance(x, DTensor):
            raise wrong_kind(name, x, "a plain tensor: this rank's part, .to_local() of a DTensor")


def check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"attnpack: method: got {method!r}, want 'allgather', 'ulysses' or 'ring'")


def refuse(given: dict[str, Any]) -> None:
    """Raises for arguments of the operator that context parallelism does not have."""
    why = {
        "mask": "each rank would need its rows of it: use causal, window or kv_lens",
        "dropout_p": "each rank would draw other numbers than one process: train without it",
        "q_offset": "rows have the positions that the layout gives them: leave it out",
    }
    for name, value in given.items():
        if name not in why:
            raise TypeError(f"attnpack: attention() has no argument {name!r}: see attnpack.distributed.attention")
        if value is not None and not (name == "dropout_p" and value == 0):
            shape = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"attnpack: {name}: got {shape}, which is not done over several processes; {why[name]}")


def _check(query: Tensor, key: Tensor, value: Tensor, rules: Rules, group: dist.ProcessGroup, layout: str) -> None:
    """Lets the operator judge the arguments, with no row to compute, before any collective."""
    for name, x in (("query", query), ("key", key)):
        if x.dim() == 4:
            pieces(layout, x.size(2), group.size(), group.rank(), name)
    lens, kv_len = rules.kv_lens, key.size(2) * group.size() if key.dim() == 4 else 0
    if lens is not None and lens.device.type == "cpu" and lens.numel():
        low, high = int(lens.min()), int(lens.max())
        if low < 0 or high > kv_len:
            raise ValueError(
                f"attnpack: kv_lens: got values from {low} to {high}, want 0 to {kv_len}, the length of the whole "
                "sequence: give the valid keys of all ranks together"
            )
    local = None if lens is None else lens.clamp(0, key.size(2))
    rows = query.detach()[:, :, :0] if query.dim() == 4 else query
    ops.attention(rows, key.detach(), value.detach(), **(vars(rules) | {"kv_lens": local}))


def agree_on(
    query: Tensor, key: Tensor, value: Tensor, rules: Rules, group: dist.ProcessGroup, method: str, layout: str
) -> None:
    """Raises on every rank if an argument does not fit on one of them, or differs between them."""
    failed = None
    try:
        _check(query, key, value, rules, group, layout)
    except Exception as error:
        failed = error
    lens = rules.kv_lens
    held = None if lens is None or lens.device.type != "cpu" else hash_of(str(lens.tolist()).encode())
    agree(
        "attention", group, query.device, error=failed, query=query, key=key, value=value, method=method, layout=layout,
        **vars(rules), lens=held,
    )  # fmt: skip
    if failed is not None:
        raise failed
