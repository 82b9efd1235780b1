"""Measures what a clean build costs: CPU seconds in all, per library and of the dearest files, and as a multiple of one
file that includes <torch/torch.h>, a unit that does not depend on the machine.

    python scripts/build_cost.py [--jobs N] [--json]

Builds a copy of the working tree in a temporary folder, with all instruction sets and without a compiler cache, by
`setup.py build_ext --inplace`. It needs torch, setuptools, ninja, cmake and nlohmann/json, and no
package index."""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "build_backend"))
from attnpack_build import find_torch  # noqa: E402

UNIT = """#include <torch/torch.h>
int main() { return static_cast<int>(torch::ones({2, 3}).numel()) - 6; }
"""


def cpu_seconds() -> float:
    """The CPU seconds of all children that have ended, with theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def record(log: str, command: list[str]) -> int:
    """Runs a compiler; adds a line to the log: CPU seconds, and the file that it wrote."""
    status = subprocess.call(command)
    written = command[command.index("-o") + 1] if "-o" in command else "?"
    with open(log, "a") as file:
        file.write(f"{cpu_seconds():.2f} {written}\n")
    return status


def copy_tree(to: Path):
    """The files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def unit_seconds(folder: Path) -> float:
    """The unit: g++ -O2 -std=c++20 -c of a main that makes one tensor."""
    source, torch = folder / "unit.cpp", Path(find_torch())
    source.write_text(UNIT)
    includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    before = cpu_seconds()
    subprocess.run(["g++", "-O2", "-std=c++20", *includes, "-c", source, "-o", folder / "unit.o"], check=True)
    return cpu_seconds() - before


def library_of(file: str) -> str:
    """CMakeFiles/attnpack_ops.dir/... -> attnpack_ops; all instruction sets are kernels."""
    name = file.partition("CMakeFiles/")[2].partition(".dir")[0] or "other"
    return "kernels" if "/isa/" in file or "unity_small" in file else name


def measure(jobs: int) -> dict:
    with tempfile.TemporaryDirectory() as temporary:
        folder, log = Path(temporary), Path(temporary, "cpu.log")
        copy_tree(folder / "tree")
        units = [unit_seconds(folder)]
        launcher = f"{sys.executable};{Path(__file__).resolve()};--record;{log}"
        arguments = f"-DATTNPACK_ISA_NAMES=all -DCMAKE_CXX_COMPILER_LAUNCHER={launcher}"
        environment = os.environ | {"CMAKE_ARGS": arguments, "MAX_JOBS": str(jobs), "CCACHE_DISABLE": "1"}
        environment.pop("ATTNPACK_BUILD_DIR", None)
        before, start = cpu_seconds(), time.monotonic()
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=folder / "tree", env=environment, check=True, stdout=sys.stderr)
        total, wall = cpu_seconds() - before, time.monotonic() - start
        units.append(unit_seconds(folder))  # before and after: machines change their speed
        files = [line.split(" ", 1) for line in log.read_text().splitlines()]
    files = sorted(((float(seconds), name) for seconds, name in files), reverse=True)
    libraries: dict[str, float] = {}
    for seconds, name in files:
        libraries[library_of(name)] = libraries.get(library_of(name), 0) + seconds
    libraries["configure, link, install"] = total - sum(libraries.values())
    unit = sum(units) / len(units)
    return {
        "cpu_seconds": total,
        "unit_seconds": unit,
        "units": total / unit,
        "wall_seconds": wall,
        "jobs": jobs,
        "libraries": dict(sorted(libraries.items(), key=lambda item: -item[1])),
        "dearest": [{"seconds": seconds, "file": name} for seconds, name in files[:10]],
    }


def show(cost: dict):
    print(f"a clean build, all instruction sets   {cost['cpu_seconds']:7.1f} CPU seconds")
    print(f"one file with <torch/torch.h>         {cost['unit_seconds']:7.1f}")
    print(f"the build, in such files              {cost['units']:7.1f}")
    print(f"wall, {cost['jobs']:2} jobs                         {cost['wall_seconds']:7.1f} s\n")
    for name, seconds in cost["libraries"].items():
        print(f"{name:36}  {seconds:7.1f} {seconds / cost['unit_seconds']:6.1f}")
    print("\nthe dearest files")
    for file in cost["dearest"]:
        print(f"{file['seconds']:7.1f}  {file['file']}")


def main() -> int:
    if sys.argv[1:2] == ["--record"]:
        return record(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at work")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    cost = measure(arguments.jobs)
    print(json.dumps(cost, indent=1)) if arguments.json else show(cost)
    return 0


if __name__ == "__main__":
    sys.exit(main())
