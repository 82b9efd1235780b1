"""Tokens per second of SmolLM2-135M-Instruct with attnpack, transformers and llama.cpp, which take turns in one run.

    python benchmarks/generate.py [--dtypes fp32 bf16] [--prompt-tokens 32] [--new-tokens 64] [--batch 1] [--rounds 3]

Generation is greedy. "tokens per second" includes the time of the prompt. "ms per token" is the median time from one
new token to the next, without the prompt, so it measures decoding after a long prompt too. Ratios (medians over the
rounds) say how many times as fast attnpack is. All libraries use torch's number of threads, and a growing cache.
llama.cpp runs if llama-cpp-python is installed and the batch has one row, with weights of the same dtype. This is no
test: it asserts nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import attnpack
import torch
from attnpack.checkpoints import load_tokenizer, smollm2_path
from attnpack.tools.bench.llama_cpp import LlamaCpp

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCRIPT = Path(__file__).parents[1] / "scripts" / "make_reference_tokens.py"


def load_transformers():
    """(model, tokenizer) of transformers from the same file, fp32."""
    spec = importlib.util.spec_from_file_location("make_reference_tokens", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.load_model(), script.load_tokenizer()


class Stamps:
    """Times of the new tokens. Works as a callback of attnpack and as a streamer of transformers."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, *_: object) -> None:
        self.times.append(time.perf_counter())

    put = __call__

    def end(self) -> None:
        pass


def time_generation(generate: Callable[[Stamps], torch.Tensor], new_tokens: int) -> tuple[float, float]:
    """(seconds in all, median seconds from one new token to the next)."""
    stamps, start = Stamps(), time.perf_counter()
    generate(stamps)
    took = time.perf_counter() - start
    return took, statistics.median(after - before for before, after in pairwise(stamps.times[-new_tokens:]))


def compare_libraries(hf, dtype: str, ids: torch.Tensor, new_tokens: int, rounds: int) -> dict:
    """Rates of all libraries for one dtype; `ids` [B, L]."""
    ours = attnpack.CausalLM.from_gguf(smollm2_path(), dtype=DTYPES[dtype])
    hf = hf.to(DTYPES[dtype])
    greedy = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False}
    runs = {
        "attnpack": lambda stamps: ours.generate(ids, max_new_tokens=new_tokens, callback=stamps),
        "transformers": lambda stamps: hf.generate(ids, attention_mask=torch.ones_like(ids), streamer=stamps, **greedy),
    }

    if importlib.util.find_spec("llama_cpp") and len(ids) == 1:
        peer = LlamaCpp(dtype, ids.shape[1] + new_tokens)
        runs["llama.cpp"] = lambda stamps: peer.generate(ids, new_tokens, stamps)

    tokens = {name: run(Stamps()) for name, run in runs.items()}  # also warms up
    # Every second round has the reverse order: if the machine changes its speed within a round, no library gains.
    orders = [list(runs), list(reversed(runs))]
    seconds = [{name: time_generation(runs[name], new_tokens) for name in orders[i % 2]} for i in range(rounds)]

    def ratios(figure: int) -> dict[str, float]:
        peers = [name for name in runs if name != "attnpack"]
        return {
            name: statistics.median(took[name][figure] / took["attnpack"][figure] for took in seconds) for name in peers
        }

    new = ids.shape[0] * new_tokens
    return {
        "dtype": dtype,
        "tokens_per_second": {name: new / statistics.median(took[name][0] for took in seconds) for name in runs},
        "ms_per_token": {name: 1e3 * statistics.median(took[name][1] for took in seconds) for name in runs},
        "ratio": ratios(0),
        "token_ratio": ratios(1),
        "same_tokens": {name: torch.equal(tokens[name], tokens["attnpack"]) for name in ratios(0)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="number of torch's threads [torch's default]")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    args = parser.parse_args()
    if args.new_tokens < 2:
        parser.error("--new-tokens: want at least 2, to time from one to the next")
    if args.threads:
        torch.set_num_threads(args.threads)

    text = "\n".join(topics[name] for name in sorted(topics))
    ids = load_tokenizer(smollm2_path()).encode(text)[: args.prompt_tokens * args.batch]
    ids = torch.tensor(ids).view(args.batch, args.prompt_tokens)
    hf = load_transformers()[0]
    say = (lambda line: None) if args.json else (lambda line: print(line, flush=True))
    say(f"{torch.get_num_threads()} threads, prompt {list(ids.shape)}, {args.new_tokens} new tokens per row")
    say(f"{'dtype':<6}{'':>14}{'tokens per second':>18}{'ms per token':>13}   same tokens")
    rows = []
    for dtype in args.dtypes:
        row = compare_libraries(hf, dtype, ids, args.new_tokens, args.rounds)
        for name, rate in row["tokens_per_second"].items():
            say(f"{dtype:<6}{name:>14}{rate:18.1f}{row['ms_per_token'][name]:13.1f}")
        for name, ratio in row["ratio"].items():
            same = row["same_tokens"][name]
            say(f"{dtype:<6}{'/ ' + name:>14}{ratio:17.2f}x{row['token_ratio'][name]:12.2f}x   {same}")
        rows.append(row)
    if args.json:
        print(json.dumps({"threads": torch.get_num_threads(), "shape": list(ids.shape), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
