"""Where the keys of attention are spread over several processes: the place at which attnpack.distributed comes in.

A module asks `spread(cache)` before it attends. A cache that is spread answers itself; a sequence that is spread, under
`attnpack.distributed.context_parallel`, is known by context.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import errors


class Spread:
    """What attends in place of a module's own op."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,  # [B, Hq, L, D], before rotation
        key: Tensor,  # [B, Hkv, Lkv, D]
        value: Tensor,  # [B, Hkv, Lkv, Dv]
        **inputs: Any,
    ) -> Tensor:  # [B, L, Hq * Dv]
        raise NotImplementedError

    def attend_latents(
        self,
        module: nn.Module,
        query: Tensor,  # [B, H, L, N + R], before rotation
        latent: Tensor,  # [B, Lkv, C]
        k_rope: Tensor,  # [B, Lkv, R]
        **inputs: Any,
    ) -> Tensor:  # [B, L, H * V], or [B, L, H * C] of a folded module
        raise NotImplementedError

    def positions(self, length: int, device: torch.device) -> Tensor | None:
        """The positions [length] of this process's rows in the whole sequence; None if it has all of them."""
        return None

    generate: Callable[..., Tensor] | None = None
    """The loop of `CausalLM.generate` over such a cache."""


class _Own(threading.local):
    sequences: tuple[Spread, ...] = ()


_own = _Own()
_open: list[Spread] = []  # of all threads; dynamo guards on it, and knows no values of a thread


@contextmanager
def spread_sequence(over: Spread) -> Iterator[None]:
    """A context in which the sequences of this thread are spread."""
    before = _own.sequences
    _own.sequences = (*before, over)
    _open.append(over)
    try:
        yield
    finally:
        _own.sequences = before
        _open.remove(over)


def _sequence() -> Spread | None:
    if not _open:
        return None
    if torch.compiler.is_compiling():
        return _open[-1]
    return _own.sequences[-1] if _own.sequences else None


def spread(cache: object) -> Spread | None:
    """What attends over `cache`, or over a sequence without one; None if this process has all keys."""
    return cache if isinstance(cache, Spread) else _sequence()


def positions_here(length: int, device: torch.device) -> Tensor:
    """The positions [length] of the rows of a sequence that begins here, or of the part of it that is here."""
    over = _sequence()
    places = None if over is None else over.positions(length, device)
    return torch.arange(length, device=device) if places is None else places


def refuse_spread(what: str, fix: str) -> None:
    """Raises under `context_parallel` for what is not done there."""
    if _sequence() is not None:
        raise ValueError(f"attnpack: {what} under context_parallel, which spreads padded sequences alone: {fix}")


def check_lengths(name: str, lengths: Tensor | None, x: Tensor) -> None:
    """`errors.check_lengths`, unless x is a part of a sequence: lengths are then those of whole sequences, and the
    operator checks them."""
    if _sequence() is None:
        errors.check_lengths(name, lengths, x)
