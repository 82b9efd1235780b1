"""Attention, modules, models and checkpoints of attnpack's C++ over real processes, which find each other through a
file.

The program runs the cases of context_cases.h, context_modules.h and shared_models.h in tests/cpp/support, as threads do
in ctest.
"""

import fcntl
import os
import subprocess
from pathlib import Path

import attnpack
import pytest
from processes import ROOT, run_program


@pytest.fixture(scope="module")
def program() -> Path:
    """Built once a tree: scripts/mutants.py asks for it again and again, from several processes."""
    folder = ROOT / "build/cpp_processes"
    folder.mkdir(parents=True, exist_ok=True)
    source, prefix = ROOT / "tests/cpp/distributed/processes", Path(attnpack.__file__).parent
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (
            ("cmake", "-S", source, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}"),
            ("cmake", "--build", folder),
        ):
            process = run_program(*command)
            assert process.returncode == 0, process.text
    return folder / "processes"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_processes_give_the_numbers_of_one(program, tmp_path, ranks):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    lines = [[program, str(rank), str(ranks), tmp_path / "store"] for rank in range(ranks)]
    processes = [subprocess.Popen(line, env=environment, text=True, stdout=-1, stderr=-1) for line in lines]
    for process in processes:
        text, errors = process.communicate(timeout=120)
        names = ("attention", "difference", "modules", "models", "checkpoint")
        assert text.splitlines() == [f"{name} near" for name in names], errors
