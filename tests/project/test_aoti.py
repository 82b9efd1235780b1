"""A package of AOTInductor with our ops runs in a C++ process that links libattnpack."""

import sys

import pytest
import torch
from cpp_programs import cpp_program
from processes import ROOT, run_program
from script_modules import load_script
from torch.testing import assert_close

pytestmark = pytest.mark.long
EXAMPLE = ROOT / "examples/cpp/aoti"


def test_the_example(tmp_path):
    process = run_program(sys.executable, EXAMPLE / "export.py", tmp_path / "layer.pt2", tmp_path / "inputs.pt")
    assert process.returncode == 0, process.text
    files = [tmp_path / name for name in ("layer.pt2", "inputs.pt", "outputs.pt")]
    process = run_program(cpp_program("aoti"), *files, env={})
    assert process.returncode == 0, process.text
    assert process.stdout.splitlines() == ["output [3, 5, 32]", "output [3, 5, 3, 6]", "output [3, 5, 3]"]
    torch.manual_seed(0)
    layer = load_script("examples/cpp/aoti/export.py").Layer().eval()
    inputs = torch.load(files[1])
    assert len(inputs[0]) == 3  # the package was made for a batch of 2
    assert_close(torch.load(files[2]), layer(*inputs))


def test_a_package_of_the_example_runs_in_python_too(tmp_path):
    export = load_script("examples/cpp/aoti/export.py")
    torch.manual_seed(1)
    layer, inputs = export.Layer().eval(), export.make_inputs(2)
    with torch.no_grad():
        program = torch.export.export(layer, tuple(inputs))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    assert_close(torch._inductor.aoti_load_package(package)(*inputs), layer(*inputs))
