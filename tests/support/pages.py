"""Keys in pages for tests: pools of several layouts, whose unused pages and rows hold NaN."""

from __future__ import annotations

import torch
from torch import Tensor

NAN = float("nan")
GARBAGE = (-1, 2**31 - 1, -(2**31))  # what stands in a block table after the entries that a sequence needs


def pages_of(length: int, page_size: int) -> int:
    return -(-length // page_size)


def empty_pool(layout: str, num_pages: int, page_size: int, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    """A pool [num_pages, page_size, heads, width] of NaN, in the memory order of the layout."""
    if layout == "flat":  # one row per token, as transformers has it
        return torch.full((num_pages * page_size, heads, width), NAN, dtype=dtype).unflatten(0, (-1, page_size))
    if layout == "sliced":  # keys beside other things
        return torch.full((num_pages, page_size, heads, width + 3), NAN, dtype=dtype)[..., 1 : width + 1]
    order = {"rows": (0, 1, 2, 3), "heads": (0, 2, 1, 3), "heads outside": (2, 0, 1, 3), "columns": (0, 3, 2, 1)}[
        layout
    ]
    shape = (num_pages, page_size, heads, width)
    room = torch.full([shape[n] for n in order], NAN, dtype=dtype)
    return room.permute([order.index(n) for n in range(4)])


LAYOUTS = ("rows", "heads", "heads outside", "flat", "sliced", "columns")


def make_table(lengths: list[int], page_size: int, order: str = "shuffled", spare: int = 2, seed: int = 0) -> Tensor:
    """int32 [B, max_pages]; pages that nobody names stand between the others."""
    needed = [pages_of(n, page_size) for n in lengths]
    total = sum(needed) + 3
    pages = torch.arange(total)
    if order == "shuffled":
        pages = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    width = max(needed, default=0) + spare
    table = torch.tensor(GARBAGE, dtype=torch.int64).repeat(len(lengths), width)[:, :width].clone()
    begin = 1
    for b, n in enumerate(needed):
        table[b, :n] = pages[begin : begin + n]
        begin += n
    return table.int()


def fill_pool(pool: Tensor, packed: Tensor, lengths: list[int], table: Tensor) -> Tensor:
    """Writes the rows of the packed sequences [S, heads, width] into their pages."""
    page_size, begin = pool.size(1), 0
    for b, n in enumerate(lengths):
        for j in range(n):
            pool[int(table[b, j // page_size]), j % page_size] = packed[begin + j]
        begin += n
    return pool


def put_into_pages(packed: Tensor, lengths: list[int], table: Tensor, page_size: int, layout: str = "rows") -> Tensor:
    """A pool with the rows of the packed sequences, and NaN elsewhere."""
    num_pages = sum(pages_of(n, page_size) for n in lengths) + 3
    pool = empty_pool(layout, num_pages, page_size, *packed.shape[1:], packed.dtype)
    return fill_pool(pool, packed, lengths, table)
