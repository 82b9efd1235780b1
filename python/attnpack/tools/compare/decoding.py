"""The cost of decoding: the bytes of a cache, and the time of a step. Neither depends on the weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ...progress import duration, finish
from .models import ByteModel

CONTEXT = 4096  # tokens in the cache
_CHUNK = 512  # tokens that fill the cache at a time
_STEPS, _WARM_UP = 24, 4


@dataclass(frozen=True)
class Decoding:
    """The cost of a step of one sequence after `context` tokens."""

    context: int
    cache_bytes: int  # of all layers
    ms_per_token: float  # the median

    @property
    def cache_bytes_per_token(self) -> float:
        return self.cache_bytes / self.context


@torch.inference_mode()
def measure_decoding(
    models: Mapping[str, ByteModel], context: int = CONTEXT, say: Callable[[str], None] | None = None
) -> dict[str, Decoding]:
    """The cost of each model. They take turns, so that a busy machine slows all of them. Steps run in C++, as those of
    `generate` do. Nearly all of the time fills the caches, so after the first one `say` hears how much is left."""
    natives = {name: model.eval().decoder.cpp() for name, model in models.items()}
    caches = {name: native.new_cache() for name, native in natives.items()}
    prompt = torch.randint(256, (1, context), generator=torch.Generator().manual_seed(0))
    began = time.perf_counter()
    for filled, (name, native) in enumerate(natives.items()):
        if filled == 1 and say:
            rest = (time.perf_counter() - began) * (len(natives) - 1)
            say(f"the first of {len(natives)} caches is full; about {duration(rest)} left, until {finish(rest)}")
        for part in prompt.split(_CHUNK, 1):
            native.forward(part, cache=caches[name])
    bytes_of = {name: cache.nbytes for name, cache in caches.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for step in range(_WARM_UP + _STEPS):
        for name, native in natives.items():
            begin = time.perf_counter()
            native.forward(prompt[:, :1], cache=caches[name])
            if step >= _WARM_UP:
                times[name].append(time.perf_counter() - begin)
    return {name: Decoding(context, bytes_of[name], 1e3 * statistics.median(times[name])) for name in models}
