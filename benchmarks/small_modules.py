"""Eager calls of attention modules on one short sequence, beside nn.MultiheadAttention of the same shape, in turns.

    python benchmarks/small_modules.py [--rounds N] [--threads N]

A ratio is torch's time divided by attnpack's: above 1 attnpack is faster. Each figure is the median over the rounds of
the ratio of two neighbouring timings. torch is not asked for weights, so that it takes its fastest path.
"""

import argparse
import statistics
from collections.abc import Callable

import attnpack
import torch
from linear_layers import ratio
from torch import Tensor, nn

LENGTHS = (1, 2, 4, 8, 16, 32)
WIDTHS = {64: 4, 256: 4, 768: 12}  # embed_dim: num_heads


def call(module: nn.Module, x: Tensor) -> Tensor:
    return module(x, x, x, need_weights=False)[0] if isinstance(module, nn.MultiheadAttention) else module(x)


def evaluated(module: nn.Module, x: Tensor) -> Callable[[], object]:
    module.eval()
    return torch.no_grad()(lambda: call(module, x))


def trained(module: nn.Module, x: Tensor) -> Callable[[], object]:
    module.train()
    return lambda: call(module, x).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    found = []
    print("width | length | no gradients: torch, ratio | training step: torch, ratio")
    for width, heads in WIDTHS.items():
        modules = nn.MultiheadAttention(width, heads, batch_first=True), attnpack.MultiHeadAttention(width, heads)
        for length in LENGTHS:
            x = torch.randn(1, length, width)
            results = [ratio(*(kind(m, x) for m in modules), args.rounds) for kind in (evaluated, trained)]
            print(f"{width:>5} | {length:>6} |", *(f"{time:9.1f} us {factor:6.2f}x |" for time, factor in results))
            found += [factor for _, factor in results]
    print(f"\n{len(found)} cases: median {statistics.median(found):.2f}x, slowest {min(found):.2f}x")


if __name__ == "__main__":
    main()
