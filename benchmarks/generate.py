"""Tokens a second of SmolLM2-135M-Instruct: attnpack beside transformers, in turns, in one run.

    python benchmarks/generate.py [--dtypes fp32 bf16] [--prompt-tokens 32] [--new-tokens 64] [--batch 1] [--rounds 3]

Greedy, prompt included in the time, both with a growing cache and as many threads as torch takes. The ratio is the
median over the rounds of attnpack's rate by transformers'; above 1 attnpack is faster. Not a test: nothing is asserted.
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

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCRIPT = Path(__file__).parents[1] / "scripts" / "make_reference_tokens.py"


def load_transformers():
    """(model, tokenizer) of transformers from the same file, fp32."""
    spec = importlib.util.spec_from_file_location("make_reference_tokens", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.load()


def timed(generate: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    tokens = generate()
    return time.perf_counter() - start, tokens


def compare(hf, dtype: str, ids: torch.Tensor, new_tokens: int, rounds: int) -> dict:
    """Rates of both for one dtype; `ids` [B, L]."""
    ours = attnpack.CausalLM.from_gguf(smollm2_path(), dtype=DTYPES[dtype])
    hf = hf.to(DTYPES[dtype])

    def run_ours() -> torch.Tensor:
        return ours.generate(ids, max_new_tokens=new_tokens)

    def run_theirs() -> torch.Tensor:
        lengths = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        return hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths)

    run_ours(), run_theirs()  # warm up
    pairs = [(timed(run_ours), timed(run_theirs)) for _ in range(rounds)]
    (_, a), (_, b) = pairs[-1]
    new = ids.shape[0] * new_tokens
    return {
        "dtype": dtype,
        "attnpack_tokens_per_second": new / statistics.median(ours for (ours, _), _ in pairs),
        "transformers_tokens_per_second": new / statistics.median(theirs for _, (theirs, _) in pairs),
        "ratio": statistics.median(theirs / ours for (ours, _), (theirs, _) in pairs),
        "same_tokens": torch.equal(a, b),
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
    say("dtype   attnpack tok/s   transformers tok/s   ratio   same tokens")
    rows = []
    for dtype in args.dtypes:
        row = compare(hf, dtype, ids, args.new_tokens, args.rounds)
        ours, theirs = row["attnpack_tokens_per_second"], row["transformers_tokens_per_second"]
        say(f"{dtype:<6}  {ours:14.1f}   {theirs:18.1f}   {row['ratio']:5.2f}   {row['same_tokens']}")
        rows.append(row)
    if args.json:
        print(json.dumps({"threads": torch.get_num_threads(), "shape": list(ids.shape), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
