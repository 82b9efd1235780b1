"""Random models as attnpack loads them, beside transformers: equal logits, or a refusal by a sentence. `configs` and
`ggufs` draw them."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

TEXT = torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(1))
Outcome = tuple[str, str]
"""("equal", "refused" or "no model", what is wrong or "")"""


def compare_logits(load: Callable[[Path], nn.Module], path: Path, wanted: Tensor, what: str) -> Outcome:
    """The logits of TEXT by the model that `load` reads at path, against those wanted; `what` names it."""
    try:
        ours = load(path)
    except ValueError as error:
        said = str(error)
        return "refused", "" if "attnpack" in said or str(path) in said else f"{what}: {said}"
    except Exception as error:
        return "refused", f"{what}: {type(error).__name__}: {error}"
    with torch.no_grad():
        difference = float((ours(TEXT) - wanted).abs().max())
    if difference <= 2e-4 * max(1.0, float(wanted.abs().max())):
        return "equal", ""
    return "equal", f"{what}: logits differ by {difference:.3g} of {float(wanted.abs().max()):.3g}"


def run(
    compare: Callable[[int, Path], Outcome], seed: int, count: int, seconds: float
) -> tuple[dict[str, int], list[str]]:
    """How many came out how, and what is wrong, of `count` seeds from `seed` on, or until the time is up.

    compare takes a seed and a folder to write in.
    """
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    counts, wrong, end = {"equal": 0, "refused": 0, "no model": 0}, [], time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(seed, seed + count):
            outcome, complaint = compare(number, Path(folder))
            counts[outcome] += 1
            if complaint:
                wrong.append(f"seed {number}: {complaint}")
            if time.monotonic() > end:
                break
    return counts, wrong


def report(name: str, seed: int, result: tuple[dict[str, int], list[str]]) -> int:
    """Prints what `run` found. Gives the number of faults."""
    counts, wrong = result
    print(*wrong, f"{name}: {counts} from seed {seed}", sep="\n")
    return len(wrong)
