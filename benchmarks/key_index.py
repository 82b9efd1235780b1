"""Time of attention over named keys (`key_index`) against a dense bool mask of the same keys: two tables.

Decode: one query over many keys, of which some are named at random, as an indexer names them. "masked" is the same call
with a bool mask, as libraries without such an argument run it; the time to make the mask is not counted. Each round
times all calls in turn; the ratio is the median over the rounds of masked / named. Prefill: as many rows as keys,
causal, and more names from line to line; the time per row and name should stay.
"""

import argparse
import statistics

import attnpack
import torch
from attnpack.tools.bench import conditions
from packed import DTYPES, measure

# (query heads, kv heads, head dim)
LAYERS = {"32 heads, 8 kv heads of 128": (32, 8, 128), "32 heads, 1 kv head of 128": (32, 1, 128),
          "16 heads, 16 kv heads of 64": (16, 16, 64)}  # fmt: skip


def draw_names(rows: int, keys: int, names: int) -> torch.Tensor:
    """[1, 1, rows, names], each row's names without order; all keys before its own if these are fewer."""
    ahead = torch.arange(keys) > torch.arange(keys - rows, keys).unsqueeze(-1)
    return torch.rand(1, 1, rows, keys).masked_fill(ahead, -1).topk(names, dim=-1).indices


def dense_mask(names: torch.Tensor, keys: int) -> torch.Tensor:
    return torch.zeros(*names.shape[:3], keys, dtype=torch.bool).scatter(-1, names, True)


def time_decode(args: argparse.Namespace) -> None:
    print(f"decode, {args.names:,} of {args.keys:,} keys, {args.dtype}, {torch.get_num_threads()} threads")
    for layer, (heads, kv_heads, width) in LAYERS.items():
        dtype = DTYPES[args.dtype]
        query = torch.randn(1, heads, 1, width, dtype=dtype)
        key, value = (torch.randn(1, kv_heads, args.keys, width, dtype=dtype) for _ in range(2))
        names = draw_names(1, args.keys, args.names)
        mask = dense_mask(names, args.keys)
        calls = {"named": lambda: attnpack.attention(query, key, value, key_index=names),  # noqa: B023
                 "masked": lambda: attnpack.attention(query, key, value, mask)}  # noqa: B023  # fmt: skip
        for block in (64, 128):
            some = torch.randperm(args.keys // block)[: args.names // block].view(1, 1, 1, -1)
            calls[f"blocks of {block}"] = (
                lambda some=some, block=block, q=query, k=key, v=value: attnpack.attention(
                    q, k, v, key_index=some, key_block=block))  # fmt: skip
        times = measure(calls, args.rounds)
        ratio = statistics.median(m / n for m, n in zip(times["masked"], times["named"], strict=True))
        shown = ", ".join(f"{name} {statistics.median(found) * 1e3:.3f} ms" for name, found in times.items())
        print(f"{layer:>28}: {shown}; masked / named {ratio:.1f}", flush=True)


def time_prefill(args: argparse.Namespace) -> None:
    rows, rounds = args.prefill, max(args.rounds // 3, 1)
    query, key, value = (torch.randn(1, n, rows, 128, dtype=DTYPES[args.dtype]) for n in (8, 2, 2))
    calls = {"all": lambda: attnpack.attention(query, key, value, causal=True)}
    sizes = [rows // 64, rows // 32, rows // 16, rows // 8]
    for names in sizes:
        index = draw_names(rows, rows, names)
        calls[names] = lambda index=index: attnpack.attention(query, key, value, key_index=index, causal=True)
    times = {name: statistics.median(found) for name, found in measure(calls, rounds).items()}
    print(f"prefill, {rows:,} rows and keys, causal, 8 heads, 2 kv heads of 128, {args.dtype}; a mask takes "
          f"{rows * rows / 2**20:.0f} MiB")  # fmt: skip
    print(f"{'all keys':>12}: {times['all'] * 1e3:8.1f} ms")
    for names in sizes:
        each = times[names] / names / rows * 1e9
        print(f"{names:>6} names: {times[names] * 1e3:8.1f} ms, {each:.1f} ns per row and name", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--keys", type=int, default=32768)
    parser.add_argument("--names", type=int, default=2048)
    parser.add_argument("--prefill", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"on {conditions(args.dtype)}")
    time_decode(args)
    time_prefill(args)


if __name__ == "__main__":
    main()
