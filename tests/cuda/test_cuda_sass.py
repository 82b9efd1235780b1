"""The inner loops of Hopper's kernels as ptxas orders them, by disassembly.

The order in PTX is right, but ptxas may move a wait to before the softmax that is to run beside the products. Results
stay the same then, so no other test sees it.
"""

import importlib.util
import itertools
import os
import re
import shutil
from pathlib import Path

import pytest
from processes import ROOT, needs, run_program

BEGIN = """
#include <attnpack/ops/cuda/kernels/sm90/launch_backward_sm90.cuh>
#include <attnpack/ops/cuda/kernels/sm90/launch_sm90.cuh>
namespace attnpack::cuda {
#define ATTNPACK_CONSTANT const __grid_constant__
#define ATTNPACK_MAPS ATTNPACK_CONSTANT TileMap a, ATTNPACK_CONSTANT TileMap b
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    forward(ATTNPACK_CONSTANT AttentionParams p, ATTNPACK_CONSTANT ForwardPlan plan, ATTNPACK_MAPS, void* workspace) {
  extern __shared__ __align__(1024) unsigned char shared[];
  forward_sm90_block<Tile>(p, plan, a, b, workspace, blockIdx.x, shared);
}
"""
FORWARD = """
template __global__ void forward<WarpgroupForward<BFloat16, {}, {}, Scores::{}>>(
    ATTNPACK_CONSTANT AttentionParams, ATTNPACK_CONSTANT ForwardPlan, ATTNPACK_MAPS, void*);
"""
GRADIENTS = """
template __global__ void query_gradient_kernel<BFloat16, {0}, {1}, Scores::{2}>(
    ATTNPACK_CONSTANT AttentionBackwardParams, ATTNPACK_CONSTANT BackwardPlan, ATTNPACK_MAPS, void*);
template __global__ void key_gradient_kernel<BFloat16, {0}, {1}, Scores::{2}>(
    ATTNPACK_CONSTANT AttentionBackwardParams, ATTNPACK_CONSTANT BackwardPlan, ATTNPACK_MAPS,
    ATTNPACK_CONSTANT TileMap c, ATTNPACK_CONSTANT TileMap d, void*);
"""


def source_of(forward: list[tuple], gradients: list[tuple]) -> str:
    """A file of kernels: (width, width of values, scores) of each; of three warpgroups "kPlain, 3"."""
    kernels = [FORWARD.format(*each) for each in forward] + [GRADIENTS.format(*each) for each in gradients]
    return BEGIN + "".join(kernels) + "}\n"


nvcc = needs("nvcc")
PLAIN, MASKED, THREE = "ScoresE1ELi2E", "ScoresE2ELi2E", "ScoresE1ELi3E"  # in a kernel's name; THREE: warpgroups
LOOPS = [(width, kind) for width in (128, 192) for kind in ("ScoresE1E", "ScoresE2E")]


def find_tools() -> Path | None:
    """The folder of cuobjdump and nvdisasm: on the PATH, or in triton's wheel."""
    if (found := shutil.which("cuobjdump")) and shutil.which("nvdisasm"):
        return Path(found).parent
    spec = importlib.util.find_spec("triton")
    folder = Path(spec.origin).parent / "backends/nvidia/bin" if spec and spec.origin else Path()
    return folder if (folder / "cuobjdump").exists() and (folder / "nvdisasm").exists() else None


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """{kernel: its instructions}, each (address, name, text), and what ptxas says."""
    tools = find_tools()
    if not tools:
        pytest.skip("no cuobjdump and nvdisasm: they come with the CUDA toolkit and with triton's wheel")
    folder = tmp_path_factory.mktemp("sass")
    kinds = ("kPlain", "kMasked")
    forward = [(width, width, kind) for width in (64, 128, 256) for kind in kinds] + [(64, 64, "kPlain, 3")]
    gradients = [(width, 128, kind) for width in (128, 192) for kind in kinds]
    (folder / "kernels.cu").write_text(source_of(forward, gradients))
    flags = ["-std=c++20", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-I", ROOT / "csrc"]
    process = run_program("nvcc", *flags, "-cubin", folder / "kernels.cu", "-o", folder / "kernels.cubin")
    assert process.returncode == 0, process.text
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    sass = run_program("cuobjdump", "-sass", folder / "kernels.cubin", env=environment)
    assert sass.returncode == 0, sass.text
    kernels = {}
    for body in sass.stdout.split("Function : ")[1:]:
        lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\w+\s+)?([A-Z][\w.]*)[^;]*);", body)
        kernels[body.split()[0]] = [(int(address, 16), name, text) for address, text, name in lines]
    return kernels, process.text


