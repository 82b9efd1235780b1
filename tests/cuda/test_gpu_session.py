"""The first hour on a GPU, as far as a machine without one can tell: the cases of the smoke script, and the order of
the steps, with stand-ins for the programs of CUDA."""

import importlib.util
import os
import shutil
import sys

import pytest
import torch
from processes import ROOT, run_program


def smoke():
    spec = importlib.util.spec_from_file_location("gpu_smoke", ROOT / "scripts/gpu_smoke.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_smoke_cases_are_right_and_their_limit_can_fail():
    script = smoke()
    names = []
    for name, kernels, call, exact in script.make_cases("cpu"):
        got, wanted = call(), exact()
        assert got.shape == wanted.shape and kernels
        assert script.error_of(got, wanted) < script.MOST_ERROR, name
        assert script.error_of(got.roll(1, -1), wanted) > script.MOST_ERROR, name
        broken = got.detach().clone()
        broken.view(-1)[7] = torch.nan
        assert not script.error_of(broken, wanted) < script.MOST_ERROR, name
        names.append(name)
    assert names == ["decode", "prefill", "backward", "latent", "exact"]


STAND_INS = {
    "nvidia-smi": "case $* in *compute_cap*) echo 9.0 ;; *) echo a GPU ;; esac",
    "cmake": "",
    "cuobjdump": 'echo "Function : kernel"; echo "HMMA.16816"',
    "compute-sanitizer": "",
    "ncu": 'echo "Duration 5"',
    # The interpreter answers questions about its version itself. The step that the test names fails.
    "python3": 'if [ "$1" = -c ]; then exec {python} "$@"; fi; case "$*" in *"$FAILS"*) exit 3 ;; esac; echo "{{}}"',
}


@pytest.fixture
def session(tmp_path):
    """Runs the session script of a copy with steps, where one of them may fail; `.log` lists the programs it ran."""
    copy, programs, log = tmp_path / "copy", tmp_path / "programs", tmp_path / "log"
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    programs.mkdir()
    for name, body in STAND_INS.items():
        program = programs / name
        program.write_text(f'#!/bin/bash\necho "{name} $*" >>{log}\n' + body.format(python=sys.executable) + "\n")
        program.chmod(0o755)

    def run(*steps, fails="nothing"):
        log.write_text("")
        environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "OUT": str(tmp_path / "out")}
        process = run_program(
            "bash", copy / "scripts/gpu_session.sh", *steps, env=environment | {"FAILS": fails}, timeout=100
        )
        process.log = [line for line in log.read_text().splitlines() if not line.startswith("python3 -c")]
        process.out = {path.name for path in (tmp_path / "out").iterdir()}
        return process

    return run


def test_a_session_goes_from_what_is_most_in_doubt_to_speed(session):
    process = session()
    assert process.returncode == 0, process.text
    order = [
        "-DATTNPACK_CUDA_ARCHITECTURES=90",
        "attnpack info",
        "-W error scripts/gpu_smoke.py --names",
        "pytest -x",
        "cuobjdump -sass",
        "memcheck",
        "racecheck",
        "synccheck",
        "-m long",
        "bench prefill --device cuda",
        "bench train",
        "bench decode",
        "bench latent",
        "ncu --set full",
    ]
    found = [next(i for i, line in enumerate(process.log) if text in line) for text in order]
    assert found == sorted(found), process.log
    wanted = {"info.txt", "smoke.txt", "test.txt", "instructions.txt", "racecheck.log", "large.txt", "ncu.txt"}
    assert wanted | {f"bench-{section}.json" for section in ("prefill", "train", "decode", "latent")} <= process.out


def test_a_step_that_fails_is_named_and_the_next_ones_run(session):
    process = session("smoke", "bench-train", "profile", fails="gpu_smoke")
    assert process.returncode == 3 and "exit code 3 of:" in process.text and "gpu_smoke.py" in process.text
    assert any("ncu --set full" in line for line in process.log) and "bench-train.json" in process.out


def test_an_unknown_step_is_refused(session):
    process = session("speed")
    assert process.returncode == 1 and "no step is called speed" in process.text
