"""The first hour on a GPU, as far as a machine without one can tell: the cases of the smoke script, and the order of
the steps, with stand-ins for the programs of CUDA."""

import os
import re
import shutil
import sys
from collections import Counter

import pytest
import torch
from processes import ROOT, add_program, run_program
from script_modules import load_script


def test_the_smoke_cases_are_right_and_their_limit_can_fail():
    script = load_script("scripts/gpu_smoke.py")
    names = []
    for name, kernels, call, exact in script.make_cases("cpu"):
        got, wanted = call(), exact()
        assert got.shape == wanted.shape and (kernels or name.startswith("no "))
        assert script.error_of(got, wanted) < script.MOST_ERROR, name
        names.append(name)
        if not kernels:
            continue
        assert script.error_of(got.roll(1, -1), wanted) > script.MOST_ERROR, name
        broken = got.detach().clone()
        broken.view(-1)[7] = torch.nan
        assert not script.error_of(broken, wanted) < script.MOST_ERROR, name
    wanted = {
        "decode",
        "prefill",
        "backward",
        "latent",
        "exact",
        "no keys",
        "no queries, backward",
        "mask",
        "mask and cap",
        "backward, mask",
        "backward, D 192 and 128",
        "backward, mask and cap",
        "packed",
        "packed, backward",
        "packed, pages",
    }
    assert wanted <= set(names) and len(names) == 21


STAND_INS = {
    "nvidia-smi": "case $* in *compute_cap*) echo 9.0 ;; *) echo a GPU ;; esac",
    "cmake": 'mkdir -p python/attnpack/lib; case "$*" in *"$FAILS"*) exit 3 ;; esac',
    "compute-sanitizer": "",
    "ncu": 'echo "Duration 5"',
    # The interpreter answers questions about its version itself. The step that the test names fails.
    "python3": 'if [ "$1" = -c ]; then exec {python} "$@"; fi; case "$*" in *"$FAILS"*) exit 3 ;; esac; echo "{{}}"',
}


@pytest.fixture
def session(tmp_path):
    """Runs the session script of a copy with steps, where one of them may fail; `.log` lists the programs it ran.

    variants: the libraries that scripts/gpu_bundle.sh would have packed.
    """
    copy, programs, log = tmp_path / "copy", tmp_path / "programs", tmp_path / "log"
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    programs.mkdir()
    (copy / ".gpu").mkdir()
    for name, body in STAND_INS.items():
        add_program(programs, name, f'echo "{name} $*" >>{log}\n' + body.format(python=sys.executable))

    def run(*steps, fails="nothing", variants=(), **variables):
        log.write_text("")
        for name in variants:
            (copy / name).mkdir()
            (copy / name / "libattnpack_cuda.so").write_text(name)
            run_program("tar", "cJf", copy / f".gpu/{name}.tar.xz", "-C", copy, f"{name}/libattnpack_cuda.so")
        environment = {"PATH": f"{programs}:{os.environ['PATH']}", "OUT": str(tmp_path / "out"), "FAILS": fails}
        process = run_program(
            "bash", copy / "scripts/gpu_session.sh", *steps, env=os.environ | environment | variables, timeout=100
        )
        process.log = [line for line in log.read_text().splitlines() if not line.startswith("python3 -c")]
        process.out = {path.name for path in (tmp_path / "out").iterdir()}
        process.copy = copy
        return process

    return run


def test_a_session_asks_first_whether_it_is_right_then_which_variant_is_faster(session):
    process = session(variants=["base", "turned"])
    assert process.returncode == 0, process.text
    library = "--library build/gpu_unpacked/{}/libattnpack_cuda.so"
    order = [
        "-DATTNPACK_CUDA=OFF",
        "attnpack info",
        "-W error scripts/gpu_smoke.py --names",
        "pytest -q -x",
        "plain decode --quick " + library.format("base"),
        "plain decode --quick " + library.format("turned"),
        "rules --quick",
        "cuda_attention.py latent",
        "cuda_attention.py packed --quick",
        "--clock-control none --set full --kernel-name regex:forward_sm90",
        "regex:key_gradient",
        "regex:latent_sm90",
        "--tool synccheck",
        "--tool racecheck",
        "--tool memcheck",
        "plain decode rules fp32",
    ]
    found = [next(i for i, line in enumerate(process.log) if text in line) for text in order]
    assert found == sorted(found), process.log
    # The base runs first and last, so that a drift shows.
    runs = [line for line in process.log if "--library" in line]
    assert [line.split("/")[-2] for line in runs] == ["base", "turned", "base"]
    assert (process.copy / "python/attnpack/lib/libattnpack_cuda.so").read_text() == "base"
    tables = {
        f"{name}.txt" for name in ("info", "smoke", "test", "base", "turned", "rules", "latent", "packed", "torch")
    }
    assert tables | {"ncu_forward_sm90.txt", "racecheck_small_backward.log", "memcheck_empty.log"} <= process.out
    assert not any("nvidia-smi -" in line and "query" not in line for line in process.log)  # clocks are left alone


