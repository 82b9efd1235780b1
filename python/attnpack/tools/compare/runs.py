"""The runs of a comparison: which are left, how long they will take, and each of them with its state on the disk."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...progress import counted, duration, finish
from ...training import read_state, save_state
from ..busy import OtherWork
from .models import Scale, make_model
from .record import Record, Run
from .text import Text
from .training import ByteTraining, held_out_loss

STATE = "attnpack_compare.pt"
SAVE_EVERY = 60.0  # seconds
Say = Callable[[str], None]


@dataclass
class Estimate:
    """How long runs take. It learns the seconds of a step from a few steps of each variant, and then from each run."""

    scale: Scale
    text: Text
    seconds_per_step: dict[str, float] = field(default_factory=dict)

    def try_out(self, variants: Iterable[str]) -> None:
        for variant in variants:
            work = _training(variant, 0, self.scale, self.text)
            self.seconds_per_step[variant] = min(work.train_step() for _ in range(3))

    def seconds(self, runs: Iterable[tuple[str, int]], done: int = 0) -> float:
        """The seconds of those runs, the first of which has made `done` steps."""
        measuring = len(self.text.held_out) / self.scale.batch / 3  # a forward takes a third of a step
        steps = self.scale.steps + measuring
        whole = sum(self.seconds_per_step[variant] * steps for variant, _ in runs)
        return whole - done * next((self.seconds_per_step[variant] for variant, _ in runs), 0.0)


class Runs:
    """Trains models one after the other. A run that was stopped goes on from its last saved state."""

    def __init__(self, folder: Path, scale: Scale, text: Text, record: Record, say: Say) -> None:
        """Raises ValueError if the folder has a run that was stopped, of other settings than the record's."""
        self._state = folder / STATE
        self._scale, self._text, self._about, self._say = scale, text, record.settings, say
        self._kept = read_state(self._state, "remove it to begin this run anew") if self._state.is_file() else None
        if self._kept is not None:
            record.check_settings(self._state, self._kept["about"])

    def in_order(self, left: list[tuple[str, int]]) -> tuple[list[tuple[str, int]], int]:
        """The runs that are left, with the one that was stopped first, and the steps that it has made."""
        about = self._kept["about"] if self._kept else {}
        stopped = about.get("variant"), about.get("seed")
        if stopped not in left:
            return left, 0
        return [stopped, *(run for run in left if run != stopped)], self._kept["work"]["progress"]["steps"]

    def run(self, left: list[tuple[str, int]], estimate: Estimate) -> Run:
        """The first of the runs that are left."""
        variant, seed = left[0]
        work = self._started(variant, seed)
        others, saved = OtherWork(), time.monotonic()
        try:
            while not work.done:
                work.train_step()
                if time.monotonic() - saved > SAVE_EVERY and not work.done:
                    self._save(work, variant, seed)
                    saved = time.monotonic()
                    estimate.seconds_per_step[variant] = work.spent / work.steps
                    rest = estimate.seconds(left, work.steps)
                    self._say(
                        f"{variant}, seed {seed}: step {work.steps} of {work.total}, training loss "
                        f"{statistics.fmean(work.losses[-20:]):.3f}; about {duration(rest)} left, until {finish(rest)}"
                    )
        except KeyboardInterrupt:
            self._save(work, variant, seed)
            self._say(
                f"\nkept the runs that ended, and {counted(work.steps, 'step')} of this one; the same command goes on"
            )
            raise
        except ValueError as error:
            raise ValueError(f"{variant}, seed {seed}: {error}") from error
        estimate.seconds_per_step[variant] = work.spent / work.steps
        return Run(
            loss=held_out_loss(work.model, self._text.held_out),
            training_loss=statistics.fmean(work.losses[-20:]),
            seconds=round(work.spent, 2),
            tokens_per_second=round(work.total * self._scale.batch * self._scale.length / work.spent, 1),
            cores_of_others=others.cores(),
        )

    def forget(self) -> None:
        """Removes the saved state: its run is in the record."""
        self._state.unlink(missing_ok=True)

    def _started(self, variant: str, seed: int) -> ByteTraining:
        work = _training(variant, seed, self._scale, self._text)
        kept, self._kept = self._kept, None
        if kept and kept["about"] == self._about_run(variant, seed):  # else it is of a run that nobody asks for now
            work.load_state(kept["work"])
            self._say(f"{variant}, seed {seed}: goes on after {counted(work.steps, 'step')}")
        return work

    def _save(self, work: ByteTraining, variant: str, seed: int) -> None:
        save_state(self._state, {"about": self._about_run(variant, seed), "work": work.state()})

    def _about_run(self, variant: str, seed: int) -> dict:
        return {**self._about, "variant": variant, "seed": seed}


def _training(variant: str, seed: int, scale: Scale, text: Text) -> ByteTraining:
    torch.manual_seed(seed)
    settings = {"length": scale.length, "batch": scale.batch, "rate": scale.learning_rate, "seed": seed}
    return ByteTraining(make_model(variant, scale), text.train, scale.steps, **settings)
