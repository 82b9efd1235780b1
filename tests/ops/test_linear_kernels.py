"""Which kernel a linear layer takes: by the table, by the number of rows, by ATTNPACK_LINEAR. A process reads that
variable once, so each program runs in a process of its own."""

import os
import sys

import pytest
import torch
from attnpack import _C
from processes import ROOT, run_program, run_python

SHAPES = """
import torch, attnpack
import torch.nn.functional as F
torch.manual_seed(0)
x, weight, bias = torch.randn(130, 256), torch.randn(320, 256), torch.randn(320)
def ops_of(call):
    with torch.profiler.profile() as profile:
        call()
    return {event.key for event in profile.key_averages()}
def by_onednn(*tensors):
    return "mkldnn::_linear_pointwise" in ops_of(lambda: attnpack.ops.linear(*tensors))
"""


def printed(program: str, kernel: str = "") -> list[str]:
    ran = run_python(SHAPES + program, ATTNPACK_LINEAR=kernel)
    assert ran.returncode == 0, ran.text
    return ran.stdout.splitlines()


def has_avx512() -> bool:
    return "AVX512" in torch.backends.cpu.get_cpu_capability()


def is_slow_with_mkl() -> bool:
    """MKL uses half of AVX-512 on CPUs that are not Intel's."""
    with open("/proc/cpuinfo") as file:
        return has_avx512() and torch.backends.mkl.is_available() and "GenuineIntel" not in file.read()


def test_the_table_is_followed():
    lines = printed("""
with torch.no_grad():
    print(by_onednn(x, weight))
    print(by_onednn(x.bfloat16(), weight.bfloat16(), bias.bfloat16()))
    for few in (x[:20, :40], x[:30, :40], x.double(), x.half()):
        print(by_onednn(few, weight[:, : few.size(1)].to(few.dtype)))
    many = x.repeat(80, 1)  # enough work for thin products and short sums
    for inputs, outputs in ((16, 64), (16, 63), (15, 64)):
        print(by_onednn(many[:, :inputs], weight[:outputs, :inputs]))
leaves = [t.requires_grad_() for t in (x, weight, bias)]
names = ops_of(lambda: attnpack.ops.linear(*leaves).sum().backward())
print("mkldnn::_linear_pointwise" in names, bool(names & {"aten::mm", "aten::addmm"}))
""")
    slow = is_slow_with_mkl()
    assert lines == [str(slow), str(has_avx512()), *4 * ["False"], str(slow), "False", "False", f"{slow} {not slow}"]


@pytest.mark.parametrize("kernel", ["torch", "onednn", ""])
def test_a_kernel_is_pinned(kernel):
    lines = printed(
        """
for rows, inputs, outputs in ((3, 40, 50), (40, 50, 60), (200, 300, 400)):
    given = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    print(by_onednn(*given), torch.equal(attnpack.ops.linear(*given), F.linear(*given)))
""",
        kernel,
    )
    if kernel == "torch":
        assert lines == ["False True"] * 3
    elif kernel == "onednn":
        assert [line.split()[0] for line in lines] == ["True"] * 3
    else:
        assert lines[0].startswith("False")


def test_an_unknown_kernel_is_refused():
    ran = run_python(SHAPES + "by_onednn(x, weight)", ATTNPACK_LINEAR="mkl")
    assert ran.returncode != 0
    assert "ATTNPACK_LINEAR is 'mkl', wants torch or onednn, or nothing for the faster one" in ran.text


REPLACED = """
expected = F.linear(x, weight)
with attnpack.backend.enable("linear"):
    print(torch.equal(F.linear(x, weight), expected), attnpack.backend.report()["linear"]["taken"])
"""


def test_a_pinned_kernel_is_everybodys():
    assert printed(REPLACED, "torch") == ["True 0"]
    assert printed(REPLACED, "onednn")[0].endswith(" 1")


def test_few_rows_are_taken_with_gradients_too():
    assert printed("""
with attnpack.backend.enable("linear"):
    for gradients in (False, True):
        F.linear(x[:3], weight.requires_grad_(gradients))
        report = attnpack.backend.report()["linear"]
        print(report["taken"], report["passed_on"])
""") == [
        "1 {}",
        "2 {}",
    ]


if not _C.linear_kernels().startswith("oneDNN"):  # elsewhere these tests run as they are

    @pytest.mark.long
    def test_with_onednn_pinned():
        """The tests marked onednn, which conftest.py leaves out where the table names torch's linear: for a minute."""
        marked = "pytestmark = pytest.mark.onednn\n"
        files = [file for file in (ROOT / "tests").glob("*/test_*.py") if marked in file.read_text()]
        environment = os.environ | {"ATTNPACK_LINEAR": "onednn"}
        ran = run_program(sys.executable, "-m", "pytest", "-q", "-m", "not long", *files, cwd=ROOT, env=environment)
        assert ran.returncode == 0, ran.stdout[-3000:]
        assert " passed" in ran.stdout and " skipped" not in ran.stdout
