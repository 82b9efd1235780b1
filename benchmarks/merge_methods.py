"""How much each way to convert SmolLM2's attention layers changes their outputs: a table, or JSON.

Each of the 30 layers gets the input that it has in the whole model on the standard library's help topics. Methods that
learn from text see other tokens than those on which the errors are measured. Checkpoints can be converted from 3 kv
heads to 1. The case of 2 kv heads, which divides neither 3 nor the 9 query heads, shows which heads "similar" puts into
one group.
"""

import argparse
import json
from pydoc_data.topics import topics

import torch
from attnpack import CausalLM, checkpoints, convert
from attnpack.progress import progress

CASES = {
    "3 -> 1 mean": (1, "mean", None),
    "3 -> 1 first": (1, "first", None),
    "3 -> 1 random": (1, "random", None),
    "3 -> 1 aligned": (1, "aligned", None),
    "3 -> 2 mean of 0 1": (2, "mean", [[0, 1], [2]]),
    "3 -> 2 mean of 1 2": (2, "mean", [[0], [1, 2]]),
    "3 -> 2 mean of 0 2": (2, "mean", [[0, 2], [1]]),
    "3 -> 2 similar": (2, "similar", None),
    "3 -> 2 aligned, similar groups": (2, "aligned", "similar"),
}

RANKS = (64, 128, 192, 320)


def layer_inputs(model: CausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
    """The input of each attention layer, [1, L, E]."""
    seen: list[torch.Tensor] = []
    hooks = [layer.self_attn.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for layer in model.layers]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return seen


def layer_errors(model: CausalLM, ids: torch.Tensor, tokens: int) -> dict[str, list[float]]:
    """Relative error of each layer's output, by case, on the first `tokens` tokens; calibrated on the tokens after
    them."""
    measured, calibration = layer_inputs(model, ids[:, :tokens]), layer_inputs(model, ids[:, tokens:])
    found: dict[str, list[float]] = {name: [] for name in [*CASES, *map(_latent, RANKS)]}
    for layer, x, seen in progress(list(zip(model.layers, measured, calibration, strict=True)), "layers"):
        for name, (heads, method, groups) in CASES.items():
            if groups == "similar":
                groups = convert.similar_groups(layer.self_attn, heads, seen)
            settings = {"seed": 0} if method == "random" else {}
            if method in ("similar", "aligned"):
                settings["calibration"] = seen
            made = convert.to_gqa(layer.self_attn, heads, method, groups=groups, **settings)
            found[name].append(convert.layer_error(layer.self_attn, made, x))
        for rank in RANKS:
            made = convert.to_mla(layer.self_attn, rank, calibration=seen)
            found[_latent(rank)].append(convert.layer_error(layer.self_attn, made, x))
    return found


def _latent(rank: int) -> str:
    return f"latent, {rank} + 64 numbers per token"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tokens", type=int, default=512, help="tokens to measure; three times as many are for calibration"
    )
    parser.add_argument("--json", action="store_true", help="print the error of each layer")
    args = parser.parse_args()
    path = checkpoints.smollm2_path()
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = torch.tensor([checkpoints.load_tokenizer(path).encode(text[: 40 * args.tokens])[: 4 * args.tokens]])
    found = layer_errors(CausalLM.from_gguf(path), ids, args.tokens)
    if args.json:
        print(json.dumps(found))
        return
    print(f"|converted - original| / |original| of SmolLM2's attention outputs, {args.tokens} tokens")
    print(f"{'kv heads and method':34}{'mean':>8}{'least':>8}{'most':>8}  layers")
    for name, values in found.items():
        print(f"{name:34}{sum(values) / len(values):8.3f}{min(values):8.3f}{max(values):8.3f}  {len(values)}")


if __name__ == "__main__":
    main()
