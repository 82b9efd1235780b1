"""Context parallelism by heads (DeepSpeed-Ulysses, Jacobs et al. 2023): ranks exchange their parts of the sequence for
shares of the heads, attend over the whole sequence, and exchange back.

A rank gets the query heads of its share, and the kv heads that these read. With fewer kv heads than ranks several ranks
get the same one: nothing is padded.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .block_attention import Rules
from .collectives import Exchanged
from .layouts import rank_order, whole_order


def share_of_heads(num_heads: int, ranks: int, rank: int) -> range:
    """The heads of a rank: consecutive, and as equal in number as can be."""
    return range(rank * num_heads // ranks, (rank + 1) * num_heads // ranks)


def kv_heads_of(heads: range, head_map: tuple[int, ...]) -> tuple[list[int], tuple[int, ...]]:
    """The kv heads that some query heads read, and the place of each head's kv head among them."""
    read = sorted({head_map[head] for head in heads})
    return read, tuple(read.index(head_map[head]) for head in heads)


def _select(x: Tensor, heads: list[int]) -> Tensor:
    """Heads of x [B, H, n, D]: a view if they are consecutive, as they are without a head_map."""
    if heads == list(range(heads[0], heads[0] + len(heads))) if heads else True:
        return x.narrow(1, heads[0] if heads else 0, len(heads))
    return x[:, heads]


def _trade(tensors: list[list[Tensor]], shapes: list[list[list[int]]], group: dist.ProcessGroup) -> list[list[Tensor]]:
    """Sends the tensors in the r-th list to rank r; the tensors that come from rank r have the r-th shapes."""
    flat = torch.cat([x.reshape(-1) for each in tensors for x in each])
    send = [sum(x.numel() for x in each) for each in tensors]
    sizes = [[torch.Size(shape).numel() for shape in each] for each in shapes]
    receive = [sum(each) for each in sizes]
    # where there are no rows, no rank has anything for another one
    got = Exchanged.apply(flat, receive, send, group) if sum(send) + sum(receive) else flat
    cut = iter(got.split([size for each in sizes for size in each]))
    return [[next(cut).view(shape) for shape in each] for each in shapes]


def attend_ulysses(
    query: Tensor, key: Tensor, value: Tensor, rules: Rules, group: dist.ProcessGroup, layout: str
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's rows."""
    ranks, rank = group.size(), group.rank()
    batch, num_heads, num_rows, _ = query.shape
    group_size = num_heads // max(key.size(1), 1)
    head_map = rules.head_map or tuple(head // group_size for head in range(num_heads))
    shares = [share_of_heads(num_heads, ranks, each) for each in range(ranks)]
    read = [kv_heads_of(share, head_map)[0] for share in shares]
    own, own_map = shares[rank], kv_heads_of(shares[rank], head_map)[1]

    parts = [[_select(query, list(shares[r])), _select(key, read[r]), _select(value, read[r])] for r in range(ranks)]
    wanted = [
        [batch, len(own), num_rows, query.size(3)],
        [batch, len(read[rank]), key.size(2), key.size(3)],
        [batch, len(read[rank]), value.size(2), value.size(3)],
    ]
    got = zip(*_trade(parts, [wanted] * ranks, group), strict=True)
    whole = []
    for each in got:
        order = whole_order(layout, each[0].size(2), ranks, query.device)
        joined = torch.cat(each, 2)
        whole.append(joined if order is None else joined.index_select(2, order))
    length, kv_len = whole[0].size(2), whole[1].size(2)
    out, lse = rules.of_heads(own, own_map).attend(*whole, range(length), range(kv_len))
    if layout != "contiguous":
        order = rank_order(layout, num_rows, ranks, query.device)
        out, lse = out.index_select(2, order), lse.index_select(2, order)

    def back(x: Tensor) -> Tensor:  # [B, own heads, L, ...] -> [B, Hq, n, ...]
        shapes = [[[batch, len(share), num_rows, *x.shape[3:]]] for share in shares]
        return torch.cat([each for (each,) in _trade([[part] for part in x.split(num_rows, 2)], shapes, group)], 1)

    return back(out), back(lse)
