"""Pictures of benchmarks and of the machine's limits, from the output of `attnpack bench --json`."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoints.strict_json import LONGEST, parse_json, read_bounded
from .colours import AMBER, BLUE, BROWN, GREEN, ORANGE, PINK, SKY
from .memory import STYLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TICKS = (0.2, 0.3, 0.5, 0.7, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 200)  # of an axis of ratios
LOOKS = ((ORANGE, "o"), (AMBER, "P"), (BLUE, "s"), (GREEN, "^"), (PINK, "D"), (BROWN, "v"), (SKY, "X"))
"""Colour and marker of each kind of case; bf16 is hollow."""


def read_bench(path: str | Path) -> dict:
    """The dict that `attnpack bench --json` printed to the file `path`; raises ValueError for another file."""
    try:
        bench = parse_json(read_bounded(Path(path), LONGEST))
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); wants what `attnpack bench --json` printed"
        ) from None
    except ValueError:  # no JSON, or no text
        bench = None
    if not isinstance(bench, dict) or not {"machine", "limits", "results"} <= bench.keys():
        raise ValueError(
            f"{path}: not what `attnpack bench --json` prints; write one with `attnpack bench --json > FILE`"
        )
    return bench


def draw_roofline(axes: Axes, bench: dict) -> None:
    """Draws the speed of each case against its operations per byte, under the machine's roof (Williams et al. 2009).

    The roof is higher for bf16 if the machine multiplies bf16 in pairs. `bench` is a result of `read_bench`.
    """
    from matplotlib.ticker import LogLocator

    limits = bench["limits"]
    flops, read = limits["flops"], limits["bytes_per_second"]
    roofs = {"limit": (flops, "-"), "limit, bf16": (limits.get("bf16_flops", flops), "--")}
    if roofs["limit, bf16"][0] == flops:
        del roofs["limit, bf16"]
    for label, (roof, line) in roofs.items():
        intensities = sorted({2.0**n for n in range(-2, 12)} | {roof / read})  # the ridge, where the limits meet
        axes.plot(intensities, [min(roof, read * x) / 1e9 for x in intensities], line, color="black", label=label)
    results = bench["results"]
    sections: dict[str, list[dict]] = {}
    for each in results:
        sections.setdefault(_kind(each["case"]), []).append(each)
    for (name, cases), (colour, marker) in zip(sections.items(), cycle(LOOKS), strict=False):
        for dtype in dict.fromkeys(each["case"]["dtype"] for each in cases):
            points = [each for each in cases if each["case"]["dtype"] == dtype]
            axes.scatter(
                [each["flops"] / each["bytes"] for each in points],
                [each["flops"] / each["seconds"] / 1e9 for each in points],
                marker=marker,
                color=colour,
                facecolor=colour if dtype == "fp32" else "none",
                s=28,
                label=f"{name}, {dtype}",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=4))
        axis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.set_xlabel("operations for each byte that must be read (FLOP/B)")
    axes.set_ylabel("speed (GFLOP/s)")
    axes.set_title(f"Attention under the limits of {bench['machine']}", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)


def _kind(case: dict) -> str:
    """The section of a case; keys in the processor's cache are another kind, because memory does not limit them."""
    if case.get("cold", True) or case["section"] != "decode":
        return case["section"]
    return "decode, warm"


def draw_times_faster(axes: Axes, bench: dict, section: str, peer: str) -> None:
    """Draws how many times as fast as `peer` each case of `section` is: one bar per case, from 1 to the right, or to
    the left if the peer is faster."""
    rows = [each for each in bench["results"] if each["case"]["section"] == section and peer in each["ratios"]]
    dtypes = list(dict.fromkeys(each["case"]["dtype"] for each in rows))
    colours = {dtype: colour for dtype, (colour, _) in zip(dtypes, STYLES[1:], strict=False)}
    names = [f"{each['case']['name'].removeprefix(section + ' ')}, {each['case']['dtype']}" for each in rows]
    ratios = [each["ratios"][peer] for each in rows]
    colour = [colours[each["case"]["dtype"]] for each in rows]
    bars = axes.barh(names, [ratio - 1 for ratio in ratios], left=1, color=colour)
    axes.bar_label(bars, [f"{ratio:.2f}x" for ratio in ratios], padding=3, fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    high = max(1.4, *ratios)
    margin = 1.08 * high**0.12  # room for the numbers next to the bars
    low, high = min(1, *ratios) / margin, high * margin
    ticks = [tick for tick in TICKS if low <= tick <= high]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(low, high)
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)
    axes.set_ylabel("heads / kv heads, width, length", fontsize=8)
    axes.set_xlabel(f"time of {peer} / time of attnpack (1 = equal)")
    axes.set_title(f"{section}: times as fast as {peer}", fontsize=10)
