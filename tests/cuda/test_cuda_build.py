"""The CUDA kernels compile without a GPU, and Python reports them."""

import os
import re
import shutil
from collections import Counter

import pytest
from attnpack import _load, backend, installation
from attnpack.tools import info
from processes import ROOT, add_program, needs, run_program

nvcc = needs("nvcc")


def check(*arguments, **environment):
    process = run_program(
        "bash", ROOT / "scripts/check_cuda.sh", *arguments, env=os.environ | environment, timeout=1200
    )
    assert process.returncode == 0, process.text
    return process.text


@nvcc
@pytest.mark.long
def test_some_kernels_compile_without_spills():
    said = check(0, "90a", FILES="forward_decode.cu")
    assert "decode_kernel<BFloat16, 128>" in said and "sm_90a" in said and "sm_80" not in said


@nvcc
@pytest.mark.long
def test_kernels_for_hopper_alone_compile():
    """Their instructions are those of sm_90a, and nvcc's -arch would compile them for compute_90 too."""
    said = check(256, "80", "90a", FILES="latent_sm90.cu")
    assert "sm_90a" in said and "beyond their limits: 0" in said


@nvcc
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_kernel_compiles_with_few_spills():
    said = check()
    for kernel in (
        "prefill",
        "decode",
        "decode_source",
        "latent",
        "exact",
        "gradient",
        "gradient_mma",
        "forward_sm90",
        "query_gradient",
        "key_gradient",
        "place",
        "quantize",
    ):
        assert f"{kernel}_kernel" in said
    assert all(architecture in said for architecture in ("sm_80", "sm_90a", "sm_100", "sm_120"))


@nvcc
def test_a_source_that_does_not_compile_stops_the_check(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "csrc", copy / "csrc")
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    (copy / "csrc/attnpack/ops/cuda/kernels/broken.cu").write_text("__global__ void kernel() { int unused; }\n")
    process = run_program("bash", copy / "scripts/check_cuda.sh", 0, "80", env=os.environ | {"FILES": "broken.cu"})
    assert process.returncode == 1 and "a kernel did not compile" in process.text and "unused" in process.text


# Only cmake/Cuda.cmake, with a stand-in for nvcc that knows the architectures of a test.
PROJECT = """
cmake_minimum_required(VERSION 3.22)
project(architectures NONE)
set(CMAKE_CXX_COMPILER c++)
add_library(attnpack SHARED IMPORTED)
set_target_properties(attnpack PROPERTIES IMPORTED_LOCATION /libattnpack.so)
include({root}/cmake/Cuda.cmake)
"""


@pytest.fixture
def configure(tmp_path):
    """configure(known, asked, listed="", here=None): cmake's process, and the rules of the build.

    known: the architectures of nvcc; listed: TORCH_CUDA_ARCH_LIST; here: what nvidia-smi says, if there is one.
    """
    (tmp_path / "csrc").symlink_to(ROOT / "csrc")
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT))
    programs = tmp_path / "programs"
    programs.mkdir()

    def configure(known, asked, listed="", here=None):
        nvcc = add_program(programs, "nvcc", f"printf 'compute_%s\\n' {known}")
        add_program(programs, "nvidia-smi", "exit 9" if here is None else f"printf '%s\\n' {here}")
        options = ["-DATTNPACK_CUDA=ON", f"-DATTNPACK_NVCC={nvcc}", f"-DATTNPACK_CUDA_ARCHITECTURES={asked}"]
        environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "TORCH_CUDA_ARCH_LIST": listed}
        process = run_program(
            "cmake", "-G", "Unix Makefiles", "-S", tmp_path, "-B", tmp_path / "build", *options, env=environment
        )
        return process, "".join(path.read_text() for path in (tmp_path / "build/CMakeFiles").rglob("build.make"))

    return configure


