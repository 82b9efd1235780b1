"""Speed of keys in pages, as a share of the speed of the same keys in one piece: a table of ratios.

Each round times both ways in turn, on one thread, and goes through several copies that no cache holds together. A ratio
is that of the shortest times. At the end it times `fork` of a PagedCache, which shares the pages, and `reorder` of a
DynamicCache, which copies the keys.

"rows": packed keys [S, Hkv, D] against pools [pages, page, Hkv, D]. "heads": each head's keys in one piece
against pools whose pages hold one head after the other. Pages stand in order, or shuffled.
"""

import argparse
import time

import attnpack
import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEADS = {"mha": (8, 8, 64), "groups of 3": (9, 3, 64), "groups of 4": (32, 8, 64), "groups of 8": (16, 2, 128),
         "mqa": (8, 1, 128)}  # fmt: skip
BYTES = 128 << 20  # of all copies together: more than caches hold


def into_pages(x: torch.Tensor, pages: torch.Tensor, page_size: int, layout: str) -> torch.Tensor:
    """x [S, H, D] as a pool [pages, page, H, D] whose page pages[n] holds the rows from n * page_size on."""
    rows = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, len(pages) * page_size - len(x))).unflatten(0, (-1, page_size))
    order = (0, 1, 2, 3) if layout == "rows" else (0, 2, 1, 3)
    pool = torch.empty([rows.size(n) for n in order], dtype=x.dtype)
    pool[pages] = rows.permute(order)
    return pool.permute(order)


def make_copy(heads: tuple, keys: int, page_size: int, layout: str, order: str, dtype: torch.dtype) -> tuple:
    """Keys and values in one piece, the same in pages, and the table."""
    _, kv_heads, width = heads
    count = -(-keys // page_size)
    pages = torch.arange(count) if order == "in order" else torch.randperm(count)
    packed = [torch.randn(keys, kv_heads, width, dtype=dtype) for _ in range(2)]
    if layout == "heads":
        packed = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in packed]
    return packed, [into_pages(x, pages, page_size, layout) for x in packed], pages.int().unsqueeze(0)


def measure(heads: tuple, rows: int, keys: int, page_size: int, layout: str, order: str, dtype: torch.dtype,
            rounds: int) -> tuple[float, float]:  # fmt: skip
    """The shortest seconds of a call in one piece, and of a call in pages."""
    num_heads, kv_heads, width = heads
    q = torch.randn(rows, num_heads, width, dtype=dtype)
    ends, key_ends, lens = torch.tensor([0, rows]), torch.tensor([0, keys]), torch.tensor([keys])
    size = 4 * keys * kv_heads * width * q.element_size()
    copies = [make_copy(heads, keys, page_size, layout, order, dtype) for _ in range(max(2, BYTES // size))]
    shortest = [float("inf")] * 2
    for n in range(rounds * len(copies)):
        packed, pools, table = copies[n % len(copies)]
        calls = (
            lambda packed=packed: attnpack.attention_varlen(q, *packed, ends, key_ends, causal=True),
            lambda pools=pools, table=table: attnpack.attention_varlen(
                q, *pools, ends, block_table=table, kv_lens=lens, causal=True
            ),
        )
        for way in (0, 1) if n // len(copies) % 2 else (1, 0):
            begin = time.perf_counter()
            calls[way]()
            shortest[way] = min(shortest[way], time.perf_counter() - begin)
    return shortest[0], shortest[1]


def measure_fork(keys: int, page_size: int, dtype: torch.dtype, rounds: int) -> tuple[float, float]:
    """The shortest seconds in which one sequence becomes two, in pages and in one piece: 8 KV heads of 64."""
    x = torch.randn(1, 8, keys, 64, dtype=dtype)
    shortest = [float("inf")] * 2
    for _ in range(rounds):
        pages = attnpack.PagedCache(1, 8, 64, page_size=page_size, num_pages=-(-keys // page_size) + 2, dtype=dtype)
        piece = attnpack.DynamicCache()
        for cache in (pages, piece):
            cache.reserve(x, x)
            cache.commit(keys, None)
        pages.k_pool.fill_(1), pages.v_pool.fill_(1)
        piece.k.fill_(1), piece.v.fill_(1)
        begin = time.perf_counter()
        pages.fork([0, 0])
        middle = time.perf_counter()
        piece.reorder(torch.tensor([0, 0]))
        shortest = [min(shortest[0], middle - begin), min(shortest[1], time.perf_counter() - middle)]
    return shortest[0], shortest[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=16384)
    parser.add_argument("--rows", type=int, default=1, help="queries: 1 for decode, hundreds for a chunk of a prefill")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.rows} queries, {args.keys} keys, pages of {args.page}, {args.dtype}, one thread")
    print("speed in pages / speed in one piece")
    columns = [(layout, order) for layout in ("rows", "heads") for order in ("in order", "shuffled")]
    print(f"{'':12}" + "".join(f"{f'{layout}, {order}':>18}" for layout, order in columns))
    with torch.no_grad():
        for name, heads in HEADS.items():
            found = [measure(heads, args.rows, args.keys, args.page, *column, DTYPES[args.dtype], args.rounds)
                     for column in columns]  # fmt: skip
            print(f"{name:12}" + "".join(f"{piece / pages:18.2f}" for piece, pages in found), flush=True)
        fork, copy = measure_fork(args.keys, args.page, DTYPES[args.dtype], args.rounds)
    print(f"fork of {args.keys} positions: {1e3 * fork:.3f} ms; copies of them: {1e3 * copy:.1f} ms")


if __name__ == "__main__":
    main()
