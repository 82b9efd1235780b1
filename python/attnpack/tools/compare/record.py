"""The file of a comparison, compare.json: what was measured so far. It is written anew after each run, so a comparison
that was stopped goes on where it was."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...atomic_write import atomic_file, check_writable
from ...checkpoints.writer import write_json
from ...file_errors import naming
from .decoding import Decoding

NAME = "compare.json"
_FIX = "choose another --out, or remove the file to begin anew"
_FLAGS = {
    "params": "--params",
    "steps": "--steps",
    "learning_rate": "--learning-rate",
    "text_sha256": "--text",
}


@dataclass(frozen=True)
class Run:
    """A model that was trained."""

    loss: float  # held out
    training_loss: float  # the mean of the last steps
    seconds: float
    tokens_per_second: float
    cores_of_others: float | None  # that other processes kept busy meanwhile


class Record:
    """The content of compare.json. Runs are keyed by variant and seed, as "mha/0"."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Reads the record of the folder, or begins one. Raises ValueError if it was made with other settings.

        Args:
            settings: what must be the same for all runs.
            about: where and when the comparison began.
        """
        self.path = folder / NAME
        self.settings, self.about = dict(settings), dict(about)
        self.runs: dict[str, Run] = {}
        self.decoding: dict[str, Decoding] = {}
        if self.path.exists():
            with naming(self.path, "holds no comparison", _FIX):
                self._read(json.loads(self.path.read_text(encoding="utf-8")))

    def _read(self, content: Mapping[str, Any]) -> None:
        self.check_settings(self.path, content["settings"])
        self.about = dict(content["about"])
        self.runs = {key: Run(**figures) for key, figures in content["runs"].items()}
        self.decoding = {name: Decoding(**figures) for name, figures in content["decoding"].items()}

    def check_settings(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Raises ValueError if the file was made with other settings than these."""
        for name, value in self.settings.items():
            if settings[name] != value and name != "text":
                raise ValueError(f"{path}: was made with {_described(name, settings[name], value)}; {_FIX}")

    def write(self, summary: Mapping[str, Any]) -> None:
        """Writes the record, with the summary before it."""
        content = {
            **summary,
            "about": self.about,
            "settings": self.settings,
            "decoding": {name: asdict(each) for name, each in self.decoding.items()},
            "runs": {key: asdict(run) for key, run in self.runs.items()},
        }
        with atomic_file(self.path) as partial:
            write_json(partial, content)

    def cores_of_others(self) -> float | None:
        """The mean over the runs; None where the system does not tell."""
        cores = [run.cores_of_others for run in self.runs.values() if run.cores_of_others is not None]
        return statistics.fmean(cores) if cores else None

    def losses(self, variant: str, seeds: int) -> list[float]:
        """Those of the seeds that have run."""
        return [run.loss for run in self.of(variant, seeds)]

    def of(self, variant: str, seeds: int) -> list[Run]:
        return [self.runs[key] for seed in range(seeds) if (key := f"{variant}/{seed}") in self.runs]


def _described(name: str, was: object, value: object) -> str:
    flag = _FLAGS.get(name)
    if flag is None:
        return f"{name} {json.dumps(was)}, not {json.dumps(value)}, by another release of attnpack"
    return "another --text" if flag == "--text" else f"{flag} {was}, not {value}"


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Makes the folder, and keeps other processes from comparing in it. Raises ValueError, naming --out, if it cannot
    be made or written, or another process has it."""
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"--out: {folder} lies in no folder that exists; make {folder.absolute().parent} first")
    try:
        folder.mkdir(exist_ok=True)
        check_writable(folder / NAME)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ValueError(f"--out: {folder} cannot be written ({error.strerror}); choose another folder") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"--out: another process compares in {folder}; wait for it, or choose another folder"
            ) from None
        yield
    finally:
        os.close(handle)
