"""Tokens per second of SmolLM2-135M-Instruct in transformers' generate: with attnpack, its whole layers, and sdpa.

    python benchmarks/hf_generate.py [--dtypes fp32 bf16] [--prompt-tokens 512] [--new-tokens 64] [--rounds 3]

Three ways take turns: attn_implementation "sdpa", "attnpack", and "attnpack" with `replace_attention`. Generation is
greedy, and the time includes the prompt. The ratio is sdpa's time / our time, the median over the rounds: above 1 ours
is faster. This is no test: it asserts nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pydoc_data.topics import topics

import attnpack.hf
import torch
from generate import DTYPES, load_transformers

WAYS = ("sdpa", "attnpack", "replaced layers")


def time_call(generate: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """(seconds, tokens) of one call."""
    start = time.perf_counter()
    tokens = generate()
    return time.perf_counter() - start, tokens


def compare_ways(model, ids: torch.Tensor, new_tokens: int, rounds: int) -> list[dict]:
    """A row for each way; `ids` [B, L]."""
    replaced = attnpack.hf.replace_attention(copy.deepcopy(model))
    settings = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False}

    def generate(way: str) -> torch.Tensor:
        if way == "replaced layers":
            runs = replaced
        else:
            runs = model
            model.set_attn_implementation(way)
        return runs.generate(ids, attention_mask=torch.ones_like(ids), **settings)

    for way in WAYS:
        generate(way)  # warm up
    results = [{way: time_call(lambda way=way: generate(way)) for way in WAYS} for _ in range(rounds)]
    new = ids.size(0) * new_tokens
    expected = results[-1]["sdpa"][1]
    return [
        {
            "way": way,
            "tokens_per_second": new / statistics.median(result[way][0] for result in results),
            "ratio": statistics.median(result["sdpa"][0] / result[way][0] for result in results),
            "same_tokens": torch.equal(results[-1][way][1], expected),
        }
        for way in WAYS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    args = parser.parse_args()

    attnpack.hf.register()
    model, tokenizer = load_transformers()
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.prompt_tokens * args.batch]
    ids = ids.view(args.batch, args.prompt_tokens)
    say = (lambda line: None) if args.json else (lambda line: print(line, flush=True))
    say(f"{torch.get_num_threads()} threads, prompt {list(ids.shape)}, {args.new_tokens} new tokens per row")
    say("dtype   way               tok/s   ratio   same tokens")
    rows = []
    for dtype in args.dtypes:
        for row in compare_ways(copy.deepcopy(model).to(DTYPES[dtype]), ids, args.new_tokens, args.rounds):
            speed = f"{row['tokens_per_second']:7.1f}   {row['ratio']:5.2f}"
            say(f"{dtype:<6}  {row['way']:<15} {speed}   {row['same_tokens']}")
            rows.append({"dtype": dtype} | row)
    if args.json:
        print(json.dumps({"threads": torch.get_num_threads(), "shape": list(ids.shape), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
