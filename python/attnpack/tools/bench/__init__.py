"""`attnpack bench`: compares attention calls with the limits of this machine and with other libraries, in one run.

Each round of a case times all libraries in turn, so that a busy machine slows all of them. A ratio is the median over
the rounds. The limits (multiply-adds in registers, bytes read in order) are measured before and after the cases, and
the better value counts. If keys and values must be cold, the bench empties all caches before each call by reading other
memory in order. On a CPU the median speed of these reads is the limit of the case, because the speed of memory changes
when other processes use it too. `model.py` has the section "model".
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch

from ... import _C, __version__
from ...progress import counted, progress
from ..busy import OtherWork
from .cases import SECTIONS, Case, Limits, cases
from .devices import Cpu, Cuda, device_named
from .peers import PEERS, Call, make_inputs, ours

ROUND_SECONDS = 2.0  # time of one case with all peers; there are at least MIN_ROUNDS rounds
MIN_ROUNDS, MAX_ROUNDS = 3, 200
DEFAULT_PEERS = ("sdpa", "packed")


@dataclass(frozen=True)
class Result:
    case: Case
    seconds: float
    ratios: dict[str, float]  # by peer: the time of the peer / our time
    peak_bytes: int | None  # resident memory of one call in addition to its tensors
    bytes_per_second: float | None  # speed of a CPU's memory between the calls of a cold case

    def share(self, limits: Limits) -> float:
        """Share of the machine's speed: 1 is as fast as its multiply-adds or its memory allow."""
        read = self.bytes_per_second or limits.bytes_per_second
        return self.case.limit_seconds(limits._replace(bytes_per_second=read)) / self.seconds


def run(
    sections: list[str], dtypes: list[str], peers: list[str], *, quick: bool = False, on: Cpu | Cuda | None = None
) -> tuple[Limits, list[Result]]:
    on = on or Cpu()
    limits = on.limits()
    todo = list(cases(sections, dtypes, quick=quick, device=on.device))
    results = [_measure_case(case, peers, ROUND_SECONDS / (4 if quick else 1), on) for case in progress(todo, "cases")]
    return Limits(*map(max, limits, on.limits())), results


def _measure_case(case: Case, peers: list[str], budget: float, on: Cpu | Cuda) -> Result:
    query, key, value, grad = make_inputs(case, on.device)
    calls = {"attnpack": ours(case, query, key, value)}
    for name in peers:
        call = PEERS[name](case, query, key, value)
        if call is not None:
            calls[name] = call
    if case.backward:
        calls = {name: _with_backward(call, (query, key, value), grad) for name, call in calls.items()}
    with torch.set_grad_enabled(case.backward):
        wanted = calls["attnpack"]()
        for name in [name for name in calls if name != "attnpack"]:
            try:  # also warms up
                torch.testing.assert_close(calls[name](), wanted, atol=5e-2, rtol=5e-2)
            except RuntimeError:  # the peer refuses the case, or it stores scores and the device has no room for them
                del calls[name]
        times: dict[str, list[float]] = {name: [] for name in calls}
        reads = []
        end = time.perf_counter() + budget
        while len(times["attnpack"]) < MIN_ROUNDS or (
            time.perf_counter() < end and len(times["attnpack"]) < MAX_ROUNDS
        ):
            for name, call in calls.items():
                if case.cold:
                    reads.append(on.empty_caches())
                times[name].append(on.seconds(call))
        peak = on.peak_bytes(calls["attnpack"])
    mine = times.pop("attnpack")
    ratios = {
        name: statistics.median(theirs / us for theirs, us in zip(each, mine, strict=True))
        for name, each in times.items()
    }
    read = statistics.median(reads) if None not in reads and reads else None
    return Result(case, statistics.median(mine), ratios, peak, read)


def _with_backward(call: Call, leaves: tuple[torch.Tensor, ...], grad: torch.Tensor) -> Call:
    def call_with_backward() -> torch.Tensor:
        for leaf in leaves:
            leaf.grad = None
        out = call()
        out.backward(grad)
        return out.detach()

    return call_with_backward