def test_without_a_bundle_the_kernels_are_built_for_the_gpu(session):
    process = session("check")
    assert process.returncode == 0, process.text
    assert "-DATTNPACK_CUDA=ON -DATTNPACK_CUDA_ARCHITECTURES=90" in process.log[2], process.log


def test_no_step_begins_after_the_time_is_over(session):
    process = session("sanitize", "torch", LIMIT="4")
    assert process.returncode == 0 and process.text.count("no time is left for") == 6
    assert not any("compute-sanitizer" in line or "benchmarks" in line for line in process.log)


def test_a_step_that_fails_is_named_and_the_next_ones_run(session):
    process = session("check", "why", fails="gpu_smoke")
    assert process.returncode == 3 and "exit code 3 of:" in process.text and "gpu_smoke.py" in process.text
    assert any("ncu --clock-control none" in line for line in process.log)


def test_a_build_that_fails_ends_the_session(session):
    process = session("check", fails="--build")
    assert process.returncode == 1 and "the build failed" in process.text, process.text


def test_an_unknown_step_is_refused(session):
    process = session("speed")
    assert process.returncode == 1 and "no step is called speed" in process.text


def test_one_call_of_each_small_case_runs():
    for case in ("small_prefill", "small_backward", "empty"):
        process = run_program(sys.executable, ROOT / "scripts/gpu_one.py", case, "--device", "cpu")
        assert process.returncode == 0 and f"{case}: done" in process.text, process.text


@pytest.mark.long
def test_the_benchmark_runs_and_names_its_peers():
    process = run_program(
        sys.executable, ROOT / "benchmarks/cuda_attention.py", "plain", "rules", "--quick", "--device", "cpu"
    )
    assert process.returncode == 0, process.text
    lines = process.stdout.splitlines()
    assert all("sdpa " in line and "cudnn " in line for line in lines if line[0].isdigit())
    assert any(line.startswith("D128 bool mask: fwd") and "sdpa " in line for line in lines)


@pytest.fixture
def bundle(tmp_path):
    """Runs scripts/gpu_bundle.sh of a copy, a repository of its own, with a stand-in for nvcc; `.log`: its calls."""
    copy, programs, log = tmp_path / "copy", tmp_path / "programs", tmp_path / "log"
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    shutil.copytree(ROOT / "csrc/attnpack/ops/cuda/kernels", copy / "csrc/attnpack/ops/cuda/kernels")
    (copy / "build").mkdir()
    (copy / "build/libattnpack.so").write_text("")
    programs.mkdir()
    write = 'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo made >"$2"; fi; shift; done'
    add_program(programs, "nvcc", f'echo "$*" >>{log}\n{write}')
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "-q"], ["add", "csrc"], [*identity, "commit", "-qm", "all"]):
        assert run_program("git", "-C", copy, *command).returncode == 0

    def run(*variants):
        log.write_text("")
        environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
        process = run_program("bash", copy / "scripts/gpu_bundle.sh", *variants, env=environment)
        process.log, process.copy = log.read_text().splitlines(), copy
        return process

    return run


def test_a_bundle_holds_a_library_per_variant(bundle):
    process = bundle("base=.", "capped=HEAD:-DCAP=1")
    assert process.returncode == 0, process.text
    for name in ("base", "capped"):
        listed = run_program("tar", "tJf", process.copy / f".gpu/{name}.tar.xz")
        assert listed.text.split() == [f"{name}/libattnpack_cuda.so"]
    compiled = [line for line in process.log if " -c " in line]
    capped = [line for line in compiled if "build/gpu_bundle/capped/" in line]
    assert len(capped) == len(compiled) - len(capped) > 15
    assert all("-DCAP=1" in line for line in capped) and not any("without_sm90" in line for line in compiled)
    for line in compiled:
        assert ("code=sm_90a" in line) == ("/sm90/" in line), line
    of_bf16 = [line for line in compiled if "-DATTNPACK_STORAGE=BFloat16 -DATTNPACK_WIDTH=128" in line]
    sources = Counter(re.search(r"(\w+)\.cu\b", line)[1] for line in of_bf16)
    assert sources and set(sources.values()) == {2}, sources  # each once per variant
    assert sum("-shared -cudart static" in line for line in process.log) == 2


def test_what_is_no_variant_is_refused(bundle):
    process = bundle("base")
    assert process.returncode == 1 and "'base' is no variant: NAME=REVISION" in process.text
