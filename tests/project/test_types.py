"""Type checkers and editors know every public name: `py.typed`, annotations, and the stub of the classes of C++."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path

import attnpack
import pytest
from attnpack import signatures

ROOT = Path(__file__).parents[2]
STUB = ROOT / "python/attnpack/cpp.pyi"
SHOWN = ["attnpack", "attnpack.cpp", "attnpack.backend", "attnpack.convert", "attnpack.checkpoints"]
SHOWN += ["attnpack.flash", "attnpack.distributed"]
ANNOTATED = [*SHOWN, "attnpack.hf", "attnpack.onnx", "attnpack.ops", "attnpack.layer_ops", "attnpack.reference"]
ANNOTATED += ["attnpack.tools.plot.page", "attnpack.tools.plot.attention", "attnpack.tools.plot.schematic"]


@pytest.fixture(scope="module")
def mypy(tmp_path_factory) -> Callable[[Path], list[str]]:
    """mypy's messages of errors and revealed types in a program. All runs share its options, and so its cache."""
    pytest.importorskip("mypy", reason="the extra `test` is not installed")
    folder = tmp_path_factory.mktemp("mypy")
    settings = "[mypy]\n[mypy-transformers.*]\nfollow_imports = skip\nignore_missing_imports = True\n"
    (folder / "mypy.ini").write_text(settings)
    options = ["--follow-imports=silent", "--check-untyped-defs", "--config-file", folder / "mypy.ini"]
    environment = {"MYPYPATH": str(ROOT / "python"), "PATH": ""}

    def run(program: Path) -> list[str]:
        command = [sys.executable, "-m", "mypy", *options, "--cache-dir", folder, program]
        text = subprocess.run(command, capture_output=True, text=True, env=environment).stdout
        assert re.search(r"^(Success|Found \d+ errors?)", text, flags=re.M), text
        return [line for line in text.splitlines() if ": error: " in line or "Revealed type is" in line]

    return run


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


def stub_methods() -> dict[tuple[str, str], ast.FunctionDef]:
    """{(class, method): its definition in the stub}, with inherited ones; of overloads the last."""
    methods = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                methods |= {(node.name, name): part for (owner, name), part in methods.items() if owner == base.id}
            methods |= {(node.name, part.name): part for part in node.body if isinstance(part, ast.FunctionDef)}
    return methods


