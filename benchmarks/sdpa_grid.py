"""F.scaled_dot_product_attention with and without attnpack.backend.sdpa, over a grid of shapes, in turns.

    python benchmarks/sdpa_grid.py [--rounds N] [--only TEXT] [--json FILE]

A ratio is torch's time divided by attnpack's: above 1 attnpack is faster. Each figure is the median over the rounds of
the ratio of two neighbouring timings. The last lines name the worst cases.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attnpack
import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST_SECONDS = 0.02  # of one timing

# name: batch, heads, kv heads, q_len, kv_len, head_dim, keywords
SHAPES = {
    "tiny": (1, 4, 4, 4, 4, 16, {}),
    "small": (2, 8, 8, 32, 32, 64, {}),
    "one head": (1, 1, 1, 128, 128, 64, {}),
    "encoder, MiniLM": (8, 12, 12, 128, 128, 32, {}),
    "encoder, masked": (8, 12, 12, 128, 128, 32, {"mask": "padding"}),
    "encoder, ViT": (4, 12, 12, 197, 197, 64, {}),
    "encoder, Whisper": (1, 8, 8, 1500, 1500, 64, {}),
    "cross, Whisper": (1, 8, 8, 4, 1500, 64, {}),
    "diffusion": (2, 8, 8, 1024, 1024, 40, {}),
    "diffusion, text": (2, 8, 8, 1024, 77, 40, {}),
    "causal": (1, 12, 12, 512, 512, 64, {"is_causal": True}),
    "causal, long": (1, 8, 8, 2048, 2048, 128, {"is_causal": True}),
    "causal, mask": (2, 12, 12, 256, 256, 64, {"mask": "causal"}),
    "additive mask": (2, 12, 12, 256, 256, 64, {"mask": "additive"}),
    "gqa": (1, 32, 8, 256, 256, 128, {"is_causal": True, "enable_gqa": True}),
    "gqa, decode": (1, 32, 8, 1, 1024, 128, {"enable_gqa": True}),
    "decode": (1, 12, 12, 1, 64, 64, {}),
    "decode, long": (1, 32, 32, 1, 4096, 128, {}),
    "decode, batch": (16, 12, 12, 1, 256, 64, {"mask": "padding"}),
    "few keys": (1024, 8, 8, 1, 16, 64, {}),
    "one key": (4096, 8, 8, 1, 1, 40, {}),
    "wide heads": (1, 4, 4, 256, 256, 256, {}),
    "odd": (3, 5, 5, 37, 91, 24, {}),
}
LAYOUTS = ("contiguous", "projected")  # projected: [batch, length, heads, head_dim], transposed


def make_inputs(shape: tuple, dtype: torch.dtype, layout: str) -> tuple[tuple[Tensor, ...], dict]:
    batch, heads, kv_heads, q_len, kv_len, dim, given = shape
    keywords = dict(given)
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, length: int) -> Tensor:
        sizes = (batch, heads, length, dim) if layout == "contiguous" else (batch, length, heads, dim)
        x = torch.randn(sizes, generator=generator).to(dtype)
        return x if layout == "contiguous" else x.transpose(1, 2)

    inputs = draw(heads, q_len), draw(kv_heads, kv_len), draw(kv_heads, kv_len)
    kind = keywords.pop("mask", None)
    if kind == "padding":
        lengths = torch.linspace(kv_len // 2, kv_len, batch).long()
        keywords["attn_mask"] = (torch.arange(kv_len) < lengths[:, None])[:, None, None]
    elif kind == "causal":
        keywords["attn_mask"] = torch.ones(q_len, kv_len, dtype=torch.bool).tril()
    elif kind == "additive":
        keywords["attn_mask"] = torch.randn(batch, 1, q_len, kv_len, generator=generator).to(dtype)
    return inputs, keywords


def attention_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, shape in SHAPES.items():
        for dtype_name, dtype in DTYPES.items():
            for layout in LAYOUTS:
                inputs, keywords = make_inputs(shape, dtype, layout)
                label = f"{name} | {dtype_name} | {layout}"
                yield f"{label} | forward", forward(inputs, keywords)
                if shape[3] > 1:
                    yield f"{label} | training", training(inputs, keywords)


def forward(inputs: tuple[Tensor, ...], keywords: dict) -> Callable[[], object]:
    def call() -> Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(*inputs, **keywords)

    return call


def training(inputs: tuple[Tensor, ...], keywords: dict) -> Callable[[], object]:
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    ones = torch.ones_like(inputs[0])

    def call() -> object:
        return torch.autograd.grad(F.scaled_dot_product_attention(*leaves, **keywords), leaves, ones)

    return call


def module_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """torch's own modules, whose fast paths are on without attnpack and off with it."""
    torch.manual_seed(0)
    x = torch.randn(8, 128, 384)
    padding = torch.arange(128) >= torch.linspace(32, 128, 8).long()[:, None]
    attention = nn.MultiheadAttention(384, 12, batch_first=True).eval()
    layer = nn.TransformerEncoderLayer(384, 12, 1536, activation="gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    calls: dict[str, Callable[[], object]] = {
        "nn.MultiheadAttention": lambda: attention(x, x, x, need_weights=False),
        "nn.MultiheadAttention, padded": lambda: attention(x, x, x, key_padding_mask=padding, need_weights=False),
        "nn.TransformerEncoder": lambda: encoder(x),
        "nn.TransformerEncoder, padded": lambda: encoder(x, src_key_padding_mask=padding),
    }
    for name, call in calls.items():
        yield f"{name} | fp32 | eval | forward", torch.no_grad()(call)


def seconds(call: Callable[[], object], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) / times


def measure(call: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """(torch's time, attnpack's time, the median of their ratios)."""
    times = max(1, min(200, int(MOST_SECONDS / max(seconds(call, 2), 1e-7))))
    torchs, ours = [], []
    for i in range(rounds):
        for replaced in (False, True) if i % 2 else (True, False):
            if replaced:
                with attnpack.backend.sdpa():
                    ours.append(seconds(call, times))
            else:
                torchs.append(seconds(call, times))
    ratio = statistics.median(a / b for a, b in zip(torchs, ours, strict=True))
    return statistics.median(torchs), statistics.median(ours), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    measure(next(attention_cases())[1], 20)  # warms the process up
    for name, call in [*attention_cases(), *module_cases()]:
        if args.only in name:
            results[name] = measure(call, args.rounds)
            torch_time, our_time, ratio = results[name]
            print(f"{name:<62} {torch_time * 1e6:10.1f} us {our_time * 1e6:10.1f} us {ratio:6.2f}x", flush=True)
    ratios = {name: ratio for name, (_, _, ratio) in results.items()}
    print(f"\n{len(ratios)} cases: median {statistics.median(ratios.values()):.2f}x, slowest", end="")
    print(*(f"\n  {ratios[name]:.2f}x  {name}" for name in sorted(ratios, key=ratios.__getitem__)[:12]))
    if args.json:
        args.json.write_text(json.dumps(ratios, indent=1))


if __name__ == "__main__":
    main()
