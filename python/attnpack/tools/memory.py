"""How much memory this process holds, as Linux tells."""

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path


def resident_bytes(field: str) -> int:
    """VmRSS, the memory of this process that is in use, or VmHWM, the most that was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak_bytes(call: Callable[[], object]) -> int | None:
    """How far one call raises the resident memory of this process; None where Linux does not tell."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed does not count as there already
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        before = resident_bytes("VmRSS")
        call()
        return max(0, resident_bytes("VmHWM") - before)
    except (OSError, AttributeError):
        return None


def available_bytes() -> int:
    """Of memory that nothing uses."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
