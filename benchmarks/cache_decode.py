"""One decode step over keys that are stored as int8 and int4, beside the same step over bf16 keys, in turns.

    python benchmarks/cache_decode.py [--keys N] [--threads N] [--rounds N]

A ratio is the bf16 cache's time divided by the quantised cache's: above 1 the quantised one is faster. GB/s are those
of the bf16 keys and values.
"""

import argparse

import torch
from attnpack.ops import quantize_rows
from linear_layers import ratio

SHAPES = [(1, 16, 16, 128), (2, 8, 8, 64), (1, 32, 8, 128), (4, 9, 3, 64), (2, 16, 2, 128),
          (1, 32, 4, 128)]  # B, Hq, Hkv, D: 34 to 134 MB of bf16 keys and values at 16,384 keys  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{args.keys} keys, {args.threads} threads\nB Hq Hkv   D | bf16                 | int8   | int4")
    for batch, heads, kv_heads, dim in SHAPES:
        query = torch.randn(batch, heads, 1, dim).bfloat16()
        key, value = (torch.randn(batch, kv_heads, args.keys, dim).bfloat16() for _ in range(2))
        found = []
        for bits in (8, 4):
            rows = [quantize_rows(x, bits) for x in (key, value)]
            found.append(
                ratio(
                    lambda: torch.ops.attnpack.attention(query, key, value),  # noqa: B023
                    lambda: torch.ops.attnpack.attention_quantized(query, *rows, bits, dim),  # noqa: B023
                    args.rounds,
                )
            )
        time = found[0][0]
        speed = 2 * key.numel() * 2 / time / 1e3
        print(f"{batch} {heads:>2} {kv_heads:>3} {dim:>3} | {time:9.1f} us {speed:5.1f} GB/s |", end="")
        print(*(f"{factor:6.2f}x |" for _, factor in found))


if __name__ == "__main__":
    main()
