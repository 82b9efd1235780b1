"""examples/distributed/train.py under torchrun, and the Python and the figures of docs/distributed.md."""

import re
import sys

import pytest
import torch.distributed as dist
from processes import ROOT, run_program

PAGE = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")


def losses(ranks, *options):
    run = run_program(
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", ROOT / "examples/distributed/train.py", *options,
    )  # fmt: skip
    assert run.returncode == 0, run.text
    return dict(re.findall(r"step (\d+): loss ([\d.]+)", run.stdout))


@pytest.mark.long
def test_the_example_learns_the_same_on_any_number_of_processes(tmp_path):
    one = losses(1)
    assert float(one["40"]) < 0.5 * float(one["10"])
    shared = losses(4, "--tensor", 2, "--context", 2, "--steps", 20, "--checkpoint", tmp_path / "run")
    resumed = losses(2, "--context", 2, "--checkpoint", tmp_path / "run")
    for step, loss in (shared | resumed).items():
        assert abs(float(loss) - float(one[step])) < 2e-3


def run_blocks(blocks):
    """Runs the blocks one after the other with the same names; the names of those that a reader may check."""
    names = {"__name__": "docs"}
    for block in blocks:
        exec(compile(block, "docs/distributed.md", "exec"), names)
    return names["checked"] + [dist.get_world_size()]


def test_the_code_of_the_page_runs(two_ranks):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.S | re.M)
    assert len(blocks) >= 4
    for result in two_ranks.run(run_blocks, blocks):
        assert result == [True, True, True, 2]


def test_the_lines_of_the_page_are_those_of_the_example():
    example = (ROOT / "examples/distributed/train.py").read_text(encoding="utf-8")
    for line in re.findall(r"^torchrun .*$", PAGE, flags=re.M):
        assert line.rstrip("\\ ") in example


def test_the_figures_of_the_page_are_stored():
    """The range of the times on two ranks, as shares of the cost model's."""
    stored = (ROOT / "benchmarks/results/distributed.txt").read_text(encoding="utf-8")
    rows = re.findall(r"^2 ranks, context +(\d+) .*: +([\d.]+) s, .* model +([\d.]+) s$", stored, flags=re.M)
    shares = [(int(positions), float(seconds) / float(model)) for positions, seconds, model in rows]
    every, long = ([share for positions, share in shares if positions >= least] for least in (0, 4096))
    said = (
        f"Times are {min(every):.2f} to {max(every):.2f} times the model's, and at most {max(long):.2f} times from "
        "4096 positions on."
    )
    assert len(shares) == 15 and said in " ".join(PAGE.split())


def test_the_overlap_of_the_page_is_stored():
    stored = (ROOT / "benchmarks/results/distributed.txt").read_text(encoding="utf-8")
    rows = re.findall(
        r"^2 ranks, overlap +(\d+) .*: +([\d.]+) s overlapped, +([\d.]+) s waiting, +([\d.]+) s transfers$",
        stored,
        flags=re.M,
    )
    assert len(rows) == 3 and all(f"| {' | '.join(row)} |\n" in PAGE for row in rows)
