"""Damaged checkpoints: each must load, or be refused by one sentence that names it, in seconds and with little memory.

A child process loads them one after the other, so that a crash is a failure with a seed.
`python scripts/fuzz.py files` runs it.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

MEMORY = 1 << 30  # that loading one checkpoint may add
SECONDS = 10  # of the CPU, for one checkpoint
_PATIENCE = 120  # seconds by the clock, in addition to the requested ones
_NO_MEMORY = re.compile("MemoryError|allocate memory|bad_alloc")


def main(seed: int, seconds: float) -> int:
    """Prints each failure with the seed that makes its file (with 0 seconds); returns the number of failures."""
    first, failures, end = seed, 0, time.monotonic() + seconds
    while True:
        seed, wrong = _watch(seed, end - time.monotonic())
        for line in wrong:
            print(line, flush=True)
        failures += len(wrong)
        if time.monotonic() >= end or failures >= 10:
            break
    print(f"files: {seed - first} from seed {first}, {failures} failures")
    return failures


def _watch(seed: int, seconds: float) -> tuple[int, list[str]]:
    """Runs the child from `seed` on. Returns the seed after its last one, and the failure."""
    command = [sys.executable, __file__, str(seed), str(seconds)]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as out:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": folder}
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, env=environment)
        try:
            ended = child.wait(max(0, seconds) + _PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()
            ended = f"nothing for {_PATIENCE} seconds, and was killed: {child.wait()}"
        out.seek(0)
        lines = out.read().splitlines()
    begun = [int(line.split()[1]) for line in lines if line.startswith("begin ")]
    wrong = [line for line in lines if line.startswith("seed ")]
    last = begun[-1] if begun else seed
    if ended != 0:
        said = " ".join(line for line in lines if not line.startswith(("begin ", "seed ")))
        wrong.append(f"seed {last}: the process ended with {ended} {said[-500:]}")
    return last + 1, wrong


def work(seed: int, seconds: float) -> None:
    """The child process: prints each seed before it begins, and then its failure."""
    from attnpack.tools.memory import resident_bytes

    from fuzz import lies

    with tempfile.TemporaryDirectory() as folder:
        for name, files in enumerate(_undamaged()):
            path = lies.write(files, Path(folder) / str(name))
            (
                load(path),
                load_text(path),
            )  # undamaged checkpoints load; this also imports the modules that loading imports
    mapped = resident_bytes("VmSize") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (mapped, mapped))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        while True:
            print("begin", seed, flush=True)
            used = resource.getrusage(resource.RUSAGE_SELF)
            resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + SECONDS, -1))
            path = lies.write_lie(seed, Path(folder) / "case")
            if complaint := check_file(path):
                print(f"seed {seed}: {complaint}", flush=True)
            shutil.rmtree(Path(folder) / "case")
            seed += 1
            if time.monotonic() >= end:
                return


def _undamaged() -> list[dict[str, bytes]]:
    from fuzz import lies

    return [lies.whole_hf(False), lies.whole_hf(True), lies.whole_gguf(), lies.whole_gguf("llama")]


def check_file(path: Path) -> str | None:
    """The failure of loading the checkpoint's model and tokenizer."""
    for part in (load, load_text):
        try:
            part(path)
        except ValueError as error:
            said = str(error)
            if str(path) not in said or "\n" in said or len(said) > 2000 or _NO_MEMORY.search(said):
                return f"{part.__name__} says {said[:300]!r}"
        except BaseException as error:
            return f"{part.__name__} raises {type(error).__name__}: {str(error)[:300]}"
    return None


def load(path: Path) -> None:
    import attnpack
    import torch

    model = (attnpack.CausalLM.from_hf if path.is_dir() else attnpack.CausalLM.from_gguf)(path)
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.int64))


def load_text(path: Path) -> None:
    from attnpack.checkpoints import load_tokenizer

    from fuzz.lies import TEMPLATE

    tokenizer = load_tokenizer(path)
    tokenizer.decode(tokenizer.encode("()"))
    if tokenizer.chat_template != TEMPLATE:  # the template of an undamaged one takes a process, and time
        tokenizer.chat("()")


if __name__ == "__main__":
    work(int(sys.argv[1]), float(sys.argv[2]))