def arguments_of(function: ast.FunctionDef) -> tuple[list[str], set[str], bool]:
    """Names that may stand by position, all names, and whether there are more, of one that the stub defines."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and decorator.func.id == "made_as":
            parameters = inspect.signature(eval(ast.unparse(decorator.args[0]))).parameters.values()
            positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
            return positional, {one.name for one in parameters}, False
    positional = [one.arg for one in function.args.args[1:]]
    names, others = {*positional, *(one.arg for one in function.args.kwonlyargs)}, function.args.kwarg
    named = re.match(r"Unpack\[(\w+)", ast.unparse(others.annotation)) if others else None
    return positional, names | (set(getattr(signatures, named[1]).__annotations__) if named else set()), bool(others)


def test_the_stub_takes_what_cpp_takes():
    """Bound functions show their arguments in their docstrings; those of pybind11 itself show `self`."""
    seen = set()
    for (owner, name), function in stub_methods().items():
        text = getattr(getattr(attnpack.cpp, owner, None), name, None).__doc__ or ""
        shown = re.match(r"\w+\(([^):]*)\)", text)
        if owner[0] == "_" or (name[0] == "_" and name != "__init__") or not shown:
            continue
        positional, _, keywords = (part.strip(", ") for part in shown[1].partition("*"))
        bound = [part for part in positional.split(", ") if part]
        everything = {*bound, *(part for part in keywords.split(", ") if part)}
        mine, names, more = arguments_of(function)
        assert mine == bound, f"{owner}.{name}"
        if name == "__init__" and more:  # **options: Any
            assert names <= everything, f"{owner}.{name}"
        else:  # SelfAttention and others refuse key_index and key_block
            assert names - {"key_index", "key_block"} == everything - {"key_index", "key_block"}, f"{owner}.{name}"
        seen.add((owner, name))
    assert {("CausalLM", "generate"), ("Linear", "__init__"), ("GroupedQueryAttention", "forward")} <= seen
    assert {("FeedForward", "__init__"), ("EncoderDecoder", "decode")} <= seen and len(seen) > 50


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
        value = inspect.unwrap(value) if callable(value) else value
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


def annotations_of(call: Callable) -> dict[str, str]:
    """{keyword: type} of a function or an overload, with those of its TypedDict in the place of **keywords."""
    found = {}
    for name, parameter in inspect.signature(call).parameters.items():
        kind = re.fullmatch(r"Unpack\[([\w.]+)(?:\[(\w+)\])?\]", str(parameter.annotation))
        if kind:
            options = eval(kind[1], call.__globals__).__annotations__
            found |= {key: re.sub(r"\bCache\b", kind[2] or "", value.__forward_arg__) for key, value in options.items()}
        elif parameter.kind is not parameter.VAR_KEYWORD:
            found[name] = parameter.annotation
    return found


def overloaded() -> dict[str, types.FunctionType]:
    found = {}
    for module in ANNOTATED:
        for name, value in public_content(module).items():
            for kind in [k for k in getattr(value, "__mro__", ()) if k.__module__.startswith("attnpack")] or [value]:
                functions = functions_of(f"{module}.{name}", kind)
                found |= {place: function for place, function in functions.items() if typing.get_overloads(function)}
    return found


def test_overloads_take_what_the_function_takes():
    found = overloaded()
    assert {"attnpack.attention", "attnpack.MultiHeadAttention.forward", "attnpack.distributed.attention"} <= set(found)
    for name, function in found.items():
        own = annotations_of(function)
        for overload in typing.get_overloads(function):
            taken = annotations_of(overload)
            if function.__module__ == "attnpack.reference":  # it imports nothing of attnpack, not even the keywords
                assert taken.keys() < own.keys(), name
            else:
                assert taken.keys() == own.keys(), name
                told = {part for part in own if taken[part] != own[part]}
                assert told <= {"module", "return_lse", "return_state", "need_weights"}, name


@pytest.mark.parametrize("module", SHOWN)
def test_no_result_is_a_union_that_an_overload_could_tell_apart(module):
    for name, value in public_content(module).items():
        for place, function in functions_of(name, value).items():
            result = str(inspect.signature(function).return_annotation)
            told = typing.get_overloads(function) or module == "attnpack.flash"  # see signatures.WithProbs
            assert not result.startswith("Tensor | tuple") or told, place


def test_calls_have_the_types_of_their_arguments(mypy):
    program = Path(__file__).parent / "typed_calls.py"
    lines = program.read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    errors = mypy(program)
    assert {int(re.search(r":(\d+): error", error)[1]) for error in errors} == wrong, errors
    assert len(wrong) > 10


def test_the_readmes_code_has_no_type_errors(tmp_path, mypy):
    pages = [(ROOT / page).read_text() for page in ("README.md", "docs/howto/transformers.md")]
    blocks = [block for page in pages for block in re.findall(r"```python\n(.*?)```", page, flags=re.S)]
    assert len(blocks) >= 3
    program = tmp_path / "readme.py"
    program.write_text("\n".join(blocks) + "\nreveal_type(out)\nreveal_type(lse)\n")
    messages = mypy(program)
    assert [message.partition("is ")[2] for message in messages] == ['"torch._tensor.Tensor"'] * 2, messages


def test_mypy_knows_every_public_name(tmp_path, mypy):
    names = public_names()
    assert {"attnpack.attention", "attnpack.cpp.CausalLM", "attnpack.backend.enable"} <= set(names)
    program = tmp_path / "program.py"
    lines = [f"import {module}" for module in SHOWN] + [f"reveal_type({name})" for name in names]
    lines += ["attnpack.atention", "attnpack.cpp.CausalML", "reveal_type(attnpack.cpp.Linear(4, 4).forward)"]
    program.write_text("\n".join(lines) + "\n")
    messages = mypy(program)
    revealed = [line for line in messages if "Revealed type is" in line]
    assert len(revealed) == len(names) + 1, messages
    unknown = [line for line in revealed if line.endswith('is "Any"')]
    assert [names[revealed.index(line)] for line in unknown] == []
    errors = [line for line in messages if ": error: " in line]
    assert len(errors) == 2 and "atention" in errors[0] and "CausalML" in errors[1], messages
    assert "def (x: torch._tensor.Tensor) -> torch._tensor.Tensor" in revealed[-1]
