"""Tokens per second of transformers' generate_batch (continuous batching) on SmolLM2-135M-Instruct.

    python benchmarks/continuous_batching.py [--dtypes fp32 bf16] [--requests 16] [--new-tokens 64] [--rounds 3]

Requests of 16 to 1,024 prompt tokens run in one batch, in three ways that take turns: attn_implementation "sdpa",
"sdpa" after `attnpack.hf.register(replace_sdpa=True)`, and "attnpack". Generation is greedy, and the time includes
the prompts. The ratio is sdpa's time / our time, the median over the rounds: above 1 ours is faster. "as alone" is the
share of new tokens that the same way also gives to each request by itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pydoc_data.topics import topics

import attnpack.hf
import torch
from generate import DTYPES, load_transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

WAYS = ("sdpa", "sdpa replaced", "attnpack")
PAGES = ContinuousBatchingConfig(page_size=16, max_batch_tokens=512, max_memory_percent=0.2)


def make_prompts(tokenizer, requests: int) -> list[list[int]]:
    """Token ids of texts whose lengths are spread evenly over powers of 2, in an order that mixes them."""
    ids = tokenizer(" ".join(topics[name] for name in sorted(topics)))["input_ids"]
    lengths = [round(16 * 64 ** (i / max(requests - 1, 1))) for i in range(requests)]
    starts = [1000 * i for i in range(requests)]
    prompts = [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return prompts[::2] + prompts[1::2]


def choose(model, way: str) -> None:
    attnpack.hf.unregister()
    attnpack.hf.register(replace_sdpa=way == "sdpa replaced")
    model.set_attn_implementation("attnpack" if way == "attnpack" else "sdpa")


def run(model, way: str, prompts: list[list[int]], settings: GenerationConfig) -> tuple[float, list[list[int]]]:
    """(seconds, new tokens of each request)."""
    choose(model, way)
    start = time.perf_counter()
    outputs = model.generate_batch(
        prompts, generation_config=settings, continuous_batching_config=PAGES, progress_bar=False
    )
    seconds = time.perf_counter() - start
    failed = [output.error for output in outputs.values() if output.error]
    if failed or len(outputs) != len(prompts):
        raise RuntimeError(f"{way}: {len(outputs)} of {len(prompts)} requests, errors {failed}")
    return seconds, [output.generated_tokens for output in outputs.values()]


def run_alone(model, way: str, prompts: list[list[int]], settings: GenerationConfig) -> list[list[int]]:
    choose(model, way)
    outputs = [model.generate(torch.tensor([ids]), generation_config=settings) for ids in prompts]
    return [output[0, len(ids) :].tolist() for output, ids in zip(outputs, prompts, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    settings = GenerationConfig(max_new_tokens=args.new_tokens, do_sample=False, eos_token_id=[], pad_token_id=0)
    for name in args.dtypes:
        model, tokenizer = load_transformers()
        model = model.to(DTYPES[name])
        prompts = make_prompts(tokenizer, args.requests)
        new = args.new_tokens * len(prompts)
        print(f"{len(prompts)} requests, {sum(map(len, prompts))} prompt tokens, {new} new tokens, {name}, "
              f"{torch.get_num_threads()} threads", flush=True)  # fmt: skip
        for way in WAYS:
            run(model, way, prompts[:2], settings)  # warm up
        results = [{way: run(model, way, prompts, settings) for way in WAYS} for _ in range(args.rounds)]
        for way in WAYS:
            tokens = results[-1][way][1]
            alone = run_alone(model, way, prompts, settings)
            same = sum(
                a == b for one, other in zip(tokens, alone, strict=True) for a, b in zip(one, other, strict=True)
            )
            speed = new / statistics.median(result[way][0] for result in results)
            ratio = statistics.median(result["sdpa"][0] / result[way][0] for result in results)
            print(f"{way:<14} {speed:8.1f} new tokens/s {ratio:6.2f}x sdpa, as alone {same / new:.1%}", flush=True)


if __name__ == "__main__":
    main()
