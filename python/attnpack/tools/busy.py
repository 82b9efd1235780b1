"""How much of the machine other processes take while something is timed."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # the columns idle and iowait of Linux's proc(5)
_MOST = 0.25  # cores; a quiet machine's services take less


class OtherWork:
    """Counts the time that all but this process take from the making of the object on, on Linux."""

    def __init__(self) -> None:
        self._begin = _times()

    def cores(self) -> float | None:
        """How many cores others kept busy on average since then; None where the system does not tell."""
        begin, now = self._begin, _times()
        if begin is None or now is None or now[0] <= begin[0]:
            return None
        seconds, busy, ours = (b - a for a, b in zip(begin, now, strict=True))
        return max(0.0, (busy - ours) / seconds)

    def warning(self) -> str:
        """A sentence for times that others disturbed, or ""."""
        return warning_of(self.cores())


def warning_of(cores: float | None) -> str:
    """The sentence for times that others disturbed by keeping so many cores busy, or ""."""
    if cores is None or cores < _MOST:
        return ""
    return (
        f"The machine was busy: other processes took {cores:.1f} of its {os.cpu_count()} cores meanwhile. Threads "
        "then wait for each other, and times say little: run it again on a quiet machine."
    )


def _times() -> tuple[float, float, float] | None:
    """Seconds: of the clock, that all cores were busy (also for other guests of a host), that this process ran."""
    try:
        ticks = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
        ticks_per_second = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    busy = sum(count for column, count in enumerate(ticks) if column not in _IDLE)
    times = os.times()
    mine = times.user + times.system + times.children_user + times.children_system
    return time.monotonic(), busy / ticks_per_second, mine
