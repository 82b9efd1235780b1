"""SmolLM2-135M with latent attention: the perplexity and the cache by the width of the latents and of the rotating key.

Each row is one call of `attnpack convert IN OUT --kv-lora-rank R --rope-dim N`, and with --minutes one of `attnpack
uptrain` after it.
"""

import argparse
import tempfile
from pathlib import Path

from attnpack.checkpoints import smollm2_path
from attnpack.convert import checkpoint_to_mla
from attnpack.convert.uptrain.command import uptrain
from attnpack.tools.cli import build_parser

ROWS = ("384,192", "193,192", "192,96", "128,64", "96,32")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("rows", nargs="*", default=ROWS, metavar="R,N", help="widths of latents and rotating key")
    arguments.add_argument("--minutes", type=float, default=0.0, help="of uptraining for each row [none]")
    arguments.add_argument("--text", type=Path, help="text to learn from and to measure on [Python's help topics]")
    arguments.add_argument("--tokens", type=int, default=2048, help="to measure on, and as many to learn from [2048]")
    args = arguments.parse_args()
    print("latents  rotating key  bytes per token  perplexity" + ("  after uptraining  steps" if args.minutes else ""))
    before = None
    for row in args.rows:
        rank, rope = (int(number) for number in row.split(","))
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "latent"
            made = checkpoint_to_mla(smollm2_path(), out, rank, rope, text=args.text, tokens=args.tokens)
            if before is None:
                before = made
                print(f"{'original':21}  {made.kv_bytes_per_token_before:15,}  {made.perplexity_before:10.2f}")
            line = f"{rank:7}  {rope:12}  {made.kv_bytes_per_token:15,}  {made.perplexity:10.2f}"
            if args.minutes:
                line += train(out, args)
            print(line, flush=True)


def train(directory: Path, args: argparse.Namespace) -> str:
    command = ["uptrain", str(directory), "--minutes", str(args.minutes)]
    command += [] if args.text is None else ["--text", str(args.text)]
    report = uptrain(build_parser().parse_args(command), say=lambda words: None)
    return f"  {report.perplexity:16.2f}  {report.steps:5}"


if __name__ == "__main__":
    main()
