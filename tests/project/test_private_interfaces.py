"""The parts of torch that we use and no release promises: CONTRIBUTING.md has a table, and each is asked for here."""

import importlib
import re
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
    rows = re.findall(r"^\| `((?:ATen|torch)\S*.*?)` \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    return [Part(place, name, purpose) for place, names, purpose in rows for name in re.findall(r"`(.+?)`", names)]


def is_there(part: Part) -> bool:
    if part.place.endswith((".h", ".hpp")):
        header = TORCH_DIR / "include" / part.place
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


PRIVATE_HEADER = r"#include <(torch/csrc/(?!api/).*?|ATen/(?:functorch|native)/.*?|ATen/ops/\w+_native\.h)>"
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


def test_all_that_the_table_has_is_used():
    text = sources("csrc", "h", "cpp") + sources("python/attnpack", "py")
    text += "\n".join(map(str, (ROOT / "csrc").rglob("*.h")))  # headers that torch's wheel lacks are files of ours
    unused = [part for part in listed() if not re.search(rf"\b{re.escape(part.name)}\b", text)]
    assert not unused, f"CONTRIBUTING.md has a line too many: {unused}"
