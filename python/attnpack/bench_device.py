"""What `attnpack bench` asks of the device it runs on: its name, its limits, time and memory of a call."""

from __future__ import annotations

import ctypes
import gc
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from . import _C
from .memory import resident_bytes


class Cpu:
    """This machine's processor."""

    device = "cpu"
    unit = "fp32"

    def name(self) -> str:
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        except (OSError, StopIteration):
            return platform.machine()

    def limits(self) -> tuple[float, float]:
        """(flops, bytes a second): multiply-adds in registers, bytes read in order."""
        return _C.limits()

    def seconds(self, call: Callable) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def peak_bytes(self, call: Callable) -> int | None:
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


class Cuda:
    """torch's current CUDA device, timed by its own events."""

    device = "cuda"
    unit = "bf16"

    def name(self) -> str:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"{properties.name}, {properties.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}"

    def limits(self) -> tuple[float, float]:
        """(flops, bytes a second): a large bf16 matrix product, and a copy, of which both ends count."""
        x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        flops = 2 * 8192**3 / self._best(lambda: x @ x)
        source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
        target = torch.empty_like(source)
        return flops, 2 * source.numel() / self._best(lambda: target.copy_(source))

    def _best(self, call: Callable) -> float:
        return statistics.median(self.seconds(call) for _ in range(10))

    def seconds(self, call: Callable) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def peak_bytes(self, call: Callable) -> int:
        """How far one call raises what torch has allocated on the device."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before


def machine(device: str) -> Cpu | Cuda:
    if device == "cpu":
        return Cpu()
    if not torch.cuda.is_available():
        raise ValueError(f"--device is '{device}', but this torch sees no CUDA device: pass --device cpu")
    return Cuda()
