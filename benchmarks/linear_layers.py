"""torch's linear against attnpack's, which takes the faster kernel, over a grid of layers and rows, in turns.

    python benchmarks/linear_layers.py [--rounds N] [--only TEXT] [--all]

A ratio is the time of F.linear divided by that of attnpack.ops.linear: above 1 attnpack is faster. Each figure is the
median over the rounds of the ratio of two neighbouring timings. With --all, more than 16 rows are timed in oneDNN too,
whatever the table says: from these figures the table in csrc/attnpack/ops/detail/onednn_linear.cpp was made.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from attnpack import ops
from sdpa_grid import seconds
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = (1, 4, 16, 17, 32, 64, 128, 512, 2048)
# inputs, outputs: small ones, MiniLM, ViT, SmolLM2 and its head, Llama 1B; then thin and odd ones
LAYERS = ((32, 32), (64, 64), (128, 128), (384, 384), (384, 1536), (768, 768), (576, 1536), (1536, 576), (576, 49152),
          (2048, 2048), (2048, 512), (16, 1024), (1024, 16), (1024, 1), (1, 1024), (769, 771))  # fmt: skip
MOST_WORK = 6e9  # multiply-adds of one call
MOST_SECONDS = 0.01  # of one timing


def ratio(torchs: Callable[[], object], ours: Callable[[], object], rounds: int) -> tuple[float, float]:
    """(microseconds of torch, the median of torch's time divided by ours)."""
    times = max(1, min(300, int(MOST_SECONDS / max(seconds(torchs, 2), 1e-7))))
    seconds(ours, 2)
    pairs = [(seconds(torchs, times), seconds(ours, times)) for _ in range(rounds)]
    return statistics.median(a for a, _ in pairs) * 1e6, statistics.median(a / b for a, b in pairs)


def forward(linear: Callable, x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[], object]:
    def call() -> Tensor:
        with torch.no_grad():
            return linear(x, weight, bias)

    return call


def training(linear: Callable, x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[], object]:
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    gradient = torch.ones(x.size(0), weight.size(0), dtype=x.dtype)
    return lambda: torch.autograd.grad(linear(*leaves), leaves, gradient)


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    found = {}
    for dtype_name, dtype in DTYPES.items():
        for inputs, outputs in LAYERS:
            for rows in ROWS:
                for biased in (False, True):
                    name = f"{dtype_name} | {inputs} to {outputs} | {rows} rows | {'bias' if biased else 'no bias'}"
                    if rows * inputs * outputs > MOST_WORK or args.only not in name:
                        continue
                    x, weight, bias = (
                        torch.randn(s).to(dtype) for s in ((rows, inputs), (outputs, inputs), (outputs,))
                    )
                    given = (x, weight, bias if biased else None)
                    line = f"{name:<46}"
                    for kind in (forward, training):
                        time_of_torch, found[f"{name} | {kind.__name__}"] = ratio(
                            kind(F.linear, *given), kind(ops.linear, *given), args.rounds
                        )
                        line += f" {kind.__name__} {time_of_torch:10.1f} us {found[f'{name} | {kind.__name__}']:5.2f}x"
                    if args.all and rows > 16:
                        line += (
                            f" oneDNN {ratio(forward(F.linear, *given), forward(onednn, *given), args.rounds)[1]:5.2f}x"
                        )
                    print(line, flush=True)
    print(f"\n{len(found)} cases: median {statistics.median(found.values()):.2f}x, slowest", end="")
    print(*(f"\n  {found[name]:.2f}x  {name}" for name in sorted(found, key=found.__getitem__)[:12]))


if __name__ == "__main__":
    main()
