"""Random calls of every op of torch.ops.attnpack: a third are valid, and their results are checked; the others are
spoiled.

Each call has a seed of its own, and a child process makes the calls one after the other. Failures are a crash, a call
that does not end, an internal error, a write outside of a cache, and a wrong result. An error of ours is no failure.
"""

from __future__ import annotations

import resource
import select
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from random import Random

import torch
from attnpack.tools.memory import resident_bytes

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "support")]

from fuzz import garbage, op_calls  # noqa: E402

PATIENCE = 60  # seconds that one call may take
MEMORY = 4 << 30  # that all calls may add
COMPLAINTS = (ValueError, TypeError, RuntimeError, NotImplementedError, IndexError, MemoryError, OverflowError)
COMPLAINTS += (AttributeError,)  # torch's own, for jagged tensors together with plain ones


def make_call(seed: int) -> tuple[str, list, object]:
    """The op's name, its arguments, and the check of its result; None if arguments were spoiled."""
    pick = Random(seed)
    torch.manual_seed(seed)
    name, arguments, right = pick.choice(op_calls.MAKERS)(pick)
    if pick.random() < 1 / 3:
        return name, arguments, right
    schema = getattr(torch.ops.attnpack, name).default._schema
    tensors = [x for x in arguments if torch.is_tensor(x)]
    for n in pick.sample(range(len(arguments)), min(len(arguments), pick.choice([1, 1, 1, 2, 3, 30]))):
        try:
            arguments[n] = garbage.value(pick, str(schema.arguments[n].type), arguments[n], tensors)
        except COMPLAINTS:  # torch cannot make such a tensor
            pass
    return name, arguments, None


def describe(x: object) -> str:
    if not torch.is_tensor(x):
        return f"[{', '.join(map(describe, x))}]" if isinstance(x, list) else repr(x)[:80]
    try:
        strides = f" strides {tuple(x.stride())}" if x.layout == torch.strided and not x.is_contiguous() else ""
        return f"<{x.dtype} {tuple(x.shape)}{strides} {x.layout} {x.device}>".replace("torch.", "")
    except COMPLAINTS:
        return f"<{type(x).__name__}>"


def read_all(result: object) -> None:
    """Reads all memory that a result's shape and strides describe."""
    for x in result if isinstance(result, tuple | list) else [result]:
        if torch.is_tensor(x) and x.device.type == "cpu" and x.layout == torch.strided and not x.is_nested:
            x.detach().clone().sum()


def one_call(seed: int) -> str | None:
    """The failure of the call with that seed."""
    name, arguments, right = make_call(seed)
    try:
        result = getattr(torch.ops.attnpack, name)(*arguments)
        read_all(result)
        if right:
            right(result)
    except COMPLAINTS as error:
        text = str(error)
        if "INTERNAL ASSERT" in text or (right and "cache is full" not in text):
            return f"{name} raised {type(error).__name__}: {text[:500]}"
    except BaseException:
        return f"{name}: {traceback.format_exc()[-1500:]}"
    return None if op_calls.margins_are_whole(arguments) else f"{name} wrote outside of a cache"


def work(seed: int, seconds: float) -> None:
    """The child process: prints each seed before its call, and the failure after it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    mapped = resident_bytes("VmSize") + MEMORY  # a call that wants more is refused by torch, and fills no machine
    resource.setrlimit(resource.RLIMIT_AS, (mapped, mapped))
    end = time.monotonic() + seconds
    while True:
        print(f"seed {seed}", flush=True)
        wrong = one_call(seed)
        if wrong:
            print("wrong " + wrong.replace("\n", "\n  "), flush=True)
        seed += 1
        if time.monotonic() >= end:
            return


def watch(seed: int, seconds: float) -> tuple[int, list[str]]:
    """Runs a child from that seed on until it ends or crashes. Returns the last seed, and the failure."""
    command = [sys.executable, __file__, str(seed), str(seconds)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wrong, fate = [], None
    while fate is None:
        ready, _, _ = select.select([child.stdout], [], [], PATIENCE)
        line = child.stdout.readline() if ready else ""
        if line.startswith("seed "):
            seed = int(line.split()[1])
        elif line:
            wrong.append(f"seed {seed}: {line.removeprefix('wrong ').rstrip()}" if line[0] == "w" else line.rstrip())
        elif not ready:
            child.kill()
            fate = f"took more than {PATIENCE} seconds"
        else:
            fate = f"ended with status {child.wait()}" if child.wait() else ""
    if fate:
        name, arguments, _ = make_call(seed)
        said = child.stderr.read().strip()[-300:]
        wrong.append(f"seed {seed}: {name}({', '.join(map(describe, arguments))}) {fate} {said}")
    return seed, wrong


def main(seed: int, seconds: float) -> int:
    """Prints each failure with the seed that makes its call (with 0 seconds); returns the number of failures."""
    first, failures, end = seed, [], time.monotonic() + seconds
    while True:
        seed, wrong = watch(seed, end - time.monotonic())
        seed += 1
        for line in wrong:
            print(line, flush=True)
        failures += [line for line in wrong if line.startswith("seed ")]
        if time.monotonic() >= end or len(failures) >= 10:
            break
    print(f"ops: {seed - first} calls from seed {first}, {len(failures)} failures")
    return len(failures)


if __name__ == "__main__":
    work(int(sys.argv[1]), float(sys.argv[2]))
