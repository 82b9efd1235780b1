"""The memory of each kind of KV cache, and the error of its rounding: SmolLM2-135M on a text, in chunks, with each kind
of cache beside an exact one. With llama-cpp-python installed, llama.cpp's q8_0 and q4_0 caches on the same tokens.

    python benchmarks/cache_error.py [--tokens N] [--chunk N]

The text is the repository's own README.md and PERFORMANCE.md. Columns: bytes per token; perplexity and its change; the
Kullback-Leibler divergence KL(exact || rounded) of the next token, mean and 99th percentile in 1/1000 nat; for how many
tokens the most likely next token is the same.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import attnpack
import torch
import torch.nn.functional as F
from attnpack.checkpoints import load, load_tokenizer, smollm2_path
from torch import Tensor

ROOT = Path(__file__).parents[1]


def ours(cache: Callable[[], attnpack.KVCache]) -> Callable[[Tensor, int], Iterator[tuple[Tensor, float]]]:
    @torch.no_grad()
    def run(ids: Tensor, chunk: int) -> Iterator[tuple[Tensor, float]]:
        model = load(smollm2_path()).eval()
        caches = attnpack.ModelCache([cache() for _ in range(30)])
        for part in ids.split(chunk, 1):
            yield model(part, cache=caches)[0], caches.nbytes / len(caches)

    return run


def llama_cpp(kind: str) -> Callable[[Tensor, int], Iterator[tuple[Tensor, float]]]:
    def run(ids: Tensor, chunk: int) -> Iterator[tuple[Tensor, float]]:
        import llama_cpp

        number = getattr(llama_cpp, f"GGML_TYPE_{kind}")
        model = llama_cpp.Llama(
            str(smollm2_path()), n_ctx=ids.size(1), n_batch=chunk, n_ubatch=chunk, type_k=number, type_v=number,
            flash_attn=True, logits_all=True, verbose=False,
        )  # fmt: skip
        bits = {"F32": 32, "F16": 16, "Q8_0": 8.5, "Q4_0": 4.5}[kind]
        for begin, part in zip(range(0, ids.size(1), chunk), ids[0].split(chunk), strict=True):
            model.eval(part.tolist())
            yield torch.tensor(model.scores[begin : begin + len(part)]), bits * NUMBERS / 8

    return run


NUMBERS = 30 * 3 * 64 * 2  # of SmolLM2-135M per token: layers, kv heads, head_dim, keys and values


def measure(name: str, run: Callable, ids: Tensor, chunk: int, exact: list[Tensor] | None) -> list[Tensor]:
    """Prints a row; returns the logarithms of the probabilities, chunk by chunk."""
    log_probs, size = [], 0.0
    for logits, size in run(ids, chunk):  # noqa: B007
        log_probs.append(logits.float().log_softmax(-1))
    chosen = ids[0, 1:]
    loss = F.nll_loss(torch.cat(log_probs)[:-1], chosen).double()
    row = f"{name:<34} | {size:>9.0f} | {loss.exp():10.4f}"
    if exact is not None:
        base = F.nll_loss(torch.cat(exact)[:-1], chosen).double()
        apart = torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in zip(exact, log_probs, strict=True)])
        same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in zip(exact, log_probs, strict=True)])
        row += f" | {100 * (loss - base).expm1():+8.3f}% | {1000 * apart.mean():8.3f}"
        row += f" | {1000 * apart.quantile(0.99):8.2f}"
        row += f" | {100 * same.double().mean():6.2f}%"
    print(row, flush=True)
    return log_probs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=256)
    args = parser.parse_args()
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "PERFORMANCE.md"))
    ids = torch.tensor([load_tokenizer(smollm2_path()).encode(text)])[:, : args.tokens]
    print(f"SmolLM2-135M in fp32, {ids.size(1)} tokens in chunks of {args.chunk}")
    print(f"{'cache':<34} | bytes per | perplexity | change    | KL mean  | KL 99%   | same top")
    exact = measure("attnpack DynamicCache (fp32)", ours(attnpack.DynamicCache), ids, args.chunk, None)
    for bits in (8, 4):
        for settings in ({}, {"exact_last": 128}, {"exact_first": 4, "exact_last": 128}):
            name = f"attnpack int{bits}" + "".join(f", {key}={n}" for key, n in settings.items())
            make = lambda bits=bits, settings=settings: attnpack.QuantizedCache(bits, **settings)  # noqa: E731
            measure(name, ours(make), ids, args.chunk, exact)
    if importlib.util.find_spec("llama_cpp"):
        exact = measure("llama.cpp f32", llama_cpp("F32"), ids, args.chunk, None)
        for kind in ("Q8_0", "Q4_0"):
            measure(f"llama.cpp {kind.lower()}", llama_cpp(kind), ids, args.chunk, exact)
    else:
        print("llama.cpp: not installed (pip install llama-cpp-python)")


if __name__ == "__main__":
    main()
