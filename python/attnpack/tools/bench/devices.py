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
    """torch's current CUDA device, timed by CUDA events around graph replays: without the time of Python."""

    device = "cuda"
    MOST_GRAPHS = 16  # they keep memory

    def __init__(self) -> None:
        self._graphs: dict[Callable, torch.cuda.CUDAGraph | None] = {}
        self._other: torch.Tensor | None = None  # for empty_caches

    def name(self) -> str:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        size = f"{properties.multi_processor_count} multiprocessors"
        return f"{properties.name}, {size}, driver {_driver_version()}, CUDA {torch.version.cuda}"

    def limits(self) -> Limits:
        """Measured rates of large matrix products, and of a kernel that reads and writes as many bytes, which count
        twice. A copy would not do: as a node of a graph it is slower than a kernel."""
        source = torch.empty(1 << 28, device="cuda")
        target = torch.empty_like(source)
        copied = 2 * source.nbytes / self._median_seconds(lambda: torch.neg(source, out=target))
        rates = [self._product_flops(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
        return Limits(rates[0], rates[1], copied, rates[2])

    def _product_flops(self, dtype: torch.dtype) -> float:
        size = 4096 if dtype == torch.float32 else 8192
        x = torch.randn(size, size, device="cuda", dtype=dtype)
        return 2 * size**3 / self._median_seconds(lambda: x @ x)

    def _median_seconds(self, call: Callable) -> float:
        return statistics.median(self.seconds(call) for _ in range(10))

    def empty_caches(self) -> None:
        """Reads more than the L2 cache holds. Writing would leave lines to be written back during the timed call."""
        if self._other is None:
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            self._other = torch.ones(2 * properties.L2_cache_size // 4, device="cuda")
        self._other.sum()

    def seconds(self, call: Callable) -> float:
        """The time of a replay of the call. A call that cannot be captured waits behind a kernel that sleeps, so that
        the device finds all its kernels in the queue."""
        if call not in self._graphs:
            if len(self._graphs) >= self.MOST_GRAPHS:
                self._graphs.clear()
            self._graphs[call] = _captured(call)
        graph = self._graphs[call]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if graph is None:
            torch.cuda._sleep(2_000_000)  # cycles: about a millisecond
        start.record()
        call() if graph is None else graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def peak_bytes(self, call: Callable) -> int:
        """How far one call raises the memory that torch has allocated on the device."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before


def _captured(call: Callable) -> torch.cuda.CUDAGraph | None:
    """The call as a CUDA graph, or None where it cannot be captured: it may wait for the device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


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
    if not _C.cuda_kernels_run(torch.cuda.current_device()):
        raise ValueError(
            f"--device is '{device}', but attnpack's CUDA kernels do not run there, and ATen ops would be timed in "
            "their place: `attnpack info` says why"
        )
    return Cuda()
