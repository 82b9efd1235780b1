"""A training step of a small encoder: attnpack's beside the nn.TransformerEncoder that it was made from, in turns.

    python benchmarks/training_step.py [--rounds N] [--dtype bf16]

A step is forward, backward and AdamW, as AMP does in bf16 where that is asked for. A ratio is torch's time divided by
attnpack's: above 1 attnpack is faster. Each figure is the median over the rounds of the ratio of two neighbouring
timings.
"""

import argparse
import contextlib
import statistics
from collections.abc import Callable

import torch
from attnpack.convert import from_torch
from attnpack.tools.bench import conditions
from linear_layers import ratio
from torch import Tensor, nn

# embed_dim, layers, batch, length; heads of 64
SIZES = ((256, 2, 16, 64), (256, 4, 8, 256), (512, 4, 8, 128), (512, 4, 4, 512), (768, 2, 8, 128), (768, 4, 2, 512))


def step(encoder: nn.Module, x: Tensor, bf16: bool) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(encoder.parameters(), fused=True)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
            loss = encoder(x).float().square().mean()
        loss.backward()
        optimizer.step()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"on {conditions(args.dtype)}")
    found = []
    for width, layers, batch, length in SIZES:
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        theirs = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        ours = from_torch(theirs)
        x = torch.randn(batch, length, width)
        time, factor = ratio(*(step(m, x, args.dtype == "bf16") for m in (theirs, ours)), args.rounds)
        print(f"{layers} layers of {width:>3}, {batch:>2} x {length:>3}: torch {time / 1e3:7.1f} ms, {factor:5.2f}x")
        found.append(factor)
    print(f"{len(found)} cases: median {statistics.median(found):.2f}x, slowest {min(found):.2f}x")


if __name__ == "__main__":
    main()
