"""Type checkers and editors know every public name: `py.typed`, annotations, and the stub of the classes of C++."""

import ast
import importlib
import inspect
import subprocess
import sys
import types
from pathlib import Path

import attnpack
import pytest

ROOT = Path(__file__).parents[2]
STUB = ROOT / "python/attnpack/cpp.pyi"
SHOWN = ["attnpack", "attnpack.cpp", "attnpack.backend", "attnpack.convert", "attnpack.checkpoints"]
SHOWN += ["attnpack.flash", "attnpack.distributed"]
ANNOTATED = [*SHOWN, "attnpack.hf", "attnpack.onnx", "attnpack.layer_ops", "attnpack.reference"]


def stub_members() -> dict[str, set[str]]:
    """The public members of each class of the stub, with those of its base classes."""
    members = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ClassDef):
            own = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            own |= {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
            members[node.name] = own.union(*(members[base.id] for base in node.bases))
    return {name: {member for member in own if member[0] != "_"} for name, own in members.items()}


def test_the_stub_has_the_classes_and_members_of_cpp():
    stub = {name: own for name, own in stub_members().items() if name[0] != "_"}
    bound = {name: value for name, value in vars(attnpack.cpp).items() if isinstance(value, type)}
    assert stub == {name: {member for member in dir(value) if member[0] != "_"} for name, value in bound.items()}


def public_content(module: str) -> dict[str, object]:
    """{name: value} of what a module offers: its `__all__`, or the classes and functions that it defines."""
    content = importlib.import_module(module)
    listed = getattr(content, "__all__", None)
    if listed is None:
        own = [n for n, v in vars(content).items() if isinstance(v, type) or hasattr(v, "__code__")]
        listed = [n for n in own if n[0] != "_" and ("cpp" in module or vars(content)[n].__module__ == module)]
    values = {name: getattr(content, name) for name in listed}
    return {name: value for name, value in values.items() if not isinstance(value, types.ModuleType)}


def public_names() -> list[str]:
    return [f"{module}.{name}" for module in SHOWN for name in public_content(module)]


def functions_of(name: str, value: object) -> dict[str, types.FunctionType]:
    """A function itself; of a class the public methods, and what makes it."""
    if not isinstance(value, type):
        return {name: value} if isinstance(value, types.FunctionType) else {}
    own = {part: made for part, made in vars(value).items() if isinstance(made, types.FunctionType)}
    return {f"{name}.{part}": made for part, made in own.items() if part[0] != "_" or part == "__init__"}


@pytest.mark.parametrize("module", ANNOTATED)
def test_arguments_and_results_have_types(module):
    """mypy and pyright show an argument without annotation as unknown."""
    found = {}
    for name, value in public_content(module).items():
        found |= functions_of(name, value)
    assert found or module == "attnpack.cpp"
    for name, function in found.items():
        signature = inspect.signature(function)
        bare = [
            p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name not in ("self", "cls")
        ]
        assert bare == [], name
        assert signature.return_annotation is not signature.empty or name.endswith("__init__"), name


def test_mypy_knows_every_public_name(tmp_path):
    pytest.importorskip("mypy", reason="the extra `test` is not installed")
    names = public_names()
    assert {"attnpack.attention", "attnpack.cpp.CausalLM", "attnpack.backend.enable"} <= set(names)
    program = tmp_path / "program.py"
    lines = [f"import {module}" for module in SHOWN] + [f"reveal_type({name})" for name in names]
    lines += ["attnpack.atention", "attnpack.cpp.CausalML", "reveal_type(attnpack.cpp.Linear(4, 4).forward)"]
    program.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache")]
    environment = {"MYPYPATH": str(ROOT / "python"), "PATH": ""}
    text = subprocess.run([*command, str(program)], capture_output=True, text=True, env=environment).stdout
    revealed = [line for line in text.splitlines() if "Revealed type is" in line]
    assert len(revealed) == len(names) + 1, text
    unknown = [line for line in revealed if line.endswith('is "Any"')]
    assert [names[revealed.index(line)] for line in unknown] == []
    errors = [line for line in text.splitlines() if ": error: " in line]
    assert len(errors) == 2 and "atention" in errors[0] and "CausalML" in errors[1], text
    assert "def (x: torch._tensor.Tensor) -> torch._tensor.Tensor" in revealed[-1]
