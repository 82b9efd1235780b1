"""Axes of a picture: places on a line of pixels, and the numbers beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence


class Axis:
    """Maps values to pixels from `begin` to `end`, with a margin on both sides. `ticks` are round values between."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        self._begin, self._end = begin, end
        low, high = self._bounds(min(values), max(values))
        self.ticks = self._ticks(low, high)
        self._low, self._high = self._scaled(low), self._scaled(high)

    def __call__(self, value: float) -> float:
        share = (self._scaled(value) - self._low) / (self._high - self._low)
        return self._begin + share * (self._end - self._begin)

    def words(self, tick: float) -> str:
        """The number beside a tick."""
        return f"{tick:,.{self._digits}f}"

    def _bounds(self, low: float, high: float) -> tuple[float, float]:
        margin = 0.1 * (high - low) or 0.1 * abs(high) or 1.0
        return low - margin, high + margin

    def _ticks(self, low: float, high: float) -> list[float]:
        step = _round_step((high - low) / 6)
        self._digits = max(0, -math.floor(math.log10(step)))
        return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]

    def _scaled(self, value: float) -> float:
        return value


class LogAxis(Axis):
    """The same by the logarithm of values above 0; its ticks are powers of two."""

    def words(self, tick: float) -> str:
        return f"{tick:,.0f}" if tick >= 1 else f"{tick:g}"

    def _bounds(self, low: float, high: float) -> tuple[float, float]:
        return low / 1.5, high * 1.5

    def _ticks(self, low: float, high: float) -> list[float]:
        first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
        return [2.0**n for n in range(first, last + 1, max(1, math.ceil((last - first + 1) / 8)))]

    def _scaled(self, value: float) -> float:
        return math.log2(value)


def _round_step(least: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is at least so large."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)
