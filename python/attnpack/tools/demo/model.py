"""A real grouped-query model, SmolLM2-135M-Instruct, on attnpack's C++ modules: its text, its speed, whether its greedy
tokens are those of transformers, and what it costs with its weights in 4 bits, as the file holds them.
"""

import json
import time
from collections.abc import Callable
from importlib import resources

import torch

from ... import CausalLM, checkpoints
from ...progress import progress
from ..bench import conditions
from ..busy import OtherWork
from ..generate import answer


def run_model(*, say: Callable[..., None], max_new_tokens: int = 128) -> dict:
    """Streams an answer, and says a table of its cost and how many of the stored reference tokens the model gives.
    Returns the figures."""
    path = checkpoints.smollm2_path()
    prompts = reference_prompts()

    def load(weights: str) -> tuple[CausalLM, float]:
        start = time.perf_counter()
        return checkpoints.load(path, weights=weights), time.perf_counter() - start

    tokenizer = checkpoints.load_tokenizer(path)
    model, load_seconds = load("expanded")
    question = next(prompt["prompt"] for prompt in prompts if prompt["chat"])
    say(f"> {question}\n")
    others = OtherWork()
    found = answer(model, tokenizer, question, write=lambda piece: say(piece, end=""), max_new_tokens=max_new_tokens)
    say("\n")
    warning = others.warning()
    stored, stored_seconds = load("stored")
    again = answer(stored, tokenizer, question, write=lambda piece: None, max_new_tokens=max_new_tokens)
    equal = {prompt["name"]: count_equal_tokens(model, prompt) for prompt in progress(prompts, "greedy tokens")}
    wanted = {prompt["name"]: len(prompt["tokens"]) for prompt in prompts}

    attention = model.layers[0].self_attn
    every_head = found.kv_bytes * attention.num_heads // attention.num_kv_heads
    for what, cost in (
        ("weights", f"{found.weight_bytes / 2**20:.0f} MiB in fp32, loaded in {load_seconds:.2f} s"),
        (f"reading {found.prompt_tokens} tokens", f"{1e3 * found.seconds_to_first_token:.0f} ms"),
        (f"writing {found.new_tokens} tokens", f"{1e3 / found.tokens_per_second:.1f} ms each"),
        ("keys and values", f"{found.kv_bytes / 2**20:.1f} MiB, {found.kv_bytes // found.positions:,} bytes per token"),
        ("without shared heads", f"{every_head / 2**20:.1f} MiB"),
        ("as transformers", f"{sum(equal.values())} of {sum(wanted.values())} greedy tokens of {len(prompts)} prompts"),
        (
            "--weights stored",
            f"{again.weight_bytes / 2**20:.0f} MiB as in the file, loaded in {stored_seconds:.2f} s, "
            f"{1e3 / again.tokens_per_second:.1f} ms for each token",
        ),
        ("machine", conditions()),
    ):
        say(f"{what:<22}{cost}")
    if warning:
        say(warning)
    return {
        "prompt": question,
        "answer": found.text,
        "load_seconds": load_seconds,
        "seconds_to_first_token": found.seconds_to_first_token,
        "tokens_per_second": found.tokens_per_second,
        "kv_bytes": found.kv_bytes,
        "weight_bytes": found.weight_bytes,
        "stored": {
            "answer": again.text,
            "load_seconds": stored_seconds,
            "tokens_per_second": again.tokens_per_second,
            "weight_bytes": again.weight_bytes,
        },
        "equal_tokens": equal,
        "all_tokens_equal": equal == wanted,
    }


def reference_prompts() -> list[dict]:
    """Prompts and the greedy tokens that transformers gave for them (scripts/make_reference_tokens.py)."""
    text = resources.files("attnpack").joinpath("tools/data/smollm2_reference.json").read_text(encoding="utf-8")
    return json.loads(text)["prompts"]


def count_equal_tokens(model: CausalLM, prompt: dict) -> int:
    """Number of greedy tokens that equal those of the reference, up to the first difference."""
    ids, wanted = prompt["prompt_ids"], prompt["tokens"]
    tokens = model.generate(torch.tensor([ids]), max_new_tokens=len(wanted))[0, len(ids) :].tolist()
    pairs = zip(tokens, wanted, strict=True)
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(wanted))
