"""The results of a comparison: one entry for each variant, and one table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from .record import Record


@dataclass(frozen=True)
class Entry:
    """A variant over all seeds. Spreads are standard deviations over the seeds, None for a single seed."""

    loss: float  # mean, in nats per byte of held-out text
    loss_spread: float | None
    losses: list[float]  # of each seed
    difference: float  # mean of loss - loss of the first variant with the same seed
    difference_spread: float | None
    parameters: int
    cache_bytes_per_token: float
    cache_bytes: int
    ms_per_token: float
    tokens_per_second: float


def entries_of(record: Record, parameters: Mapping[str, int], seeds: int) -> dict[str, Entry]:
    """The entries of those variants, the keys of `parameters`, for which runs are there; none before the first of them,
    with which the others are compared, has a run."""
    first = record.losses(next(iter(parameters)), seeds)
    return {
        variant: _entry(record, variant, count, seeds, first)
        for variant, count in parameters.items()
        if first and record.of(variant, seeds)
    }


def _entry(record: Record, variant: str, parameters: int, seeds: int, first: Sequence[float]) -> Entry:
    losses, decoding = record.losses(variant, seeds), record.decoding[variant]
    apart = [loss - other for loss, other in zip(losses, first, strict=False)]
    return Entry(
        loss=statistics.fmean(losses),
        loss_spread=_spread(losses),
        losses=losses,
        difference=statistics.fmean(apart),
        difference_spread=_spread(apart),
        parameters=parameters,
        cache_bytes_per_token=decoding.cache_bytes_per_token,
        cache_bytes=decoding.cache_bytes,
        ms_per_token=decoding.ms_per_token,
        tokens_per_second=statistics.fmean(run.tokens_per_second for run in record.of(variant, seeds)),
    )


def _spread(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def format_table(entries: Mapping[str, Entry]) -> str:
    """A table in Markdown, which reads well as it is."""
    first = next(iter(entries))
    rows = [
        (
            "variant",
            "parameters",
            "loss",
            f"against {first}",
            "cache bytes per token",
            "ms per token",
            "tokens/s trained",
        )
    ]
    for name, entry in entries.items():
        against = "" if name == first else _with_spread(entry.difference, entry.difference_spread, "+")
        rows.append(
            (
                name,
                f"{entry.parameters:,}",
                _with_spread(entry.loss, entry.loss_spread),
                against,
                f"{entry.cache_bytes_per_token:,.0f}",
                f"{entry.ms_per_token:.2f}",
                f"{entry.tokens_per_second:,.0f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]) + " |" for cells in rows
    ]
    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _with_spread(value: float, spread: float | None, sign: str = "") -> str:
    return f"{value:{sign}.3f}" + ("" if spread is None else f" ± {spread:.3f}")


def as_dicts(entries: Mapping[str, Entry]) -> dict[str, dict]:
    return {name: asdict(entry) for name, entry in entries.items()}