@pytest.mark.parametrize(
    "known, asked, listed, here, wanted",
    [
        ("80 90 100 103 110 120 121", "ALL", "8.0", "9.0", ["80", "90", "100", "120"]),
        ("80 90 100 120", "AUTO", "", None, ["80", "90", "100", "120"]),
        ("80 86 90", "AUTO", "", None, ["80", "90"]),
        ("80 90 100", "90a", "8.0", "10.0", ["90a"]),
        ("80 90 100", "AUTO", "", "9.0 9.0 8.6", ["90", "86"]),
        ("80 90 100", "AUTO", "7.5;8.0 9.0+PTX", "10.0", ["80", "90"]),
        ("80 90 100", "AUTO", "", "8.9", ["89"]),
    ],
)
def test_each_architecture_gets_an_image_and_its_ptx(known, asked, listed, here, wanted, configure):
    """PTX serves devices that are newer: that of 100 those between 100 and 120, for which the PTX of 120 is too new."""
    process, rules = configure(known, asked, listed, here)
    assert process.returncode == 0, process.text
    images = set(re.findall(r"arch=compute_(\w+),code=(sm|compute)_(\w+)", rules))
    of_all = {(name, kind, name) for name in wanted for kind in ("sm", "compute")}
    # The kernels of sm90/ have no PTX: no other device runs it. Without such a device stand-ins are compiled.
    hopper = bool({"90", "90a"} & set(wanted))
    assert images == of_all | ({("90a", "sm", "90a")} if hopper else set())
    compiled = [bool(re.search(rf"\b{name}\.cu\b", rules)) for name in ("latent_sm90", "without_sm90")]
    assert compiled == [hopper, not hopper]
    assert "--threads 0" in rules
    # A file that takes minutes is compiled in parts.
    parts = re.findall(r"-DATTNPACK_STORAGE=\w+ -DATTNPACK_WIDTH=\w+ -DATTNPACK_VALUES=\w+", rules)
    assert len(set(parts)) == 8 * hopper and ("-DATTNPACK_CHOICE" in rules) == hopper


def test_an_architecture_without_a_number_is_refused(configure):
    process, _ = configure("80 90", "AUTO", "Hopper")
    assert process.returncode != 0
    assert re.search(r"TORCH_CUDA_ARCH_LIST\s+names\s+the\s+architecture\s+'Hopper'", process.text)


# One kernel of each kind in bf16, so that PTX is made in seconds.
KERNELS = """
#include <attnpack/ops/cuda/kernels/backward_mma.cuh>
#include <attnpack/ops/cuda/kernels/forward_latent.cuh>
#include <attnpack/ops/cuda/kernels/forward_mma.cuh>
namespace attnpack::cuda {
extern __shared__ __align__(128) unsigned char shared[];
#define ATTNPACK_FORWARD(name, ...)                                                                           \\
  __global__ void name(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlan plan,   \\
                       void* workspace) {                                                                     \\
    __VA_ARGS__(p, plan, workspace, blockIdx.x, shared);                                                      \\
  }
ATTNPACK_FORWARD(prefill, forward_mma_block<ForwardTile<BFloat16, 4, 1, 128>>)
ATTNPACK_FORWARD(plain, forward_mma_block<ForwardTile<BFloat16, 4, 1, 128, KeysIn::kTensor, Scores::kPlain>>)
ATTNPACK_FORWARD(decode, forward_mma_block<ForwardTile<BFloat16, 1, 4, 128>>)
ATTNPACK_FORWARD(pages, forward_mma_block<ForwardTile<BFloat16, 1, 4, 128, KeysIn::kPages>>)
ATTNPACK_FORWARD(bytes, forward_mma_block<ForwardTile<BFloat16, 1, 4, 128, KeysIn::kBytes8>>)
ATTNPACK_FORWARD(latent, forward_latent_block<BFloat16, 1, 4>)
__global__ void gradient(const __grid_constant__ AttentionBackwardParams p,
                         const __grid_constant__ BackwardPlan plan) {
  backward_mma_block<BFloat16, Gradient::kKeyAndValue, 128>(p, plan, nullptr, blockIdx.x, shared);
}
}
"""
# By arithmetic: products of 16 x 8 x 16 per warp and step, and what feeds them. A step has 64 keys; latent 32, and its
# loop over the width is kept, two k steps a turn; a gradient has 32 rows, and keeps its loops over the width, too.
MMA, MATRICES, TRANSPOSED = "mma.sync.aligned.m16n8k16", "ldmatrix.sync.aligned.m8n8.x4.shared", ".x4.trans.shared"
COUNTS = {
    "prefill": {MMA: 2 * 64, MATRICES: 8 + 32, TRANSPOSED: 32, "cvt.rn.bf16x2.f32": 16},
    "plain": {MMA: 4 * 64, MATRICES: 16 + 32, TRANSPOSED: 32, "cvt.rn.bf16x2.f32": 32},  # 32 rows per warp
    "decode": {MMA: 2 * 16, MATRICES: 8 + 8, TRANSPOSED: 8, "cvt.rn.bf16x2.f32": 4},
    "pages": {MMA: 2 * 16, MATRICES: 8 + 8, TRANSPOSED: 8, "cvt.rn.bf16x2.f32": 4},
    "bytes": {MMA: 2 * 16, MATRICES: 8 + 8, TRANSPOSED: 8},
    "latent": {MMA: 4 + 32, MATRICES: 2 + 4 + 2, TRANSPOSED: 16, "cvt.rn.bf16x2.f32": 2},
    "gradient": {MMA: 16 + 64, TRANSPOSED: 32, "cvt.rn.bf16x2.f32": 16},
}


