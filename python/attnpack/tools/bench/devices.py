"""The devices of `attnpack bench`: their names and limits, and the time and memory of a call."""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ... import _C
from ..memory import peak_bytes
from .cases import Limits


class Cpu:
    """This machine's processor."""

    device = "cpu"

    def __init__(self) -> None:
        self._other: torch.Tensor | None = None  # for empty_caches

    def name(self) -> str:
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        except (OSError, StopIteration):
            return platform.machine()

    def limits(self) -> Limits:
        """Measured rates of multiply-adds in registers and of bytes read in order."""
        return Limits(*_C.limits())

    def empty_caches(self) -> float:
        """Reads more than the last-level cache holds, so that the next call reads its tensors from memory.

        Returns the speed of this read in bytes per second.
        """
        if self._other is None:
            self._other = torch.ones(max(256 << 20, _C.last_level_cache_bytes() * 5 // 4) // 4)
        return _C.read_bytes_per_second(self._other)

    def seconds(self, call: Callable) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def peak_bytes(self, call: Callable) -> int | None:
        return peak_bytes(call)


class Cuda:
    """torch's current CUDA device, timed by CUDA events."""

    device = "cuda"

    def name(self) -> str:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        size = f"{properties.multi_processor_count} multiprocessors"
        return f"{properties.name}, {size}, driver {_driver_version()}, CUDA {torch.version.cuda}"

    def limits(self) -> Limits:
        """Measured rates of large matrix products and of a copy, whose bytes count twice: as read and as written."""
        source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
        target = torch.empty_like(source)
        copied = 2 * source.numel() / self._median_seconds(lambda: target.copy_(source))
        rates = [self._product_flops(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
        return Limits(rates[0], rates[1], copied, rates[2])

    def _product_flops(self, dtype: torch.dtype) -> float:
        size = 4096 if dtype == torch.float32 else 8192
        x = torch.randn(size, size, device="cuda", dtype=dtype)
        return 2 * size**3 / self._median_seconds(lambda: x @ x)

    def _median_seconds(self, call: Callable) -> float:
        return statistics.median(self.seconds(call) for _ in range(10))

    def empty_caches(self) -> None:
        """Overwrites more than the L2 cache holds."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        torch.zeros(2 * properties.L2_cache_size, device="cuda", dtype=torch.uint8)

    def seconds(self, call: Callable) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def peak_bytes(self, call: Callable) -> int:
        """How far one call raises the memory that torch has allocated on the device."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before


def _driver_version() -> str:
    """The driver's version from nvidia-smi: torch does not give it."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def device_named(device: str) -> Cpu | Cuda:
    if device == "cpu":
        return Cpu()
    if not torch.cuda.is_available():
        raise ValueError(f"--device is '{device}', but this torch sees no CUDA device: pass --device cpu")
    return Cuda()
