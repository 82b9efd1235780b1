"""`attnpack bench model`: SmolLM2-135M-Instruct as a whole, compared with other libraries and this machine's limits.

A round of a row lets each library generate once, in turns, and every second round has the reverse order. So a machine
that changes its speed slows all of them. A ratio is the median over the rounds of the peer's time / our time in the
same round. The share is the median of limit / our time, with limits that are measured next to our call: the speed of
memory before and after it, and the multiply-adds before a prefill. For a step the best multiply-adds so far count.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from dataclasses import asdict, dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor

from ... import _C, CausalLM, __version__
from ...checkpoints import load_tokenizer, smollm2_path
from ...errors import DTYPES
from ...progress import counted, progress
from .cases import Limits
from .devices import Cpu
from .model_peers import PEERS, Contender, LeftOut, make_contenders, reason, version
from .model_rows import Row, Sizes, rows

SECTION = "model"
ROUNDS, QUICK_ROUNDS = 5, 1
READS = 3  # of other memory, before our call and after it
TEXT = 60_000  # characters that are enough for the longest prompts


@dataclass(frozen=True)
class ModelResult:
    row: Row
    seconds: float  # of a prefill or of a step, the median over the rounds
    share: float  # of the machine's limit, measured next to each call
    limits: Limits  # the medians of these measurements
    peers: dict[str, float]  # seconds of each peer
    ratios: dict[str, float]  # by peer: its time / our time
    same_tokens: dict[str, bool]  # by peer: whether it gives the tokens that attnpack gives
    missing: dict[str, str]  # by peer without figures: why


def run(dtypes: list[str], peers: list[str], *, rounds: int, quick: bool) -> tuple[Sizes, list[ModelResult]]:
    """Measures all rows of the dtypes. Loads one model per dtype: the file's weights as plain numbers."""
    path, on = smollm2_path(), Cpu()
    ids = torch.tensor(load_tokenizer(path).encode("\n".join(topics[name] for name in sorted(topics))[:TEXT]))
    results, peak = [], on.limits()
    for dtype in dtypes:
        model, todo = CausalLM.from_gguf(path, dtype=DTYPES[dtype]), rows(dtype, quick)
        context = max(row.prompt + row.new_tokens for row in todo)
        contenders, missing = make_contenders(model, dtype, peers, context, quick)
        sizes = Sizes.of(model)
        for row in progress(todo, f"rows of {dtype}"):
            prompts = ids[: row.batch * row.prompt].view(row.batch, row.prompt)
            results.append(_measure_row(row, prompts, contenders, missing, sizes, rounds, peak, on))
            peak = Limits(*map(max, peak, results[-1].limits))
    return sizes, results


def _measure_row(
    row: Row,
    ids: Tensor,  # [batch, prompt]
    contenders: dict[str, Contender],
    missing: dict[str, str],
    sizes: Sizes,
    rounds: int,
    peak: Limits,  # for the multiply-adds of steps
    on: Cpu,
) -> ModelResult:
    """Lets each contender generate once to warm up, and then once in each round."""
    tokens, missing = {}, dict(missing)
    for name, contender in contenders.items():
        try:
            tokens[name] = contender(row, ids).tokens  # also warms up
        except Exception as error:
            if name == "attnpack":
                raise
            missing[name] = reason(error) if isinstance(error, LeftOut) else f"{row.name}: {reason(error)}"
    order = list(tokens)
    times: dict[str, list[float]] = {name: [] for name in order}
    limits: list[Limits] = []
    for i in range(rounds):
        for name in reversed(order) if i % 2 else order:
            if name != "attnpack":
                times[name].append(contenders[name](row, ids).seconds)
                continue
            if row.kind == "prefill":
                peak = on.limits()
            reads = [on.empty_caches() for _ in range(READS)]
            times[name].append(contenders[name](row, ids).seconds)
            reads += [on.empty_caches() for _ in range(READS)]
            limits.append(peak._replace(bytes_per_second=statistics.median(reads)))
    mine = times.pop("attnpack")
    shares = [row.limit_seconds(sizes, limit) / us for limit, us in zip(limits, mine, strict=True)]
    return ModelResult(
        row,
        statistics.median(mine),
        statistics.median(shares),
        Limits(*map(statistics.median, zip(*limits, strict=True))),
        {name: statistics.median(theirs) for name, theirs in times.items()},
        {
            name: statistics.median(they / us for they, us in zip(theirs, mine, strict=True))
            for name, theirs in times.items()
        },
        {name: torch.equal(tokens[name], tokens["attnpack"]) for name in times},
        missing,
    )


