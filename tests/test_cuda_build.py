"""The CUDA kernels compile, without a GPU, and what Python says of them."""

import shutil

import pytest
from attnpack import _load, info
from processes import ROOT, run


@pytest.mark.long
def test_every_kernel_compiles_without_spills():
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not installed")
    process = run("bash", ROOT / "scripts/check_cuda.sh", timeout=900)
    assert process.returncode == 0, process.text
    for kernel in ("prefill_kernel", "decode_kernel", "latent_kernel", "exact_kernel", "gradient_kernel"):
        assert kernel in process.text
    assert "sm_80" in process.text and "sm_90a" in process.text


def test_a_kernel_that_spills_is_refused(tmp_path):
    log = tmp_path / "k.log"
    log.write_text(
        "ptxas info    : Compiling entry function '_Z1kv' for 'sm_80'\n"
        "    0 bytes stack frame, 40 bytes spill stores, 30 bytes spill loads\n"
        "ptxas info    : Used 255 registers, 400 bytes cmem[0]\n"
    )
    script = ROOT / "scripts/cuda_resources.py"
    assert run("python3", script, 64, log).returncode == 1
    allowed = run("python3", script, 70, log)
    assert allowed.returncode == 0 and "1 kernels, most bytes spilled: 70" in allowed.text


def test_the_cuda_library_is_loaded_only_where_torch_has_cuda():
    import torch

    library = info.collect()["libraries"]["libattnpack_cuda.so"]
    if torch.version.cuda is None:
        assert not library["loaded"] and library["why"] == "this torch has no CUDA"
    assert _load.load_cuda() is library["loaded"]
