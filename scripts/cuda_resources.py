"""Prints the resources of each CUDA kernel from ptxas -v; the exit code is 1 if a kernel spills more than the limit.

Some kernels have limits of their own. An H200 timed Hopper's prefill with rules and its plain gradients with more
spills than these (benchmarks/results/cuda_sm90.txt).

python scripts/cuda_resources.py LIMIT LOG ...
"""

import re
import subprocess
import sys
from pathlib import Path

ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)

LIMITS = {
    # With rules: faster than the kernels of all devices all the same.
    r"forward_sm90_kernel<\w+, \d+, \d+, 0, \d>": 1600,
    # Its warps that copy have 24 registers, and hold a packed sequence's numbers too (280 bytes before; nobody has
    # timed that).
    r"key_gradient_kernel": 420,
    # Under a mask: the warps that copy have 24 registers. The loop of products spills nothing (test_cuda_sass.py).
    r"key_gradient_kernel<\w+, \d+, \d+, 2>": 620,
    # With rules: sums, two products and the rules need more registers than there are.
    r"(key|query)_gradient_kernel<\w+, \d+, \d+, 0>": 760,
}


def limit_of(name: str, limit: int) -> int:
    return max([limit, *(most for pattern, most in LIMITS.items() if re.match(pattern, name))])


def main(limit: int, logs: list[str]) -> int:
    entries = [match for log in logs for match in ENTRY.finditer(Path(log).read_text())]
    if not entries:
        print("no kernel was compiled")
        return 1
    names = [match["name"] for match in entries]
    readable = subprocess.run(["c++filt", *names], capture_output=True, text=True, check=True).stdout.splitlines()
    print(f"{'arch':<8}{'registers':>10}{'shared':>8}{'spilled':>8}  kernel")
    worst, failures = 0, 0
    for match, name in sorted(zip(entries, readable, strict=True), key=lambda each: (each[0]["arch"], each[1])):
        spilled = int(match["stores"]) + int(match["loads"])
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        name = re.sub(r"void |\(attnpack::cuda::(Gradient|Scores)\)", "", name)
        name = re.sub(r"(attnpack::cuda|\(anonymous namespace\))::", "", name).partition("(")[0]
        print(f"{match['arch']:<8}{match['registers']:>10}{shared[1] if shared else 0:>8}{spilled:>8}  {name}")
        failures += spilled > limit_of(name, limit)
        worst = max(worst, spilled if limit_of(name, limit) == limit else 0)
    print(f"{len(entries)} kernels, most bytes spilled: {worst}, limit {limit}; beyond their limits: {failures}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