def format_table(limits: Limits, results: list[Result], peers: list[str], on: Cpu | Cuda) -> str:
    used = counted(torch.get_num_threads(), "thread")
    processor = f", {used}, instruction set {_C.isa()}" if on.device == "cpu" else ""
    pairs = f", {limits.bf16_flops / 1e9:.0f} bf16" if limits.bf16_flops != limits.flops else ""
    lines = [
        f"{on.name()}{processor}, torch {torch.__version__}",
        f"limits measured in this run: {limits.flops / 1e9:.0f} GFLOP/s fp32{pairs}, "
        f"{limits.bytes_per_second / 1e9:.1f} GB/s read",
        "share: of the limit that binds (cold: what memory gave between the calls); times as fast as each peer; "
        "memory: peak above the tensors of the call",
        f"{'case':<48}{'dtype':>6}{'ms':>10}{'GFLOP/s':>9}{'GB/s':>7}{'share':>7}"
        + "".join(f"{name:>13}" for name in peers)
        + f"{'memory':>10}",
    ]
    for result in results:
        case, seconds = result.case, result.seconds
        rates = f"{case.flops / seconds / 1e9:>9.1f}{case.bytes / seconds / 1e9:>7.1f}"
        ratios = "".join(f"{result.ratios[name]:>12.2f}x" if name in result.ratios else f"{'-':>13}" for name in peers)
        memory = "-" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:.1f} MiB"
        head = f"{case.name:<48}{case.dtype:>6}{seconds * 1e3:>10.3f}"
        lines.append(f"{head}{rates}{result.share(limits):>7.0%}{ratios}{memory:>10}")
    return "\n".join(lines)


def as_dict(limits: Limits, results: list[Result], on: Cpu | Cuda) -> dict:
    return {
        "attnpack": __version__,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "machine": on.name(),
        "device": on.device,
        "isa": _C.isa(),
        "threads": torch.get_num_threads(),
        "limits": limits._asdict(),
        "results": [
            asdict(result) | {"flops": result.case.flops, "bytes": result.case.bytes, "share": result.share(limits)}
            for result in results
        ],
    }


def machine() -> str:
    """The processor's name and the instruction set that attnpack uses on it."""
    return f"{Cpu().name()} ({_C.isa()})"


def conditions(dtype: str = "fp32") -> str:
    """The machine of a time, the threads that torch has now, and the limits that this many threads reach now."""
    threads, limits = torch.get_num_threads(), Cpu().limits()
    rate = limits.bf16_flops if dtype == "bf16" else limits.flops
    return (
        f"{machine()}, {counted(threads, 'thread')}, {dtype}; "
        f"limits: {rate / 1e9:.0f} GFLOP/s, {limits.bytes_per_second / 1e9:.1f} GB/s read"
    )


def main(args: argparse.Namespace) -> None:
    if args.rounds:
        raise ValueError(f"--rounds: got {args.rounds}, but only the section 'model' counts rounds: leave it out")
    peers = list(DEFAULT_PEERS) if args.peers is None else args.peers
    if args.out:
        from ..plot import check_picture, new_figure, save
        from ..plot.roofline import draw_roofline

        check_picture(args.out)
        figure = new_figure()  # raises now, and not after minutes, if matplotlib is missing
    if args.threads:
        torch.set_num_threads(args.threads)
    on = device_named(args.device)
    others = OtherWork()
    limits, results = run(args.sections or list(SECTIONS), args.dtypes, peers, quick=args.quick, on=on)
    warning = others.warning()
    if args.out:
        draw_roofline(figure.subplots(), as_dict(limits, results, on))
        save(figure, args.out)
    print(json.dumps(as_dict(limits, results, on)) if args.json else format_table(limits, results, peers, on))
    if warning:
        print(warning, file=sys.stderr)
