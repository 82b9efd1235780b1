"""`attnpack demo`: an answer of a real model and its cost, a comparison of the variants, a picture, and the lines of
the multi-query notebook."""

import argparse
import json
from collections.abc import Callable

import torch

from ...progress import counted
from ..bench import conditions
from ..busy import OtherWork
from ..plot import check_picture, plot_kv_memory
from .model import run_model
from .mqa import fold, run_mqa
from .variants import compare_variants, format_table, rows_as_dicts


def main(args: argparse.Namespace) -> None:
    """Runs the four parts; with `args.json` prints their figures as one JSON object instead of text. The lines of the
    multi-query notebook come last and folded, whole with `args.all_lines`."""
    say: Callable[..., None] = _quiet if args.json else _print
    figures: dict = {}
    check_picture(args.out)

    if not args.no_model:
        say("1. A language model, SmolLM2-135M-Instruct, on attnpack's C++ modules\n")
        figures["model"] = run_model(say=say)

    say("\n2. The variants: embed_dim 512, 8 query heads of 64, fp32, one decode step after 2048 tokens")
    used = counted(torch.get_num_threads(), "thread")
    say(f"   {used}; SDPA: the same step with torch's scaled_dot_product_attention\n")
    others = OtherWork()
    rows = compare_variants()
    figures["variants"] = rows_as_dicts(rows)
    say(format_table(rows))
    if warning := others.warning():
        say(warning)
    say("Times: median and least of 40 steps, which take turns. Error: largest against fp64.")
    say("Cross-attention keeps the keys and values of its context in a CrossCache.")
    say(f"on {conditions()}")

    say("\n3. KV memory against context\n")
    figures["kv_memory_bytes"] = plot_kv_memory(args.out)
    figures["picture"] = str(args.out)
    say(f"wrote {args.out}")

    say("\n4. The multi-query notebook on native tensors: V1, V2, V3, masking, then the values\n")
    texts: list[str] = []
    figures["mqa"] = run_mqa(say=texts.append)["differences"]
    for text in texts if args.all_lines else fold(texts):
        say(text)
    if args.json:
        print(json.dumps(figures, indent=2))


def _print(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


def _quiet(text: str, end: str = "\n") -> None:
    pass
