"""How a generation is timed: as a whole, or from one new token to the next."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from .model_rows import Row

Generate = Callable[[Tensor, int, Callable, bool], Tensor]
"""(prompts [B, L], number of new tokens, callback of each, whether to keep the prompt's keys) -> [B, L + new]."""


class Timed(NamedTuple):
    seconds: float  # of a prefill, or the median of the steps
    tokens: Tensor  # the prompts and the new tokens, [batch, prompt + new_tokens]


def timed(generate: Generate, row: Row, ids: Tensor) -> Timed:
    """Times a generation: as a whole if it is a prefill, else from one new token to the next."""
    stamps: list[float] = []
    start = time.perf_counter()
    tokens = generate(ids, row.new_tokens, lambda *_: stamps.append(time.perf_counter()), row.keep)
    if row.kind == "prefill":
        return Timed(time.perf_counter() - start, tokens)
    # transformers also streams the prompt, so only the last stamps are those of new tokens.
    return Timed(statistics.median(after - before for before, after in pairwise(stamps[-row.new_tokens :])), tokens)
