"""The experiment of the GQA paper (Ainslie et al. 2023, section 3.3), on two cores: one JSON of figures.

    python benchmarks/uptraining.py [--out FILE] [--steps N] [--seeds 3] [--smollm2 [STEPS]] [--only NAME] [--table]

(a) Conversion: a small MHA language model (bytes of the standard library) becomes GQA-4, GQA-2 and MQA. The methods are
the mean of each group's heads, the first head, a new random head, and the mean after regions of 2 x 2 or 4 x 4 numbers
were averaged. Then the model is trained for another 5 and 10% of the steps.
(b) With --smollm2: SmolLM2-135M with one kv head by each method, and with latent attention at several ranks. The
figures are the perplexity before and after distillation: 65 steps for each method, or STEPS (0: no distillation). All
methods get the same number of steps.
(c) KV bytes per token and ms per token of SmolLM2 in these forms.
(d) MHA and MQA with one parameter budget, trained from scratch. `attnpack compare` compares more variants so.

Each figure is stored when it is computed, so the same command continues where the last one stopped. Two processes with
different --only may share a file: `taskset -c 0 ... --only "smollm2/1 kv head, mean"`. For a cell without date and
machine, those at the top of the file apply. This is no test.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import small_models as small
import torch
from attnpack import convert
from attnpack.progress import progress
from attnpack.tools import bench
from smollm2_heads import smollm2_cells

Cell = tuple[str, Callable[[], dict[str, Any]]]
METHODS = {
    "mean": ("mean", 1),
    "first": ("first", 1),
    "random": ("random", 1),
    "mean w2": ("mean", 2),
    "mean w4": ("mean", 4),
}
SMOLLM2_STEPS = 65


class Experiment:
    """The cells by name, the texts, and the MHA models from which conversions start."""

    def __init__(self, steps: int, seeds: int, models: Path) -> None:
        self.steps, self.seeds, self.models = steps, seeds, models
        self.text, self.held_out = small.read_text()

    def cells(self) -> Iterator[Cell]:
        for seed in range(self.seeds):
            for variant in small.VARIANTS:
                yield f"scratch/{variant}/{seed}", lambda v=variant, s=seed: self.from_scratch(v, s)
            yield f"uptrain/MHA/original/{seed}", lambda s=seed: self.uptrain(self.original(s), s)
            for heads in (4, 2, 1):
                for method in METHODS:
                    yield (
                        f"uptrain/{heads}/{method}/{seed}",
                        lambda h=heads, m=method, s=seed: self.uptrain(self.converted(h, m, s), s),
                    )

    def from_scratch(self, variant: str, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = small.make_model(variant)
        course = small.train_model(model, self.text, self.steps, seed)
        if variant == "MHA":
            self.models.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), self.models / f"mha_{seed}.pt")
        return {
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "loss": small.held_out_loss(model, self.held_out),
            "seconds": round(course.seconds, 1),
            **course.stability(),
        }

    def original(self, seed: int):
        model = small.make_model("MHA")
        model.load_state_dict(torch.load(self.models / f"mha_{seed}.pt", weights_only=True))
        return model

    def converted(self, heads: int, method: str, seed: int):
        name, window = METHODS[method]
        draw = {"seed": seed} if name == "random" else {}
        return convert.to_gqa(self.original(seed), heads, name, window=window, **draw)

    def uptrain(self, model, seed: int) -> dict[str, Any]:
        """Losses after 0, 5 and 10% of the original steps."""
        losses = {}

        def measure(percent: int) -> Callable[[], None]:
            return lambda: losses.update({f"loss_{percent}": small.held_out_loss(model, self.held_out)})

        at = {self.steps * percent // 100: measure(percent) for percent in (0, 5, 10)}
        course = small.train_model(model, self.text, self.steps // 10, 1000 + seed, anneal=False, at=at)
        return {**losses, "seconds": round(course.seconds, 1)}


def read_record(path: Path) -> dict[str, Any]:
    """The figures of an earlier run."""
    try:
        record = json.loads(path.read_text())
        record["about"]["seeds"], record["cells"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        sys.exit(f"{path}: holds no figures of this experiment ({error}); give another --out, or run it anew")
    return record


def compute_cells(cells: list[Cell], out: Path, about: dict[str, Any], distilled: int = 0) -> dict[str, Any]:
    """Computes the cells that `out` lacks, or that have another number of `distilled` steps (0: any number). Each cell
    is in the file before the next begins."""
    record = read_record(out) if out.is_file() else {"about": about, "cells": {}}
    for name in ("steps", "seeds", "sizes"):
        if record.get("about", {}).get(name) != about[name]:
            sys.exit(f"{out}: was made with another {name}: pass the same one, or choose another --out")

    def done(name: str) -> bool:
        trained = distilled > 0 and name.startswith("smollm2/") and name != "smollm2/original"
        return name in record["cells"] and not (trained and record["cells"][name].get("steps", 0) != distilled)

    for name, figures in progress([cell for cell in cells if not done(cell[0])], "cells"):
        found = figures() | {name: about[name] for name in ("date", "machine")}
        record = read_record(out) if out.is_file() else record  # another process may have added cells
        record["cells"][name] = found
        partial = out.with_suffix(f".partial{os.getpid()}")
        partial.unlink(missing_ok=True)
        with partial.open("x") as file:  # no link is followed
            json.dump(record, file, indent=1)
        os.replace(partial, out)
    missing = [name for name, _ in cells if name not in record["cells"]]
    if missing:
        sys.exit(f"{out}: has no figures for {', '.join(missing)}: run the same command again")
    return record


def mean_and_spread(cells: dict[str, Any], prefix: str, figure: str) -> str:
    """Mean over seeds, and the largest distance of a seed from the mean."""
    values = [cell[figure] for name, cell in cells.items() if name.rpartition("/")[0] == prefix]
    mean = sum(values) / len(values)
    return f"{mean:8.3f} ±{max(abs(value - mean) for value in values):.3f}"


def format_record(record: dict[str, Any]) -> str:
    cells, about = record["cells"], record["about"]
    lines = [
        f"held-out loss (nats per byte) of {about['seeds']} seeds, mean ± largest distance; {about['steps']} steps",
        "",
    ]
    lines.append(f"{'converted to, by':22}{'0%':>15}{'5%':>15}{'10%':>15}   of the steps, uptrained")
    rows = [("MHA", "original"), *((str(heads), method) for heads in (4, 2, 1) for method in METHODS)]
    for heads, method in rows:
        losses = (mean_and_spread(cells, f"uptrain/{heads}/{method}", f"loss_{percent}") for percent in (0, 5, 10))
        lines.append(
            f"{(heads if heads == 'MHA' else f'{heads} kv heads') + ', ' + method:22}"
            + "".join(f"{x:>15}" for x in losses)
        )
    lines += [
        "",
        f"{'from scratch':12}{'parameters':>11}{'loss':>15}{'spikes':>15}{'gradient norm':>16}",
    ]
    for variant in small.VARIANTS:
        prefix = f"scratch/{variant}"
        lines.append(
            f"{variant:12}{cells[prefix + '/0']['parameters']:11}{mean_and_spread(cells, prefix, 'loss'):>15}"
            f"{mean_and_spread(cells, prefix, 'loss_spikes'):>15}"
            f"{mean_and_spread(cells, prefix, 'gradient_norm_mean'):>16}"
        )
    smollm2 = {name: cell for name, cell in cells.items() if name.startswith("smollm2/")}
    if smollm2:
        heading = f"{'SmolLM2-135M':24}{'perplexity':>12}{'uptrained':>11}{'minutes':>9}{'steps':>7}"
        lines += ["", heading + f"{'KV bytes per token':>20}{'ms per token':>14}"]
    for name, cell in smollm2.items():
        after = "-" if cell["uptrained"] is None else f"{cell['uptrained']:.2f}"
        kind = name.removeprefix("smollm2/")
        shape = {"original": "3 kv heads"}.get(kind, "1 kv heads" if kind.startswith("1 ") else kind)
        took = cells[f"decode/SmolLM2, {shape}"]["ms_per_token"]
        lines.append(
            f"{kind:24}{cell['perplexity']:12.2f}{after:>11}{cell['minutes']:9g}"
            f"{cell.get('steps', '-'):>7}{cell['kv_bytes_per_token']:20}{took:14.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("uptraining.json"), help="file of the figures; an existing one is completed"
    )
    parser.add_argument("--steps", type=int, default=600, help="steps of the models trained from scratch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--smollm2",
        type=int,
        nargs="?",
        const=SMOLLM2_STEPS,
        metavar="STEPS",
        help=f"also convert SmolLM2, and uptrain each model by so many steps ({SMOLLM2_STEPS}; 0: none)",
    )
    parser.add_argument("--only", default="", metavar="NAME", help="only the cells whose names begin with NAME")
    parser.add_argument("--table", action="store_true", help="only print the figures in --out")
    args = parser.parse_args()
    if args.steps < 300 or args.seeds < 1 or (args.smollm2 or 0) < 0:
        parser.error("--steps: want at least 300, --seeds at least 1, --smollm2 at least 0")
    if args.table:
        record = read_record(args.out)
        print(format_record(record))
        about = record["about"]
        wanted = [*Experiment(about["steps"], about["seeds"], args.out).cells(), *smollm2_cells(0)]
        if missing := [name for name, _ in wanted if name not in record["cells"]]:
            sys.exit(f"{args.out}: has no figures for {', '.join(missing)}")
        return
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": bench.machine(),
        "steps": args.steps,
        "seeds": args.seeds,
        "sizes": {**small.SIZES, "length": small.LENGTH, "batch": small.BATCH},
    }
    torch.set_num_threads(1)  # for models this small the start of a second thread costs more than it gains
    experiment = Experiment(args.steps, args.seeds, args.out.with_suffix(".models"))
    cells = list(experiment.cells())
    if args.smollm2 is not None:
        cells += smollm2_cells(args.smollm2)
    wanted = [cell for cell in cells if cell[0].startswith(args.only)]
    if not wanted:
        known = ", ".join(name for name, _ in cells)
        parser.error(f"--only: no cell begins with {args.only!r}; those of smollm2 need --smollm2; there are {known}")
    record = compute_cells(wanted, args.out, about, args.smollm2 or 0)
    print(f"{args.out}: has {args.only!r}" if args.only else format_record(record))


if __name__ == "__main__":
    main()
