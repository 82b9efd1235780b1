"""Context parallelism: attention over a sequence that is dealt out over the ranks of a group."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _C, ops, signatures
from ..errors import wrong_kind
from .collectives import Group, as_group


class SplitRules(signatures.Rules, total=False):
    """Keywords of `attention`."""

    kv_lens: Tensor | None


_KEYWORDS = frozenset(SplitRules.__annotations__)
_REFUSED = frozenset({"mask", "q_offset", "key_index", "key_block"})  # in words of C++, at which a graph stops


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
@signatures.spelled_out(SplitRules, torch.ops.attnpack.context_attention)
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
    """`attnpack.attention` over a sequence that is sharded over the ranks; differentiable, twice but for a ring.

    Args:
        query: [B, Hq, Lq / ranks, D], key: [B, Hkv, Lkv / ranks, D], value: [B, Hkv, Lkv / ranks, Dv], this rank's
            part, as `shard_sequence` deals it out. Each row and key has its position in the whole sequence.
        group: a process group, a DeviceMesh of one dim, or None for all processes.
        method: "allgather" (every rank gets all kv heads; no more of them than num_kv_heads travel), "ulysses" (ranks
            exchange parts of the sequence for heads) or "ring" (keys travel piece by piece while ranks compute; a rank
            holds two pieces at a time).
        layout: "contiguous", or "zigzag": equal work for every rank in causal attention.
        kv_lens: [B], valid keys of the whole sequences; the same on all ranks.
        query_scale: [Lq / ranks] or [B, Lq / ranks], factors of this rank's queries.

    The other arguments are those of `attnpack.attention`, the same on all ranks. sinks' gradient is this rank's share:
    its sum over the ranks is that of one process, as for the weights of a model under context parallelism.

    Returns:
        out [B, Hq, Lq / ranks, Dv], or (out, lse [B, Hq, Lq / ranks]): the rows of this rank.

    Raises:
        ValueError: a tensor or a rule does not fit on one of the ranks, or differs between them: all ranks raise. Mask,
            dropout_p, q_offset, key_index, and a method or layout that does not exist are refused before the ranks
            compare: where only one rank gives such an argument, the others wait for it until the group's timeout.
        RuntimeError: another process died, or did not come within the group's timeout.
    """
    _check_kinds(query=query, key=key, value=value)
    place = (as_group(group).group_name, method, layout)
    if torch.compiler.is_compiling():
        ops.check_keywords("attention", rules, _KEYWORDS | _REFUSED)
    if not torch.compiler.is_compiling() or any(name in _REFUSED for name in rules):
        return _C.distributed.attention(query, key, value, *place, return_lse, rules)
    query, flat = ops.flat_rules(query, rules)
    out, lse = torch.ops.attnpack.context_attention(query, key, value, *place, **flat)
    return (out, lse) if return_lse else out


def _check_kinds(**tensors: Any) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.is_nested:
            raise wrong_kind(name, x, "a padded tensor [batch, heads, length, head_dim]: this rank's part")
        if isinstance(x, DTensor):
            raise wrong_kind(name, x, "a plain tensor: this rank's part, .to_local() of a DTensor")
