"""Every include and every import of ours follows the arrows of CONTRIBUTING, which say which folder may use which."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

from private_headers import is_private
from processes import ROOT

CSRC, PACKAGE = ROOT / "csrc", ROOT / "python/attnpack"
NATIVE = PACKAGE / "_C"

# folder of csrc/attnpack -> the folders that its files may include; its own is always allowed
BACKENDS = ("ops/autograd", "ops/autocast", "ops/batched", "ops/lazy", "ops/meta", "ops/cpu", "ops/cuda")
INCLUDES = {
    "core": [],
    "threads": [],
    "kernels": ["core", "threads", "ops/cpu", "ops/cpu/isa"],
    "ops": ["core", "ops/detail"],
    "ops/detail": ["core", "threads", "ops"],
    **{backend: ["core", "ops", "ops/detail"] for backend in BACKENDS},
    "ops/cpu": ["core", "threads", "kernels", "ops", "ops/detail", "ops/cpu/isa"],
    "ops/cpu/isa": ["core"],
    "ops/cuda": ["core", "ops", "ops/detail", "ops/cuda/kernels"],
    "ops/cuda/kernels": ["core"],
    "ops/cuda/kernels/sm90": ["core", "ops/cuda/kernels"],
    "rope": ["core", "ops"],
    "layers": ["core", "ops", "ops/detail", "rope", "layers/detail"],
    "layers/detail": ["core", "threads", "ops", "ops/detail", "rope", "layers"],
    "backend": ["core", "ops", "ops/cuda/kernels", "ops/detail", "backend/detail"],
    "backend/detail": ["backend"],
    "cache": ["core", "ops", "ops/detail", "cache/detail"],
    "cache/detail": ["core", "ops/detail", "cache"],
    "weights": ["weights/detail"],
    "weights/detail": ["core", "ops"],
    "modules": ["core", "ops", "rope", "layers", "layers/detail", "cache", "weights", "modules/detail"],
    "modules/detail": ["core", "layers", "cache", "modules", "modules/recurrent"],
    "modules/attention": [
        *("core", "ops", "rope", "layers", "layers/detail", "cache", "modules", "modules/detail"),
    ],
    "modules/recurrent": ["core", "ops", "layers", "layers/detail", "cache", "modules", "modules/detail"],
    "models": [
        *("core", "ops", "rope", "layers", "cache", "modules", "modules/attention", "modules/recurrent"),
        *("modules/detail", "weights/detail", "models/detail"),
    ],
    "models/detail": ["core", "modules", "modules/detail", "weights/detail", "models"],
    "distributed": [
        *("core", "ops", "layers", "cache", "modules", "modules/attention", "models", "distributed/detail"),
    ],
    "distributed/detail": [
        *("core", "ops", "ops/detail", "layers", "layers/detail", "cache", "cache/detail", "modules", "modules/detail"),
        "distributed",
    ],
    "convert": ["core", "convert/detail"],
    "convert/detail": ["core", "convert"],
}
# these put converted tensors into modules; some need the version or the header for C, which stand beside all folders
OF_A_FILE = {
    "convert/modules": ["modules", "modules/attention"],
    "convert/models": ["modules", "models"],
    "convert/latent_conversion": ["modules", "models"],
    "convert/detail/joined_rope": ["rope"],
    "convert/from_torch": ["modules", "modules/attention"],
    "ops/library": ["."],
    "ops/cpu/isa": ["."],
    "kernels/table": ["."],
    "kernels/api": ["."],
    "kernels/attention_call": ["."],
}

# folder of python/attnpack -> the folders that its modules may import; "." is the package's own modules
IMPORTS = {
    ".": ["ops"],
    "ops": ["."],
    "backend": [".", "ops"],
    "cache": [".", "ops"],
    "nn": [".", "ops", "cache", "nn/attention", "nn/recurrent"],
    "nn/attention": [".", "ops", "cache", "nn"],
    "nn/recurrent": [".", "ops", "cache", "nn"],
    "checkpoints": [".", "nn"],
    "convert": [".", "nn", "nn/attention", "nn/recurrent", "checkpoints", "convert/checkpoint", "convert/uptrain"],
    "convert/checkpoint": [".", "nn", "checkpoints", "convert"],
    "convert/uptrain": [".", "nn", "checkpoints", "convert", "convert/checkpoint"],
    "distributed": [".", "ops", "cache", "nn", "nn/attention"],
    "hf": [".", "ops", "nn", "hf/layers"],
    "hf/layers": [".", "ops", "cache", "nn", "nn/attention", "nn/recurrent", "hf"],
    "tools": None,  # the command line: everything
    "tools/bench": None,
    "tools/compare": None,
    "tools/demo": None,
    "tools/plot": None,
}
# imported inside a function: a model's readers, and what `attnpack info` shows
AT_CALL = {"nn": ["checkpoints"], ".": ["backend"]}
FRONT = {"__init__.py", "__main__.py"}  # these may import from all folders


def folder(path: str) -> str:
    return str(Path(path).parent)


def includes():
    for file in sorted((CSRC / "attnpack").rglob("*")):
        if file.suffix not in (".h", ".cpp", ".cu", ".cuh"):
            continue
        name = str(file.relative_to(CSRC / "attnpack"))
        for target in re.findall(r"#include <attnpack/([^>]+)>", file.read_text()):
            yield name, target


def test_includes():
    wrong = []
    for name, target in includes():
        if name == "attnpack.h":
            continue
        stem = str(Path(name).with_suffix(""))
        allowed = [folder(name), *INCLUDES[folder(name)], *OF_A_FILE.get(stem, [])]
        if folder(target) not in allowed:
            wrong.append(f"{name} -> {target}")
    assert not wrong


def test_what_is_private_is_not_reached_from_the_umbrella():
    """cmake/Install.cmake leaves these folders out."""
    arrows: dict[str, list[str]] = {}
    for name, target in includes():
        arrows.setdefault(name, []).append(target)
    # distributed is included by name, as it is imported by name in Python: not every torch has process groups.
    # kernels.h is for programs without torch.
    seen, left = set(), ["attnpack.h", "kernels.h", *(name for name in arrows if re.match(r"distributed/\w+\.h", name))]
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += arrows.get(name, [])
    headers = {str(file.relative_to(CSRC / "attnpack")) for file in (CSRC / "attnpack").rglob("*.h")}
    assert sorted(filter(is_private, seen)) == []
    assert sorted(name for name in headers - seen if not is_private(name)) == [], "public, but not in attnpack.h"


class Import(NamedTuple):
    module: Path
    target: Path  # a module, or a package's __init__.py
    in_function: bool
    for_types: bool  # under `if TYPE_CHECKING`


def imports():
    """Every import of ours, but for that of the native code."""
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        in_function = inside(tree, lambda node: isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
        for_types = inside(tree, lambda node: isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for node in ast.walk(tree):
            for target in imported(file, node):
                yield Import(file, target, node in in_function, node in for_types)


def inside(tree: ast.Module, chosen) -> set[ast.AST]:
    return {node for outer in ast.walk(tree) if chosen(outer) for node in ast.walk(outer)}


def imported(file: Path, node: ast.AST):
    """The modules of ours that a statement imports."""
    if isinstance(node, ast.Import):
        paths = [PACKAGE.parent.joinpath(*alias.name.split(".")) for alias in node.names]
        yield from (module for path in paths if (module := module_at(path)))
    elif isinstance(node, ast.ImportFrom):
        base = file.parents[node.level - 1] if node.level else PACKAGE.parent
        base = base.joinpath(*(node.module or "").split("."))
        for alias in node.names:
            module = module_at(base / alias.name) or module_at(base)
            if module and base / alias.name != NATIVE:
                yield module


def module_at(path: Path) -> Path | None:
    files = path.with_suffix(".py"), path / "__init__.py"
    return next((file for file in files if file.exists()), None)


def name_of(module: Path) -> str:
    return str(module.relative_to(PACKAGE))


def test_imports():
    wrong = []
    for module, target, in_function, _ in imports():
        name, where = name_of(module), folder(name_of(target))
        allowed = IMPORTS[folder(name)]
        if name in FRONT or allowed is None:
            continue
        allowed = [folder(name), *allowed, *(AT_CALL.get(folder(name), []) if in_function else [])]
        if where not in allowed:
            wrong.append(f"{name} -> {where}")
    assert not wrong


def test_no_circles():
    """No module needs itself, not even when a function runs. Types alone may name what needs them."""
    arrows: dict[str, set[str]] = {}
    for module, target, _, for_types in imports():
        if not for_types:
            arrows.setdefault(name_of(module), set()).add(name_of(target))
    below = {module: reached_from(module, arrows) for module in arrows}
    circles = {frozenset(each for each in below[a] if a in below.get(each, ())) for a in below if a in below[a]}
    assert len(arrows) > 100, "the pattern finds too little"
    assert sorted(sorted(circle) for circle in circles) == []


def reached_from(module: str, arrows: dict[str, set[str]]) -> set[str]:
    seen, left = set(), [module]
    while left:
        new = arrows.get(left.pop(), set()) - seen
        seen |= new
        left += new
    return seen


def test_tests_share_helpers_through_support():
    """No file of tests imports another one."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    importing = re.compile(r"^\s*(?:from|import) (?:\S*\.)?test_\w+", re.M)
    assert [str(file.relative_to(ROOT)) for file in files if importing.search(file.read_text())] == []
