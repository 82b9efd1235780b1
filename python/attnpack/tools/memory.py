"""Memory of this process, as Linux reports it."""

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path


def resident_bytes(field: str) -> int:
    """Bytes of `field`: VmRSS is the resident memory of this process, VmHWM its peak so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak_bytes(call: Callable[[], object]) -> int | None:
    """How far one call raises the resident memory of this process; None if Linux does not report it."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory that earlier calls freed must not count as resident
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = resident_bytes("VmRSS")
        call()
        return max(0, resident_bytes("VmHWM") - before)
    except (OSError, AttributeError):
        return None


def available_bytes() -> int:
    """Bytes of memory that no process uses; all of the memory where the system does not tell."""
    free = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(free) * os.sysconf("SC_PAGE_SIZE")
