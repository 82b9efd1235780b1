"""Context parallelism by gathering: every rank has all compact kv heads, and attends with its own rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .block_attention import Rules
from .collectives import Gathered
from .layouts import pieces, whole_order


def gather_sequence(x: Tensor, group: dist.ProcessGroup, layout: str) -> Tensor:
    """All positions of x [B, H, n, D] as [B, H, ranks * n, D], in order. Its gradient is summed over the ranks."""
    rows = Gathered.apply(x.permute(2, 0, 1, 3), group, False)
    order = whole_order(layout, x.size(2), group.size(), x.device)
    return (rows if order is None else rows.index_select(0, order)).permute(1, 2, 0, 3)


def attend_gathered(
    query: Tensor, key: Tensor, value: Tensor, rules: Rules, group: dist.ProcessGroup, layout: str
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's rows: keys and values of all ranks come in one collective."""
    both = gather_sequence(torch.cat([key, value], -1), group, layout)
    key, value = both.split([key.size(-1), value.size(-1)], -1)
    return attend_rows(query, key, value, rules, group, layout)


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, rules: Rules, group: dist.ProcessGroup, layout: str
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's rows over whole keys and values [B, Hkv, L, ...]."""
    own = pieces(layout, query.size(2), group.size(), group.rank(), "query")
    parts = query.split([len(piece) for piece in own], 2)
    results = [rules.attend(q, key, value, rows, range(key.size(2))) for q, rows in zip(parts, own, strict=True)]
    if len(results) == 1:
        return results[0]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)
