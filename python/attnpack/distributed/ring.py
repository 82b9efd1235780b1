"""Context parallelism by a ring (Ring Attention, Liu et al. 2023): keys and values pass from rank to rank, one piece at
a time, while each rank attends over the piece that it has.

Partial results are joined by their lse in fp32. Backward passes the pieces round once more, and their gradients with
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import ops
from .block_attention import Rules
from .collectives import pass_on
from .layouts import pieces


class RingAttention(torch.autograd.Function):
    """(out, lse) of this rank's rows; sinks is a tensor of its own here, for its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        rules: Rules,
        group: dist.ProcessGroup,
        layout: str,
    ) -> tuple[Tensor, Tensor]:
        rules = replace(rules, sinks=sinks)
        exact = torch.promote_types(query.dtype, torch.float32)
        ring = _Ring(query, key, group, layout)
        states: dict[range, tuple[Tensor, Tensor]] = {}
        for source, both in ring.rounds(torch.cat([key, value], -1)):
            for rows, q, keys, kv, first in ring.pairs(query, both, source, rules):
                k, v = kv.split([key.size(-1), value.size(-1)], -1)
                out, lse = (rules if first else replace(rules, sinks=None)).attend(q, k, v, rows, keys)
                state = (out.to(exact), lse)
                states[rows] = state if first else ops.merge_states(*states[rows], *state)
        outs, lses = zip(*(states[rows] for rows in ring.rows), strict=True)
        out, lse = torch.cat(outs, 2).to(query.dtype), torch.cat(lses, 2)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.rules, ctx.ring = rules, ring
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        rules, ring = replace(ctx.rules, sinks=sinks), ctx.ring
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        exact = torch.promote_types(query.dtype, torch.float32)
        grad_query = torch.zeros_like(query, dtype=exact)
        grad_sinks = None
        both = torch.cat([key, value], -1)
        grad_both = torch.zeros_like(both, dtype=exact)
        arriving = None
        for source, held in ring.rounds(both):
            grad_held = torch.zeros_like(held, dtype=exact)
            for rows, q, keys, kv, first in ring.pairs(query, held, source, rules):
                k, v = kv.split([key.size(-1), value.size(-1)], -1)
                here = ring.local(rows)
                grads = (grad_out[:, :, here], None if grad_lse is None else grad_lse[:, :, here])
                heads = (q, k, v, out[:, :, here], lse[:, :, here])
                part = (rules if first else replace(rules, sinks=None)).attend_backward(grads, heads, rows, keys)
                grad_query[:, :, here] += part[0]
                grad_held[:, :, ring.local(keys, source)] += torch.cat(part[1:3], -1)
                if first and sinks is not None:
                    grad_sinks = part[3] if grad_sinks is None else grad_sinks + part[3]
            if arriving is not None:
                grad_held += arriving()  # what the ranks before added to this piece's gradient
            arriving = pass_on(grad_held, ring.group)
        grad_both = arriving()
        grad_key, grad_value = grad_both.to(key.dtype).split([key.size(-1), value.size(-1)], -1)
        return grad_query.to(query.dtype), grad_key, grad_value, grad_sinks, None, None, None


class _Ring:
    """Who has which piece when."""

    def __init__(self, query: Tensor, key: Tensor, group: dist.ProcessGroup, layout: str) -> None:
        self.group, self.layout, self.kv_len = group, layout, key.size(2)
        self.rows = pieces(layout, query.size(2), group.size(), group.rank(), "query")
        self.places = [pieces(layout, key.size(2), group.size(), rank, "key") for rank in range(group.size())]

    def rounds(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank that a piece comes from, piece), the own one first; the next piece travels meanwhile."""
        ranks, rank = self.group.size(), self.group.rank()
        held = own
        for step in range(ranks):
            coming = pass_on(held, self.group) if step + 1 < ranks else None
            yield (rank - step) % ranks, held
            if coming is not None:
                held = coming()

    def pairs(
        self, query: Tensor, both: Tensor, source: int, rules: Rules
    ) -> Iterator[tuple[range, Tensor, range, Tensor, bool]]:
        """(rows, their query, keys, their key and value, whether the rows attend for the first time) of each pair of
        pieces that see each other. Rows attend for the first time to the keys at their own place, even if they see none
        of them: so every row has a state, and sinks join it once."""
        own = source == self.group.rank()
        for i, rows in enumerate(self.rows):
            for j, keys in sorted(enumerate(self.places[source]), key=lambda place: place[0] != i):
                first = own and i == j
                if first or rules.sees(rows, keys):
                    yield rows, query[:, :, self.local(rows)], keys, both[:, :, self.local(keys, source)], first

    def local(self, piece: range, source: int | None = None) -> slice:
        """Where a piece is among the rows, or the keys of a rank."""
        start = 0
        for each in self.rows if source is None else self.places[source]:
            if each == piece:
                break
            start += len(each)
        return slice(start, start + len(piece))
