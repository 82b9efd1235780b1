"""A real grouped-query model, SmolLM2-135M-Instruct, on attnpack's C++ modules: its text, its speed, and whether its
greedy tokens are those of transformers.
"""

import json
from collections.abc import Callable
from importlib import resources

import torch

from ... import CausalLM, checkpoints
from ...progress import progress
from ..generate import answer


def run_model(*, say: Callable[..., None], max_new_tokens: int = 128) -> dict:
    """Streams an answer, and says its figures and whether the model gives the stored reference tokens. Returns the
    figures."""
    path = checkpoints.smollm2_path()
    prompts = reference_prompts()
    tokenizer = checkpoints.load_tokenizer(path)
    model = checkpoints.load(path)
    question = next(prompt["prompt"] for prompt in prompts if prompt["chat"])
    say(f"> {question}\n")
    found = answer(model, tokenizer, question, write=lambda piece: say(piece, end=""), max_new_tokens=max_new_tokens)
    equal = {prompt["name"]: count_equal_tokens(model, prompt) for prompt in progress(prompts, "greedy tokens")}
    wanted = {prompt["name"]: len(prompt["tokens"]) for prompt in prompts}

    say(f"\n\n{found.new_tokens} tokens, {found.tokens_per_second:.1f} per second after the first (fp32)")
    say(f"{found.kv_bytes:,} bytes of keys and values, {found.kv_bytes // found.positions:,} per token")
    for name, count in equal.items():
        say(f"greedy tokens equal to transformers', prompt {name!r}: {count} of {wanted[name]}")
    return {
        "prompt": question,
        "answer": found.text,
        "tokens_per_second": found.tokens_per_second,
        "kv_bytes": found.kv_bytes,
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
