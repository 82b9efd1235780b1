"""A rank that dies or does not come: the others get a sentence within the group's timeout."""

import copy
import os
import time
from datetime import timedelta

import attnpack
import attnpack.distributed as parallel
import pytest
import torch
import torch.distributed as dist
from attnpack import _C
from marks import long
from op_cases import draw
from ranks import Ranks
from shared_modules import WIDTH, grouped, made
from torch.distributed.device_mesh import DeviceMesh

TIMEOUT, RANKS = 1, 3
METHODS = ["allgather", "ulysses", "ring"]


def heads(gradient=False):
    return [draw(1, 6, 4, 8, seed=i).requires_grad_(gradient) for i in range(3)]


def outcome(call):
    """(seconds, error) of a call."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return time.monotonic() - start, f"{type(error).__name__}: {error}"
    return time.monotonic() - start, "no error"


def absent(what):
    """Rank 2 leaves a call before its collectives, or does not come to its backward, or to it at all."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    leaves = dist.get_rank() == RANKS - 1
    if what in METHODS:
        if leaves:
            rules = {"causal": True}
            return _C.distributed.agree_on_attention(*heads(), group.group_name, what, "zigzag", rules)
        return outcome(lambda: parallel.attention(*heads(), group=group, method=what, layout="zigzag", causal=True))
    if what.startswith("backward"):
        method = what.removeprefix("backward ")
        out = parallel.attention(*heads(True), group=group, method=method, layout="zigzag", causal=True)
        return None if leaves else outcome(out.sum().backward)
    if what == "tensor parallel":
        mesh = DeviceMesh.from_group(group, "cpu")
        module = parallel.tensor_parallel(made(lambda: grouped(3, 6)), mesh)
        return None if leaves else outcome(lambda: module(draw(1, 4, WIDTH)))
    held = parallel.ShardedCache(attnpack.DynamicCache(), group)
    if leaves:
        return None
    before = copy.copy(held.inner.lengths)
    found = outcome(lambda: made(grouped)(draw(1, 4, WIDTH), cache=held))
    assert torch.equal(held.inner.lengths, before) and len(held) == 0
    return found


def dying():
    group = dist.new_group(timeout=timedelta(seconds=60))
    parallel.attention(*heads(), group=group)
    if dist.get_rank() == RANKS - 1:
        os._exit(1)
    return outcome(lambda: parallel.attention(*heads(), group=group, method="ring"))


CASES = ["ring", "backward allgather", "tensor parallel", "sharded cache"]
LONG = ["allgather", "ulysses", "backward ring", "backward ulysses"]
SENTENCE = "RuntimeError: attnpack: a collective of 3 processes failed on rank"


@pytest.fixture(scope="module")
def three_ranks():
    ranks = Ranks(RANKS)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("case", [*CASES, *(long(case) for case in LONG), "dying"])
def test_the_others_get_a_sentence_in_time(three_ranks, case):
    outcomes = three_ranks.run_where_some_die(dying) if case == "dying" else three_ranks.run(absent, case)
    for seconds, error in outcomes[: RANKS - 1]:
        assert error.startswith(SENTENCE) and "did not come within the group's timeout" in error
        assert seconds < 3 * TIMEOUT + 2
