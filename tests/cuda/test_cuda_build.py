"""The CUDA kernels compile without a GPU, and Python reports them."""

import os
import shutil

import pytest
from attnpack import _load
from attnpack.tools import info
from processes import ROOT, run_program

nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")


def check(*arguments, **environment):
    process = run_program(
        "bash", ROOT / "scripts/check_cuda.sh", *arguments, env=os.environ | environment, timeout=1200
    )
    assert process.returncode == 0, process.text
    return process.text


@nvcc
def test_some_kernels_compile_without_spills():
    said = check(0, "90a", FILES="forward_decode.cu")
    assert "decode_kernel<BFloat16, 128>" in said and "sm_90a" in said and "sm_80" not in said


@nvcc
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_kernel_compiles_with_few_spills():
    said = check()
    for kernel in ("prefill", "decode", "latent", "exact", "gradient", "gradient_mma"):
        assert f"{kernel}_kernel" in said
    assert "sm_80" in said and "sm_90a" in said


@nvcc
def test_a_source_that_does_not_compile_stops_the_check(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "csrc", copy / "csrc")
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    (copy / "csrc/attnpack/ops/cuda/kernels/broken.cu").write_text("__global__ void kernel() { int unused; }\n")
    process = run_program("bash", copy / "scripts/check_cuda.sh", 0, "80", env=os.environ | {"FILES": "broken.cu"})
    assert process.returncode == 1 and "a kernel did not compile" in process.text and "unused" in process.text


def test_a_kernel_that_spills_is_refused(tmp_path):
    log = tmp_path / "k.log"
    log.write_text(
        "ptxas info    : Compiling entry function '_Z1kv' for 'sm_80'\n"
        "    0 bytes stack frame, 40 bytes spill stores, 30 bytes spill loads\n"
        "ptxas info    : Used 255 registers, 400 bytes cmem[0]\n"
    )
    script = ROOT / "scripts/cuda_resources.py"
    assert run_program("python3", script, 64, log).returncode == 1
    allowed = run_program("python3", script, 70, log)
    assert allowed.returncode == 0 and "1 kernels, most bytes spilled: 70" in allowed.text


def test_the_cuda_library_is_loaded_only_where_torch_has_cuda():
    import torch

    library = info.collect_info()["libraries"]["libattnpack_cuda.so"]
    if torch.version.cuda is None:
        assert not library["loaded"] and library["why"] == "this torch has no CUDA"
    assert _load.load_cuda() is library["loaded"]
