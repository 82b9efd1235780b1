"""scripts/fuzz.py: random calls of the ops and random files, in processes of their own."""

import random
import sys

import pytest
import torch
from fuzz import op_calls
from processes import ROOT, run_program

KINDS = sorted(path.stem for path in (ROOT / "tests/fuzz").glob("*.py") if "\ndef main(" in path.read_text())


def fuzz(what: str, seed: int, seconds: float):
    process = run_program(sys.executable, ROOT / "scripts/fuzz.py", what, "--seed", seed, "--seconds", seconds)
    print(process.stdout)
    assert process.returncode == 0, process.stdout + process.stderr


def test_a_few_seconds_of_ops():
    fuzz("ops", seed=0, seconds=5)


def test_every_op_is_called():
    drawn = {make(random.Random(seed))[0] for make in op_calls.MAKERS for seed in range(200)}
    ops = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("attnpack::")]
    # tests/distributed calls those of several processes.
    alone = [op.name for op in ops if not any(argument.name == "group_name" for argument in op.arguments)]
    assert drawn == {name.removeprefix("attnpack::") for name in alone}


@pytest.mark.long
@pytest.mark.parametrize("what", KINDS)
def test_two_minutes(what):
    fuzz(what, seed=random.randrange(2**31), seconds=120)
