"""Tokens a second of SmolLM2-135M-Instruct: attnpack beside transformers, in turns, in one run.

    python benchmarks/generate.py [--dtypes fp32 bf16] [--prompt-tokens 32] [--new-tokens 64] [--batch 1] [--rounds 3]

Greedy, prompt included in the time, all with a growing cache and as many threads as torch takes; llama.cpp too, where
llama-cpp-python is installed, with weights of the same dtype. A ratio is the median over the rounds of attnpack's rate
by the other's; above 1 attnpack is faster. Not a test: nothing is asserted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import attnpack
import torch
from attnpack.causal_lm_io import load_tokenizer, smollm2_path
from llama_cpp_peer import LlamaCpp, installed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCRIPT = Path(__file__).parents[1] / "scripts" / "make_reference_tokens.py"


def load_transformers():
    """(model, tokenizer) of transformers from the same file, fp32."""
    spec = importlib.util.spec_from_file_location("make_reference_tokens", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.load()


def timed(generate: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    generate()
    return time.perf_counter() - start


def compare(hf, dtype: str, ids: torch.Tensor, new_tokens: int, rounds: int) -> dict:
    """Rates of all for one dtype; `ids` [B, L]."""
    ours = attnpack.CausalLM.from_gguf(smollm2_path(), dtype=DTYPES[dtype])
    hf = hf.to(DTYPES[dtype])
    lengths = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    runs = {
        "attnpack": lambda: ours.generate(ids, max_new_tokens=new_tokens),
        "transformers": lambda: hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths),
    }
    if installed() and len(ids) == 1:
        peer = LlamaCpp(dtype, ids.shape[1] + new_tokens)
        runs["llama.cpp"] = lambda: peer.generate(ids, new_tokens)

    tokens = {name: run() for name, run in runs.items()}  # also warms up
    seconds = [{name: timed(run) for name, run in runs.items()} for _ in range(rounds)]
    peers = [name for name in runs if name != "attnpack"]
    new = ids.shape[0] * new_tokens
    return {
        "dtype": dtype,
        "tokens_per_second": {name: new / statistics.median(took[name] for took in seconds) for name in runs},
        "ratio": {name: statistics.median(took[name] / took["attnpack"] for took in seconds) for name in peers},
        "same_tokens": {name: torch.equal(tokens["attnpack"], tokens[name]) for name in peers},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch [as torch takes]")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    text = "\n".join(topics[name] for name in sorted(topics))
    ids = load_tokenizer(smollm2_path()).encode(text)[: args.prompt_tokens * args.batch]
    ids = torch.tensor(ids).view(args.batch, args.prompt_tokens)
    hf = load_transformers()[0]
    say = (lambda line: None) if args.json else (lambda line: print(line, flush=True))
    say(f"{torch.get_num_threads()} threads, prompt {list(ids.shape)}, {args.new_tokens} new tokens a row")
    say(f"{'dtype':<6}{'peer':>14}{'attnpack tok/s':>17}{'peer tok/s':>13}{'ratio':>8}   same tokens")
    rows = []
    for dtype in args.dtypes:
        row = compare(hf, dtype, ids, args.new_tokens, args.rounds)
        rates = row["tokens_per_second"]
        for peer, ratio in row["ratio"].items():
            same = row["same_tokens"][peer]
            say(f"{dtype:<6}{peer:>14}{rates['attnpack']:17.1f}{rates[peer]:13.1f}{ratio:8.2f}   {same}")
        rows.append(row)
    if args.json:
        print(json.dumps({"threads": torch.get_num_threads(), "shape": list(ids.shape), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
