"""Attention, modules, models and checkpoints of attnpack's C++ over real processes, which find each other through a
file.

The program runs the cases of context_cases.h, context_modules.h and shared_models.h in tests/cpp/support, as threads do
in ctest.
"""

import os
import subprocess

import pytest
from cpp_programs import cpp_program


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_give_the_numbers_of_one(tmp_path, ranks):
    program = cpp_program("processes")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    lines = [[program, str(rank), str(ranks), tmp_path / "store"] for rank in range(ranks)]
    processes = [subprocess.Popen(line, env=environment, text=True, stdout=-1, stderr=-1) for line in lines]
    for process in processes:
        text, errors = process.communicate(timeout=120)
        names = ("attention", "difference", "modules", "models", "checkpoint")
        assert text.splitlines() == [f"{name} near" for name in names], errors
