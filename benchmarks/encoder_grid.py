"""Attention of encoders, so of short sequences: attnpack, SDPA and zentorch in turns, with shares of the CPU's peak.

    python benchmarks/encoder_grid.py [--rounds N] [--only TEXT]

A ratio is the peer's time divided by attnpack's: above 1 attnpack is faster. Each figure is the median over the rounds
of the ratio of two neighbouring timings. zentorch is AMD's extension; without it its column is empty.
"""

import argparse
import importlib
import statistics
from collections.abc import Callable, Iterator

import attnpack
import torch
import torch.nn.functional as F
from attnpack import _C
from attnpack.tools.bench import conditions
from sdpa_grid import seconds

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# batch, length; 12 heads
SIZES = ((64, 16), (1, 32), (64, 32), (1, 64), (32, 64), (1, 128), (8, 128), (32, 128), (64, 128), (1, 197), (8, 256),
         (1, 512), (4, 512))  # fmt: skip
HEADS = 12
MOST_SECONDS = 0.02  # of one timing


def contenders(q, k, v, mask) -> dict[str, Callable[[], object]]:
    calls = {
        "attnpack": lambda: attnpack.attention(q, k, v, mask=mask),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
    }
    try:
        importlib.import_module("zentorch")
    except ImportError:
        return calls
    added = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    calls["zentorch"] = lambda: torch.ops.zentorch.zentorch_sdpa(q, k, v, attn_mask=added)[0]
    return calls


def cases() -> Iterator[tuple[str, float, dict[str, Callable[[], object]], int]]:
    """(name, multiply-adds, calls, index of the peak)"""
    for index, (dtype_name, dtype) in enumerate(DTYPES.items()):
        for head_dim in (64, 80):
            for batch, length in SIZES:
                for padded in (False, True):
                    q, k, v = (torch.randn(batch, HEADS, length, head_dim).to(dtype) for _ in range(3))
                    lengths = torch.linspace(length // 2, length, batch).long()
                    mask = (torch.arange(length) < lengths[:, None])[:, None, None] if padded else None
                    name = f"{dtype_name} | {batch} x {length} | D {head_dim} | {'padded' if padded else 'full'}"
                    yield name, 4.0 * batch * HEADS * length * length * head_dim, contenders(q, k, v, mask), index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    print(f"on {conditions()}; {_C.limits()[1] / 1e9:.0f} GFLOP/s bf16")
    found: dict[str, dict[str, float]] = {"sdpa": {}, "zentorch": {}}
    for name, work, calls, index in cases():
        if args.only not in name:
            continue
        times = {
            peer: max(1, min(300, int(MOST_SECONDS / max(seconds(call, 2), 1e-7)))) for peer, call in calls.items()
        }
        rounds = []
        for i in range(args.rounds):
            order = list(calls) if i % 2 else list(reversed(calls))
            rounds.append({peer: seconds(calls[peer], times[peer]) for peer in order})
        ours = statistics.median(r["attnpack"] for r in rounds)
        peak = max(_C.limits()[index], 1.0)
        line = f"{name:<32} {ours * 1e6:9.1f} us  {work / ours / peak:4.0%} of the peak"
        for peer in calls:
            if peer != "attnpack":
                found[peer][name] = statistics.median(r[peer] / r["attnpack"] for r in rounds)
                line += f"  {peer} {found[peer][name]:5.2f}x"
        print(line, flush=True)
    for peer, ratios in found.items():
        if ratios:
            slowest = sorted(ratios, key=ratios.__getitem__)[:5]
            print(f"{peer}: median {statistics.median(ratios.values()):.2f}x, least", end=" ")
            print(*(f"{ratios[name]:.2f}x ({name})" for name in slowest), sep=", ")


if __name__ == "__main__":
    main()