def format_table(results: list[ModelResult], peers: list[str], rounds: int, sizes: Sizes, on: Cpu) -> str:
    used = counted(torch.get_num_threads(), "thread")
    lines = [
        f"SmolLM2-135M-Instruct on {on.name()}, {used}, instruction set {_C.isa()}, torch {torch.__version__}",
        *(f"{name} {found}" for name in peers if "+" not in name and (found := version(name))),
        f"{counted(rounds, 'round')} by turns. share: of the limit of memory or of multiply-adds, measured next to our "
        "calls, in GB/s or GFLOP/s",
        "each peer: its figure, and how many times its time is ours; *: some of its tokens are others than ours",
        f"{'row':<22}{'dtype':>6}{'unit':>10}{'attnpack':>10}{'limit':>13}{'share':>7}"
        + "".join(f"{name:>23}" for name in peers),
    ]
    for result in results:
        row = result.row
        head = f"{row.name:<22}{row.dtype:>6}{row.unit:>10}{row.figure(result.seconds):>10.1f}"
        cells = "".join(f"{_cell(result, name):>23}" for name in peers)
        lines.append(f"{head}{_binding(result, sizes):>13}{result.share:>7.0%}{cells}")
    reasons = dict.fromkeys(f"{name}: - {why}" for each in results for name, why in each.missing.items())
    return "\n".join([*lines, *reasons])


def _cell(result: ModelResult, name: str) -> str:
    if name not in result.ratios:
        return "- "
    star = " " if result.same_tokens[name] else "*"
    return f"{result.row.figure(result.peers[name]):.1f} {result.ratios[name]:>7.2f}x{star}"


def _binding(result: ModelResult, sizes: Sizes) -> str:
    """The limit that binds the row, as measured."""
    memory = result.limits._replace(flops=float("inf"), bf16_flops=float("inf"), fp16_flops=float("inf"))
    if result.row.limit_seconds(sizes, memory) < result.row.limit_seconds(sizes, result.limits):
        flops = result.limits.bf16_flops if result.row.dtype == "bf16" else result.limits.flops
        return f"{flops / 1e9:.0f} GFLOP/s"
    return f"{result.limits.bytes_per_second / 1e9:.1f} GB/s"


def as_dict(results: list[ModelResult], peers: list[str], rounds: int, sizes: Sizes, on: Cpu) -> dict:
    return {
        "attnpack": __version__,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "model": smollm2_path().name,
        "machine": on.name(),
        "isa": _C.isa(),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "peers": {name: version(name) for name in peers},
        "results": [
            asdict(result)
            | {
                "unit": result.row.unit,
                "figure": result.row.figure(result.seconds),
                "flops": result.row.flops(sizes),
                "bytes": result.row.bytes(sizes),
                "limits": result.limits._asdict(),
            }
            for result in results
        ],
    }


def check_arguments(args: argparse.Namespace) -> None:
    """Raises a ValueError for arguments of `attnpack bench` that this section does not have."""
    if args.sections != [SECTION]:
        others = " ".join(name for name in args.sections if name != SECTION)
        raise ValueError(f"SECTION: got 'model' and {others!r}, want 'model' alone: run the others in a second command")
    if args.device != "cpu":
        raise ValueError(f"--device: got {args.device!r}, want 'cpu' for the section 'model'")
    if args.out:
        raise ValueError(f"--out: got '{args.out}', but the section 'model' draws no picture: leave it out")


def main(args: argparse.Namespace) -> None:
    check_arguments(args)
    smollm2_path()  # raises now if the model is not installed
    if args.threads:
        torch.set_num_threads(args.threads)
    peers = list(PEERS) if args.peers is None else args.peers
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    sizes, results = run(args.dtypes, peers, rounds=rounds, quick=args.quick)
    make = as_dict if args.json else format_table
    found = make(results, peers, rounds, sizes, Cpu())
    print(json.dumps(found) if args.json else found)