@nvcc
def test_kernels_hold_the_instructions_that_they_should(tmp_path):
    source, ptx = tmp_path / "kernels.cu", tmp_path / "kernels.ptx"
    source.write_text(KERNELS)
    process = run_program("nvcc", "-ptx", "-std=c++20", "-O3", "-arch=sm_80", "-I", ROOT / "csrc", source, "-o", ptx)
    assert process.returncode == 0, process.text
    bodies = re.split(r"\n(?=\.visible \.entry|\.func)", ptx.read_text())
    for kernel, counts in COUNTS.items():
        body = next(body for body in bodies if re.match(rf"\.visible \.entry \w*{len(kernel)}{kernel}E", body))
        found = Counter(re.findall(r"^\s+(?:@%\w+ )?([a-z][\w.]+)", body, re.MULTILINE))
        for name, count in counts.items():
            assert sum(n for full, n in found.items() if name in full) == count, (kernel, name, found)
        assert any(name.startswith("cp.async.cg.shared.global") for name in found)
        assert any(name.startswith("st.shared.v2.f32") for name in found)  # results by pairs: no bank conflicts
        # No memory of a thread's own, and the larger of two numbers by one instruction.
        assert not any(name.startswith(("ld.local", "st.local", "setp.nan")) for name in found), (kernel, found)
        assert ".local " not in body
        # Scores are finished in fp32: fp64 is read for masks in fp64, ALiBi and sinks, and dropout compares integers.
        scores = counts[MMA] // 4
        assert found["ld.global.f64"] <= scores + 8 and found["setp.lt.f64"] <= 3, (kernel, found)


LAUNCHES = """
#include <cstdio>
#include <attnpack/ops/cuda/kernels/launch.cuh>
__global__ void nothing() {}
int main() {
  const auto say = [](const char* error) { std::puts(error ? error : "launched"); };
  cudaGetLastError();
  cudaMemcpy(nullptr, nullptr, 1, static_cast<cudaMemcpyKind>(77));
  say(attnpack::cuda::launch(nothing, 1, 1, 0, 0, nullptr));
  say(attnpack::cuda::launch(nothing, 0, 1, 0, 0, nullptr));
}
"""


@nvcc
def test_the_error_of_an_earlier_call_is_said(tmp_path):
    source, program = tmp_path / "launches.cu", tmp_path / "launches"
    source.write_text(LAUNCHES)
    process = run_program("nvcc", "-std=c++20", "-arch=sm_80", "-I", ROOT / "csrc", source, "-o", program)
    assert process.returncode == 0, process.text
    launched, without_blocks = run_program(program).stdout.splitlines()
    assert launched.startswith("a CUDA call before this one failed: ") and without_blocks == "launched"


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


def test_info_and_report_say_which_kernels_plain_calls_run(monkeypatch):
    monkeypatch.delenv("ATTNPACK_CUDA", raising=False)
    assert info.collect_info()["cuda"].startswith("fastest: torch's kernels for plain 16-bit calls on ")
    assert backend.report()["cuda"]["ran_torch"] == {}
    monkeypatch.setenv("ATTNPACK_CUDA", "own")
    assert backend.report()["cuda"]["kernels"] == "own: attnpack's kernels, by ATTNPACK_CUDA"
    assert f"{'cuda kernels':<20} own: attnpack's kernels" in "\n".join(installation._lines(info.collect_info()))
    monkeypatch.setenv("ATTNPACK_CUDA", "fast")
    with pytest.raises(ValueError, match="ATTNPACK_CUDA is 'fast', wants own or fastest"):
        backend.report()
