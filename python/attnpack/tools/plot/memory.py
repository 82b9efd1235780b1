"""Pictures of the memory of keys and values against the context, for variants and for known models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ... import StaticCache
from .colours import BLACK, BLUE, GREEN, ORANGE, PINK, SKY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Line styles and labels work without colour.
STYLES = ((ORANGE, "-"), (BLUE, "--"), (GREEN, "-."), (PINK, ":"), (SKY, "-"), (BLACK, "--"))


@dataclass(frozen=True)
class KvSizes:
    """The sizes of a model's cache: each token stores num_kv_heads keys and values in each layer."""

    label: str
    num_layers: int
    num_kv_heads: int
    head_dim: int  # width of a key; for a latent cache the width of the latent, kv_lora_rank
    v_head_dim: int  # width of a value; for a latent cache the width of the rotated key, qk_rope_head_dim


# Sizes: Llama 3 in Dubey et al. 2024, table 3; DeepSeek-V3 in DeepSeek-AI 2024, section 4.2; SmolLM2 in its GGUF file.
MODELS = {
    "llama-3-70b": KvSizes("Llama-3 70B: GQA, 80 layers, 8 kv heads of 128", 80, 8, 128, 128),
    "llama-3-8b": KvSizes("Llama-3 8B: GQA, 32 layers, 8 kv heads of 128", 32, 8, 128, 128),
    "deepseek-v3": KvSizes("DeepSeek-V3: MLA, 61 layers, latents of 512 + 64", 61, 1, 512, 64),
    "smollm2-135m": KvSizes("SmolLM2-135M: GQA, 30 layers, 3 kv heads of 64", 30, 3, 64, 64),
}


def kv_bytes(
    num_kv_heads: int,
    context: int,
    *,
    num_layers: int,
    head_dim: int,
    v_head_dim: int | None = None,
    dtype: torch.dtype,
) -> int:
    """Bytes of the keys and values of a sequence of `context` tokens in all layers, counted by attnpack's own cache."""
    cache = StaticCache(1, num_kv_heads, context, head_dim, v_head_dim=v_head_dim, dtype=dtype, device="meta")
    return num_layers * cache.nbytes


def model_kv_bytes(sizes: KvSizes, context: int, *, dtype: torch.dtype = torch.bfloat16) -> int:
    """`kv_bytes` of one of MODELS."""
    return kv_bytes(
        sizes.num_kv_heads,
        context,
        num_layers=sizes.num_layers,
        head_dim=sizes.head_dim,
        v_head_dim=sizes.v_head_dim,
        dtype=dtype,
    )


def draw_kv_memory(axes: Axes, contexts: Sequence[int], points: Mapping[str, Sequence[int]], *, title: str) -> None:
    """Draws a line for each entry of `points`: bytes at each number of `contexts` tokens. The last point of a line has
    its value as a label."""
    for (name, sizes), (colour, line) in zip(points.items(), STYLES, strict=False):
        gibibytes = [size / 2**30 for size in sizes]
        axes.plot(contexts, gibibytes, line, color=colour, marker="o", markersize=4, label=name)
        axes.annotate(
            _size(gibibytes[-1]), (contexts[-1], gibibytes[-1]), xytext=(6, -3), textcoords="offset points", fontsize=9
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(contexts, [f"{n >> 20}M" if n >> 20 else f"{n // 1024}k" for n in contexts])
    axes.yaxis.set_major_formatter(lambda gibibytes, _: _size(gibibytes))
    axes.margins(x=0.17)
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("KV cache of one sequence")
    axes.set_title(title)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)


def _size(gibibytes: float) -> str:
    return f"{gibibytes:.3g} GiB" if gibibytes >= 1 else f"{1024 * gibibytes:.3g} MiB"
