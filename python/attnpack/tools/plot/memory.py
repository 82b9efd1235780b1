"""Memory of keys and values against context, for variants and for known models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ... import StaticCache

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart by the colour-blind; line styles and labels say the same without colour.
STYLES = (("#D55E00", "-"), ("#0072B2", "--"), ("#009E73", "-."), ("#CC79A7", ":"), ("#56B4E9", "-"), ("#000000", "--"))


@dataclass(frozen=True)
class KvSizes:
    """What a token leaves in the cache of a model: num_kv_heads keys and values in each layer."""

    label: str
    num_layers: int
    num_kv_heads: int
    head_dim: int  # of keys; of a latent cache its width, kv_lora_rank
    v_head_dim: int  # of values; of a latent cache the rotated key beside the latent, qk_rope_head_dim


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
    """Bytes of keys and values of one sequence of `context` tokens in all layers, read off attnpack's own cache."""
    cache = StaticCache(1, num_kv_heads, context, head_dim, v_head_dim=v_head_dim, dtype=dtype, device="meta")
    return num_layers * cache.nbytes


def model_kv_bytes(sizes: KvSizes, context: int, *, dtype: torch.dtype = torch.bfloat16) -> int:
    """The same of one of MODELS."""
    return kv_bytes(
        sizes.num_kv_heads,
        context,
        num_layers=sizes.num_layers,
        head_dim=sizes.head_dim,
        v_head_dim=sizes.v_head_dim,
        dtype=dtype,
    )


def draw_kv_memory(axes: Axes, contexts: Sequence[int], points: Mapping[str, Sequence[int]], *, title: str) -> None:
    """A line for each entry of `points`: bytes at each of `contexts` tokens. The last one is written out."""
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