def kernel_named(kernels, *words):
    (found,) = [body for name, body in kernels.items() if all(word in name for word in words)]
    return found


def inner_loop(body, products):
    """The shortest loop that holds so many products. A loop is what lies between a branch backwards and its target."""
    loops = []
    for end, (address, name, text) in enumerate(body):
        target = re.search(r"0x([0-9a-f]+)\s*$", text)
        if name == "BRA" and target and int(target[1], 16) < address:
            loop = [line for line in body[: end + 1] if line[0] >= int(target[1], 16)]
            if sum(line[1].startswith("HGMMA") for line in loop) >= products:
                loops.append(loop)
    assert loops, f"no loop with {products} products"
    return min(loops, key=len)


def outline(loop):
    """The loop as a list of HGMMA, WAIT<n>, EX2, and LOAD from global memory, without repetitions."""
    marks = []
    for _, name, text in loop:
        if wait := re.search(r"DEPBAR\.LE gsb0, 0x(\w+)", text):
            marks.append(f"WAIT<{wait[1]}>")
        elif name.startswith("HGMMA"):
            marks.append("HGMMA")
        elif name == "MUFU.EX2":
            marks.append("EX2")
        elif name.startswith("LDG"):
            marks.append("LOAD")
    return [mark for i, mark in enumerate(marks) if i == 0 or mark != marks[i - 1]]


@nvcc
@pytest.mark.long
@pytest.mark.parametrize("width, products, kind", [(64, 4 + 8, PLAIN), (64, 4 + 8, THREE), (128, 8 + 8, PLAIN)])
def test_the_softmax_runs_beside_the_values_of_the_step_before(width, products, kind, compiled):
    loop = inner_loop(kernel_named(compiled[0], "forward", f"Li{width}ELi{width}E", kind), products)
    assert outline(loop) == ["WAIT<0>", "HGMMA", "WAIT<1>", "EX2"]
    assert sum(name == "MUFU.EX2" for _, name, _ in loop) == 64 + 2  # of each score, and of two rows' factors


@nvcc
@pytest.mark.long
def test_wide_outputs_are_rescaled_between_the_products_of_a_step(compiled):
    loop = inner_loop(kernel_named(compiled[0], "forward", "Li256ELi256E", PLAIN), 16 + 4)
    assert outline(loop) == ["WAIT<0>", "HGMMA", "WAIT<1>", "EX2"]
    products = [i for i, (_, name, _) in enumerate(loop) if name.startswith("HGMMA")]
    between = [name for _, name, _ in loop[products[0] : products[-1]]]
    # A lane's numbers of 64 rows of 256; ptxas may put a few of them after the last product.
    assert between.count("FMUL") >= 120 and sum(name == "FMUL" for _, name, _ in loop) >= 128
    assert not any(name.startswith("BAR") for name in between)  # no turns


@nvcc
@pytest.mark.long
@pytest.mark.parametrize("width, products", [(64, 4 + 8), (128, 8 + 8), (256, 16 + 4)])
def test_the_bits_of_a_mask_are_read_beside_the_products(width, products, compiled):
    loop = inner_loop(kernel_named(compiled[0], "forward", f"Li{width}ELi{width}E", MASKED), products)
    marks = outline(loop)
    beside = marks[1 : marks.index("WAIT<1>")]
    assert marks == ["WAIT<0>", *beside, "WAIT<1>", "EX2"] and set(beside) == {"HGMMA", "LOAD"}
    assert sum(name.startswith("LDG") for _, name, _ in loop) == 2  # all words of a row at once
    plain = inner_loop(kernel_named(compiled[0], "forward", f"Li{width}ELi{width}E", PLAIN), products)
    scores = 64 if width <= 128 else 32
    assert len(loop) - len(plain) < 2.6 * scores  # a question and an answer per score, where a step hides any


