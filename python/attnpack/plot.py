"""Pictures of what the variants cost. Needs matplotlib, which attnpack itself does not."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from . import StaticCache

if TYPE_CHECKING:
    from .bench import Result
    from .bench_cases import Limits

# Okabe and Ito's colours, told apart by the colour-blind; line styles and labels say the same without colour.
STYLES = (("#D55E00", "-"), ("#0072B2", "--"), ("#009E73", "-."), ("#CC79A7", ":"))


def kv_bytes(num_kv_heads: int, context: int, *, num_layers: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one sequence of `context` tokens in all layers, read off attnpack's own cache."""
    cache = StaticCache(1, num_kv_heads, context, head_dim, dtype=dtype, device="meta")
    return num_layers * cache.nbytes


def plot_kv_memory(
    path: str | Path,
    variants: Mapping[str, int] | None = None,
    contexts: Sequence[int] = (1024, 4096, 16384, 65536, 131072),
    *,
    num_layers: int = 32,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, list[int]]:
    """Writes one PNG, KV memory against context, a line a variant, and returns its points in bytes.

    `variants` maps a name to its number of kv heads; by default 32 query heads as MHA, GQA-8 and MQA.
    """
    variants = variants or {"MHA (32 kv heads)": 32, "GQA-8 (8 kv heads)": 8, "MQA (1 kv head)": 1}
    points = {
        name: [kv_bytes(heads, n, num_layers=num_layers, head_dim=head_dim, dtype=dtype) for n in contexts]
        for name, heads in variants.items()
    }
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5), dpi=120, layout="constrained")
    for (name, sizes), (colour, line) in zip(points.items(), STYLES, strict=False):
        gibibytes = [size / 2**30 for size in sizes]
        axes.plot(contexts, gibibytes, line, color=colour, marker="o", markersize=4, label=name)
        axes.annotate(f"{gibibytes[-1]:.3g}", (contexts[-1], gibibytes[-1]), xytext=(6, -3), textcoords="offset points")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(contexts, [f"{n // 1024}k" for n in contexts])
    axes.yaxis.set_major_formatter(lambda size, _: f"{size:.3g}")
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("KV cache of one sequence (GiB)")
    axes.set_title(f"KV memory against context: {num_layers} layers, head dim {head_dim}, {dtype_name(dtype)}")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)
    return points


def plot_roofline(path: str | Path, limits: "Limits", results: Sequence["Result"]) -> None:
    """Writes one PNG: what each case of a benchmark reaches against its operations a byte, under the machine's roof
    (Williams et al. 2009), which is higher for bf16 where the machine multiplies it in pairs."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5), dpi=120, layout="constrained")
    intensities = [2.0**n for n in range(-2, 12)]
    roofs = {"limit": (limits.flops, "-"), "limit, bf16": (limits.bf16_flops, "--")}
    if limits.bf16_flops == limits.flops:
        del roofs["limit, bf16"]
    for label, (flops, line) in roofs.items():
        roof = [min(flops, limits.bytes_per_second * x) / 1e9 for x in intensities]
        axes.plot(intensities, roof, line, color="black", label=label)
    markers = dict(zip(dict.fromkeys(each.case.section for each in results), "os^Dv", strict=False))
    for (section, dtype), colour in zip(
        dict.fromkeys((each.case.section, each.case.dtype) for each in results),
        (colour for _ in range(9) for colour, _ in STYLES),
        strict=False,
    ):
        points = [each for each in results if (each.case.section, each.case.dtype) == (section, dtype)]
        axes.scatter(
            [each.case.flops / each.case.bytes for each in points],
            [each.case.flops / each.seconds / 1e9 for each in points],
            marker=markers[section],
            color=colour,
            s=28,
            label=f"{section}, {dtype}",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("operations for each byte that must be read (FLOP/B)")
    axes.set_ylabel("GFLOP/s")
    axes.set_title("Attention on this machine, under its limits")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path)
    plt.close(figure)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pyplot():
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("pictures need matplotlib, which is not installed: pip install matplotlib") from None
    matplotlib.use("agg")  # no display
    import matplotlib.pyplot

    return matplotlib.pyplot
