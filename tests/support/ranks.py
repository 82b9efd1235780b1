"""Functions on several gloo processes, which find each other through a file and stay for the next function."""

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

WAIT = timedelta(seconds=240)
# Imported once, by the server from which all processes fork: each import costs seconds.
PRELOADED = ["attnpack.distributed", "torch.distributed.checkpoint", "torch.distributed.fsdp", "ranks"]


class Ranks:
    """Processes that run one function after the other."""

    def __init__(self, size: int) -> None:
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        self._calls = [context.SimpleQueue() for _ in range(size)]
        self._results = [context.SimpleQueue() for _ in range(size)]
        self._processes = [
            context.Process(target=_serve, args=(rank, size, self._folder.name, *queues), daemon=True)
            for rank, queues in enumerate(zip(self._calls, self._results, strict=True))
        ]
        for process in self._processes:
            process.start()

    def run(self, program: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The result of `program(*arguments)` on each rank."""
        results = self.run_where_some_die(program, *arguments)
        for result in results:
            if isinstance(result, Failure):
                raise RuntimeError(f"a rank failed:\n{result.text}")
        return results

    def run_where_some_die(self, program: Callable[..., Any], *arguments: Any) -> list[Any]:
        """As `run`, with a Failure for a rank that raised or died."""
        for calls in self._calls:
            calls.put((program, arguments))
        return [self._result(rank) for rank in range(len(self._calls))]

    def _result(self, rank: int) -> Any:
        while not self._results[rank]._reader.poll(1):
            if not self._processes[rank].is_alive():
                return Failure(f"rank {rank} died")
        return self._results[rank].get()

    def close(self) -> None:
        for calls in self._calls:
            calls.put(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


class Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _serve(rank: int, size: int, folder: str, calls: Any, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=WAIT)
    while (call := calls.get()) is not None:
        program, arguments = call
        try:
            results.put(program(*arguments))
        except BaseException:
            results.put(Failure(traceback.format_exc()))
    dist.destroy_process_group()
    os._exit(0)  # the interpreter's own end takes seconds


def run_checks(checks: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """The result of each check, or its error as text: "ValueError: ...". All ranks run all of them."""
    results = {}
    for name, check in checks.items():
        torch.manual_seed(0)
        try:
            results[name] = check()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
            if not str(error).startswith("attnpack:") or isinstance(error, RuntimeError):
                results[name] += "\n" + traceback.format_exc()
    return results


def unequal(outcomes: list[dict[str, Any]], names: Any, within: float = 1e-5) -> dict[str, Any]:
    """The checks whose result on a rank is no distance below `within`."""
    found = {}
    for rank in outcomes:
        for name in names:
            if not (isinstance(rank[name], float) and rank[name] < within):
                found[name] = rank[name]
    return found
