"""`attnpack compare`: trains a small language model with each kind of attention, equal in parameters, text and steps,
and puts its loss beside the cost of its cache."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...atomic_write import atomic_file
from ...checkpoints.writer import write_text
from ...progress import counted, duration, finish
from .. import bench
from ..busy import warning_of
from ..threads import threads as torch_threads
from .decoding import CONTEXT, measure_decoding
from .models import Scale, count_parameters, make_model, scale_of
from .picture import draw
from .record import Record, own_folder
from .report import Entry, as_dicts, entries_of, format_table
from .runs import Estimate, Runs, Say
from .text import Text, guessing_loss, read_text
from .variants import check_variants, default_variants

_ONE_THREAD = 1_000_000  # parameters, below which a second thread costs more than it gains


@dataclass(frozen=True)
class Request:
    """The variants to compare, and where the results go."""

    variants: Sequence[str]
    scale: Scale
    seeds: int
    text: Path | None
    out: Path
    threads: int | None = None


def main(args: argparse.Namespace) -> None:
    scale = scale_of(args.params)
    given = {"steps": args.steps, "learning_rate": args.learning_rate}
    scale = replace(scale, **{name: value for name, value in given.items() if value is not None})
    if not 0 < scale.learning_rate < 1:
        raise ValueError(f"--learning-rate: got {scale.learning_rate}, want a number between 0 and 1")
    variants = args.variants or default_variants()
    request = Request(variants, scale, args.seeds, args.text, args.out, args.threads)
    # On stderr, so that stdout has only the results; flushed for those who read through a pipe.
    content = compare(request, functools.partial(print, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps(content))
        return
    print((args.out / "compare.md").read_text(encoding="utf-8"), end="")


def compare(request: Request, say: Say) -> dict[str, Any]:
    """Trains all models of the request, writes compare.json, compare.md and compare.svg into its folder, and returns
    what is in compare.json. Raises ValueError for what does not fit, before anything is written."""
    scale, variants = request.scale, request.variants
    check_variants(variants)
    parameters = {name: count_parameters(make_model(name, scale, device="meta")) for name in variants}
    text = read_text(request.text, scale.length)
    settings = {**asdict(scale), "text": text.name, "text_sha256": text.sha256}
    threads = request.threads or (1 if scale.params < _ONE_THREAD else torch.get_num_threads())
    with own_folder(request.out), torch_threads(threads):
        record = Record(request.out, settings, _about(threads))
        _measure_all(request, record, text, parameters, say)
        entries = entries_of(record, parameters, request.seeds)
        title, guessing = _title(request, text), guessing_loss(text)
        record.write({"title": title, "variants": as_dicts(entries), "guessing_loss": guessing})
        _write(request.out / "compare.svg", str(draw(entries, title, CONTEXT)))
        _write(request.out / "compare.md", _page(title, entries, record, guessing))
        return json.loads(record.path.read_text(encoding="utf-8"))


def _measure_all(request: Request, record: Record, text: Text, parameters: dict[str, int], say: Say) -> None:
    """Brings the record up to all that is asked."""
    scale = request.scale
    runs = Runs(request.out, scale, text, record, say)
    if any(name not in record.decoding for name in request.variants):
        say(f"measures a step of decoding after {CONTEXT:,} tokens")
        models = {name: make_model(name, scale) for name in request.variants}
        record.decoding |= measure_decoding(models, say=say)
    # Seed by seed, so that each variant has a run soon.
    asked = [(name, seed) for seed in range(request.seeds) for name in request.variants]
    left, steps = runs.in_order([(name, seed) for name, seed in asked if f"{name}/{seed}" not in record.runs])
    if not left:
        return
    estimate = Estimate(scale, text)
    estimate.try_out({name: None for name, _ in left})
    rest = estimate.seconds(left, steps)
    say(
        f"left: {len(left)} of {counted(len(asked), 'run')} of {counted(scale.steps, 'step')}, about {duration(rest)}, "
        f"until {finish(rest)}; Ctrl-C keeps what is done, and the same command goes on"
    )
    while left:
        name, seed = left[0]
        run = record.runs[f"{name}/{seed}"] = runs.run(left, estimate)
        record.write({"variants": as_dicts(entries_of(record, parameters, request.seeds))})
        runs.forget()
        left = left[1:]
        rest = estimate.seconds(left)
        ahead = f"; about {duration(rest)} left, until {finish(rest)}" if left else ""
        say(f"{name}, seed {seed}: loss {run.loss:.3f} after {duration(run.seconds)}{ahead}")


def _about(threads: int) -> dict[str, Any]:
    return {
        "attnpack": __version__,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "machine": bench.machine(),
        "threads": threads,
    }


def _title(request: Request, text: Text) -> str:
    scale, seeds = request.scale, request.seeds
    return (
        f"{scale.params:,} parameters in {scale.num_layers} layers of width {scale.embed_dim}, "
        f"{counted(scale.steps, 'step')} of {scale.batch * scale.length:,} bytes, {counted(seeds, 'seed')}, {text.name}"
    )


def _page(title: str, entries: dict[str, Entry], record: Record, guessing: float) -> str:
    first, about = next(iter(entries)), record.about
    several = len(entries[first].losses) > 1
    spread = "±: one standard deviation over the seeds. " if several else ""
    lines = [
        "# attnpack compare",
        "",
        f"{title}; {about['machine']}, {counted(about['threads'], 'thread')}, torch {about['torch']}, {about['date']}.",
        "",
        format_table(entries),
        "",
        f"loss: nats per byte of held-out text; a guess by the bytes' frequencies has {guessing:.3f}. {spread}against "
        f"{first}: the mean of differences between runs of the same seed, which see the same text in the same order. "
        f"Cache and decoding: one sequence in fp32, after {CONTEXT:,} tokens. Cache bytes per token: the bytes of the "
        "cache over these tokens, also where it does not grow.",
        "",
    ]
    if warning := warning_of(record.cores_of_others()):
        lines += [warning, ""]
    return "\n".join([*lines, "![Loss against the bytes of the cache and the time of a step](compare.svg)", ""])


def _write(path: Path, words: str) -> None:
    with atomic_file(path) as partial:
        write_text(partial, words)
