"""The parts of torch that we use and no release promises: CONTRIBUTING.md has a table, and each is asked for here."""

import ast
import importlib
import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from processes import ROOT, TORCH_DIR


class Part(NamedTuple):
    place: str  # a header, or a path of Python
    name: str
    purpose: str


def listed() -> list[Part]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `((?:ATen|c10|cpython|torch)\S*.*?)` \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    return [Part(place, name, purpose) for place, names, purpose in rows for name in re.findall(r"`(.+?)`", names)]


def is_there(part: Part) -> bool:
    if part.place.endswith((".h", ".hpp")):
        python = part.place.startswith("cpython/")
        header = (Path(sysconfig.get_path("include")) if python else TORCH_DIR / "include") / part.place
        return header.is_file() and re.search(rf"\b{re.escape(part.name)}\b", header.read_text()) is not None
    for module in ("torch._dynamo", "torch._subclasses", "torch.distributed.tensor", "torch.nn.attention.varlen"):
        importlib.import_module(module)  # they come with their first use
    return hasattr(eval(part.place, {"torch": torch}), part.name)


@pytest.mark.parametrize("part", listed(), ids=lambda part: f"{part.place} {part.name}")
def test_the_installed_torch_has_it(part):
    assert is_there(part), f"torch {torch.__version__} has no {part.name} in {part.place}, used for: {part.purpose}"


def test_a_part_that_is_gone_is_named():
    assert not is_there(Part("ATen/functorch/DynamicLayer.h", "maybeCurrentDynamicLaye", ""))
    assert not is_there(Part("ATen/functorch/None.h", "x", ""))
    assert not is_there(Part("torch._C", "_no_such_name", ""))


def sources(folder: str, *kinds: str) -> str:
    return "\n".join(file.read_text() for kind in kinds for file in sorted((ROOT / folder).rglob(f"*.{kind}")))


PRIVATE_FOLDER = r"torch/csrc/(?!api/)|c10/core/impl/|ATen/functorch/|ATen/native/"
PRIVATE_HEADER = rf"#include <((?:{PRIVATE_FOLDER}).*?|ATen/ops/\w+_native\.h)>"
PRIVATE_PATH = r"\btorch(?:\.[A-Za-z]\w*)*\._[a-z]\w*(?:\.\w+)*"


def test_the_table_has_all_that_we_use():
    places = {part.place for part in listed()}
    headers = set(re.findall(PRIVATE_HEADER, sources("csrc", "h", "cpp")))
    assert headers <= places, f"CONTRIBUTING.md lacks a line for {sorted(headers - places)}"
    python = sources("python/attnpack", "py")
    used = set(re.findall(PRIVATE_PATH, python))
    used |= {f"{module}.{name}" for module, name in re.findall(r"from (torch\S*) import (_\w+)", python)}
    known = places | {f"{part.place}.{part.name}" for part in listed()}
    lacking = {path for path in used if not any(f"{path}.".startswith(f"{each}.") for each in known)}
    assert not lacking, f"CONTRIBUTING.md lacks a line for {sorted(lacking)}"


def private_names_of_python() -> dict[str, str]:
    """{name: a file that reads it}: attributes that begin with one underscore, where no file of ours defines the name,
    and those of nn.Module that stand in a string."""
    read, ours = {}, {"_asdict", "_fields", "_field_defaults", "_replace"}  # the last: of a NamedTuple, documented
    for file in sorted((ROOT / "python/attnpack").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    ours.add(name)
                case ast.Call(func=ast.Attribute(attr="register_buffer"), args=[ast.Constant(value=name), *_]):
                    ours.add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                    ours.add(name)
                case ast.Attribute(attr=name):
                    read[name] = file.name
                case ast.Constant(value=str(name)) if name in vars(torch.nn.Linear(1, 1)):
                    read[name] = file.name
    return {name: file for name, file in read.items() if re.match("_[a-z]", name) and name not in ours}


# Names of transformers (hf/internals.py lists its parts) and of macOS's loader.
OF_OTHERS = {"_attn_implementation", "_global_mapping", "_dyld_get_image_name", "_dyld_image_count"}


def test_the_table_has_all_private_names():
    known = {part.name for part in listed()} | {part.place.rpartition(".")[2] for part in listed()} | OF_OTHERS
    found = private_names_of_python()
    assert {"_op_dispatcher", "_custom_op_handlers", "_forward_hooks_with_kwargs"} <= found.keys()
    cpp = re.findall(r"(?:\.|->|::)(_[a-z]\w*|tp_\w+)", sources("csrc", "h", "cpp"))
    assert "_qkv_same_embed_dim" in cpp
    lacking = {name: file for name, file in found.items() if name not in known}
    lacking |= {name: "csrc" for name in cpp if name not in known | {"tp_alloc", "tp_free", "_device"}}
    assert not lacking, f"CONTRIBUTING.md lacks a line for {lacking}"


def test_all_that_the_table_has_is_used():
    text = sources("csrc", "h", "cpp") + sources("python/attnpack", "py")
    text += "\n".join(map(str, (ROOT / "csrc").rglob("*.h")))  # headers that torch's wheel lacks are files of ours
    unused = [part for part in listed() if not re.search(rf"\b{re.escape(part.name)}\b", text)]
    assert not unused, f"CONTRIBUTING.md has a line too many: {unused}"
