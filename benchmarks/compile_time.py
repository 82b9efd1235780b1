"""The cost of each header for a C++ program that includes no other: processor seconds and peak memory of the compiler.

    python benchmarks/compile_time.py [--compiler g++] [--rounds N]

Each line is the median over the rounds of a compilation without optimisation. `torch/torch.h` stands there to compare.
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

HEADERS = [
    "attnpack/fwd.h",
    "attnpack/ops/attention.h",
    "attnpack/cache/dynamic_cache.h",
    "attnpack/weights/safetensors.h",
    "attnpack/modules/attention/grouped_attention.h",
    "attnpack/modules/stack.h",
    "attnpack/models/generate.h",
    "torch/torch.h",
    "attnpack/attnpack.h",
]


def folder_of(package: str) -> Path:
    """Without an import: the memory of this process counts as the least of the compiler's."""
    return Path(importlib.util.find_spec(package).submodule_search_locations[0])


def compile_alone(compiler: str, header: str, folder: Path) -> tuple[float, float]:
    """(processor seconds, peak MB) of a compilation of a file that includes the header and nothing else."""
    source = folder / "main.cpp"
    source.write_text(f"#include <{header}>\nint main() {{}}\n")
    torch_dir, package = folder_of("torch"), folder_of("attnpack")
    places = [package / "include", torch_dir / "include", torch_dir / "include/torch/csrc/api/include"]
    command = [compiler, "-std=c++17", "-c", source, "-o", folder / "main.o"]
    command += [part for place in places for part in ("-isystem", place)]
    process = subprocess.Popen(list(map(str, command)))
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{compiler} does not compile {header}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    print(subprocess.run([args.compiler, "--version"], text=True, capture_output=True).stdout.splitlines()[0])
    print(f"{'header':40} {'seconds':>8} {'MB':>6}")
    with tempfile.TemporaryDirectory() as folder:
        for header in HEADERS:
            rounds = [compile_alone(args.compiler, header, Path(folder)) for _ in range(args.rounds)]
            seconds, megabytes = (statistics.median(column) for column in zip(*rounds, strict=True))
            print(f"{header:40} {seconds:8.2f} {megabytes:6.0f}")


if __name__ == "__main__":
    main()