def gradient_loop(compiled, name, width, kind):
    """The inner loop of a gradient kernel: a step's products of scores, of values, and for the sums."""
    scores, values = width // 16, 8
    sums = {"query_gradient": 4, "key_gradient": 4 + 4 if width == 128 else 2 + 2}[name]
    return inner_loop(kernel_named(compiled[0], name, f"Li{width}ELi128E", kind), scores + values + sums)


@nvcc
@pytest.mark.long
@pytest.mark.parametrize("width, kind", LOOPS)
def test_the_weights_run_beside_the_query_gradient_of_the_step_before(width, kind, compiled):
    marks = outline(gradient_loop(compiled, "query_gradient", width, kind))
    beside = marks[1 : marks.index("WAIT<1>")]
    assert marks == ["WAIT<0>", *beside, "WAIT<1>", "EX2"] and set(beside) <= {"HGMMA", "LOAD"}
    assert ("LOAD" in beside) == (kind == "ScoresE2E")  # of the mask's bits


@nvcc
@pytest.mark.long
@pytest.mark.parametrize("width, kind", LOOPS)
def test_the_key_gradient_asks_no_question_per_score(width, kind, compiled):
    loop = gradient_loop(compiled, "key_gradient", width, kind)
    marks = outline(loop)
    assert marks[:4] == ["HGMMA", "WAIT<1>", "EX2", "HGMMA"] and marks[-1] == "WAIT<0>"
    assert sum(name == "BRA" for _, name, _ in loop) <= 9  # one per score would be 32


@nvcc
@pytest.mark.long
def test_plain_loops_hold_no_memory_of_a_thread_s_own(compiled):
    for words, products in (
        *(
            (("forward", f"Li{width}ELi{width}E", kind), products)
            for width, products in ((64, 12), (128, 16), (256, 20))
            for kind in (PLAIN, MASKED)
        ),
        (("forward", "Li64ELi64E", THREE), 12),
    ):
        loop = inner_loop(kernel_named(compiled[0], *words), products)
        assert not [text for _, name, text in loop if name.startswith(("LDL", "STL"))], words
    for (width, kind), gradient in itertools.product(LOOPS, ("query_gradient", "key_gradient")):
        loop = gradient_loop(compiled, gradient, width, kind)
        assert not [text for _, name, text in loop if name.startswith(("LDL", "STL"))], (gradient, width, kind)


@nvcc
@pytest.mark.long
def test_ptxas_serialises_no_product(compiled):
    assert not re.search(r"C75\d\d|serializ", compiled[1]), compiled[1]


@nvcc
def test_numbered_barriers_promise_no_common_instruction(tmp_path):
    """PTX's bar is barrier.aligned, and warps of different roles do not execute one and the same instruction."""
    source, ptx = tmp_path / "kernels.cu", tmp_path / "kernels.ptx"
    source.write_text(source_of([(64, 64, "kMasked")], [(128, 128, "kMasked")]))
    process = run_program(
        "nvcc", "-ptx", "-std=c++20", "-O3", "-arch=compute_90a", "-I", ROOT / "csrc", source, "-o", ptx
    )
    assert process.returncode == 0, process.text
    named = set(re.findall(r"\b(bar(?:rier)?(?:\.\w+)*)\s+(\w+|%\w+)", ptx.read_text()))
    assert ("barrier.sync", "%r") in {(name, operand[:2]) for name, operand in named}
    assert {operand for name, operand in named if not name.startswith("barrier.") or "aligned" in name} <= {"0"}, named
