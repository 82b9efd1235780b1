"""Attention between pieces of one sequence: the operator's rules at the places that the pieces have in the whole.

B batch, Hq / Hkv query / kv heads, D / Dv head dims of keys and values. A piece is the `range` of its positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import ops


@dataclass(frozen=True)
class Rules:
    """The arguments of `attnpack.attention` that do not depend on a piece; kv_lens are those of the whole sequence."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    head_map: tuple[int, ...] | None = None
    scale: float | None = None
    kv_lens: Tensor | None = None

    def __post_init__(self) -> None:
        """Lists, which callers may change, become tuples."""
        for name in ("window", "head_map"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))

    def of_heads(self, heads: Sequence[int], head_map: tuple[int, ...] | None) -> Rules:
        """These rules for some query heads, with the map of their kv heads."""
        index = slice(heads[0], heads[-1] + 1) if heads else slice(0)
        sinks, slopes = (x if x is None else x[index] for x in (self.sinks, self.alibi_slopes))
        return replace(self, sinks=sinks, alibi_slopes=slopes, head_map=head_map)

    def sees(self, rows: range, keys: range) -> bool:
        """Whether any row may attend any of the keys, as far as positions say."""
        left, right = self.window
        last = rows.stop - 1 if self.causal else rows.stop - 1 + right if right >= 0 else keys.start
        first = rows.start - left if left >= 0 else keys.stop - 1
        return bool(rows) and bool(keys) and keys.start <= last and keys.stop - 1 >= first

    def _lens(self, keys: range) -> Tensor | None:
        return None if self.kv_lens is None else (self.kv_lens - keys.start).clamp(0, len(keys))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rows: range, keys: range) -> tuple[Tensor, Tensor]:
        """(out [B, Hq, rows, Dv], lse [B, Hq, rows]) of query rows over keys at their positions."""
        place = {"q_offset": rows.start - keys.start, "kv_lens": self._lens(keys)}
        return ops.attention(query, key, value, **(vars(self) | place), return_lse=True)

    def attend_backward(
        self, grads: tuple[Tensor, Tensor | None], heads: tuple[Tensor, ...], rows: range, keys: range
    ) -> tuple[Tensor, ...]:
        """Gradients of (query, key, value, sinks) from keys that are a part of all: heads are query, key, value of the
        parts, and out and lse over all keys."""
        whole = self.backward_of_kernel if heads[0].is_cpu else self.backward_of_parts
        return whole(grads, heads, rows, keys)

    def backward_of_kernel(
        self, grads: tuple[Tensor, Tensor | None], heads: tuple[Tensor, ...], rows: range, keys: range
    ) -> tuple[Tensor, ...]:
        """By the CPU's kernel, which takes what all keys of a row share from out and lse where sinks are given. So
        there are always some: a sink of -inf has no share of its own."""
        sinks = heads[0].new_full((heads[0].size(1),), -math.inf) if self.sinks is None else self.sinks
        place = {"q_offset": rows.start - keys.start, "kv_lens": self._lens(keys)}
        _, flat = ops.flat_rules(heads[0], vars(self) | place | {"sinks": sinks})
        query, key, value, _, grad_sinks = torch.ops.attnpack.attention_backward(
            *grads, *heads, **flat, sinks_gradient=self.sinks is not None
        )
        return query, key, value, grad_sinks

    @torch.enable_grad()
    def backward_of_parts(
        self, grads: tuple[Tensor, Tensor | None], heads: tuple[Tensor, ...], rows: range, keys: range
    ) -> tuple[Tensor, ...]:
        """By the derivative of the join, for any device: a part with lse p of all keys' lse weighs exp(p - lse)."""
        query, key, value, out, lse = heads
        given = [query, key, value] if self.sinks is None else [query, key, value, self.sinks]
        leaves = [x.detach().requires_grad_() for x in given]
        own = self if self.sinks is None else replace(self, sinks=leaves[3])
        part, part_lse = own.attend(*leaves[:3], rows, keys)
        weight = (part_lse - lse).exp().masked_fill(part_lse.isinf(), 0).detach().unsqueeze(-1)
        exact = weight.dtype
        grad_out = grads[0].to(exact)
        grad_lse = (grad_out * (part.detach().to(exact) - out.to(exact))).sum(-1, keepdim=True)
        if grads[1] is not None:
            grad_lse = grad_lse + grads[1].unsqueeze(-1)
        found = torch.autograd.grad(
            (part, part_lse), leaves, ((weight * grad_out).to(part.dtype), (weight * grad_lse).squeeze(-1))
        )
        return found if self.sinks is not None else (*found, None)
