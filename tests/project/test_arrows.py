"""Every include and every import of ours follows the arrows of CONTRIBUTING, which say which folder may use which."""

import ast
import re
from pathlib import Path

from processes import ROOT

CSRC, PACKAGE = ROOT / "csrc", ROOT / "python/attnpack"

# folder of csrc/attnpack -> the folders that its files may include; its own is always allowed
BACKENDS = ("ops/autograd", "ops/autocast", "ops/batched", "ops/lazy", "ops/meta", "ops/cpu", "ops/cuda")
INCLUDES = {
    "core": [],
    "ops": ["core", "ops/detail"],
    "ops/detail": ["core", "ops"],
    **{backend: ["core", "ops", "ops/detail"] for backend in BACKENDS},
    "ops/cpu": ["core", "ops", "ops/detail", "ops/cpu/isa"],
    "ops/cpu/isa": ["core"],
    "ops/cuda": ["core", "ops", "ops/detail", "ops/cuda/kernels"],
    "ops/cuda/kernels": ["core"],
    "ops/cuda/kernels/sm90": ["core", "ops/cuda/kernels"],
    "rope": ["core", "ops"],
    "layers": ["core", "ops", "ops/detail", "rope", "layers/detail"],
    "layers/detail": ["core", "ops", "ops/detail", "rope", "layers"],
    "backend": ["core", "ops", "ops/cuda/kernels", "ops/detail", "backend/detail"],
    "backend/detail": ["backend"],
    "cache": ["core", "ops", "ops/detail", "cache/detail"],
    "cache/detail": ["core", "ops/detail", "cache"],
    "weights": ["weights/detail"],
    "weights/detail": ["core"],
    "modules": ["core", "ops", "rope", "layers", "layers/detail", "cache", "weights", "modules/detail"],
    "modules/detail": ["core", "layers", "cache", "modules"],
    "modules/sparse": ["core", "ops", "rope", "layers", "modules", "modules/detail"],
    "models": [
        *("core", "ops", "rope", "layers", "cache", "modules", "modules/detail", "weights/detail", "models/detail"),
    ],
    "models/detail": ["core", "modules", "weights/detail", "models"],
    "distributed": ["core", "ops", "layers", "cache", "modules", "models", "distributed/detail"],
    "distributed/detail": ["core", "ops", "ops/detail", "modules", "modules/detail", "distributed"],
    "convert": ["core", "convert/detail"],
    "convert/detail": ["core", "convert"],
}
# these put converted tensors into modules, and one tells the version, which stands beside all folders
OF_A_FILE = {
    "convert/modules": ["modules"],
    "convert/models": ["modules", "models"],
    "convert/from_torch": ["modules"],
    "ops/library": ["."],
}

# folder of python/attnpack -> the folders that its modules may import; "." is the package's own modules
IMPORTS = {
    ".": ["ops"],
    "ops": ["."],
    "backend": [".", "ops"],
    "cache": [".", "ops"],
    "nn": [".", "ops", "cache"],
    "nn/sparse": [".", "ops", "cache", "nn"],
    "checkpoints": [".", "nn"],
    "convert": [".", "nn", "checkpoints", "convert/checkpoint", "convert/uptrain"],
    "convert/checkpoint": [".", "nn", "checkpoints", "convert"],
    "convert/uptrain": [".", "nn", "checkpoints", "convert", "convert/checkpoint"],
    "distributed": [".", "ops", "cache", "nn"],
    "hf": [".", "ops", "nn", "hf/layers"],
    "hf/layers": [".", "ops", "cache", "nn", "hf"],
    "tools": None,  # the command line: everything
    "tools/bench": None,
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
    # distributed is included by name, as it is imported by name in Python: not every torch has process groups
    seen, left = set(), ["attnpack.h", *(name for name in arrows if re.match(r"distributed/\w+\.h", name))]
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += arrows.get(name, [])
    private = re.compile(r"core/|(.*/)?detail/|ops/(cpu|cuda|meta|autograd|autocast|batched|lazy)/")
    headers = {str(file.relative_to(CSRC / "attnpack")) for file in (CSRC / "attnpack").rglob("*.h")}
    assert sorted(filter(private.match, seen)) == []
    assert sorted(name for name in headers - seen if not private.match(name)) == [], "public, but not in attnpack.h"


def imports():
    """(module, imported folder, whether inside a function) of every import of ours."""
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE)
        tree = ast.parse(file.read_text())
        inside = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = PACKAGE.joinpath(*name.parts[:-1])
            for _ in range(node.level - 1):
                base = base.parent
            base = base.joinpath(*(node.module or "").split("."))
            for alias in node.names:
                target = base / alias.name if base.is_dir() and is_ours(base / alias.name) else base
                where = target if target.is_dir() else target.parent
                yield str(name), str(where.relative_to(PACKAGE)), id(node) in inside


def is_ours(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").exists()


def test_imports():
    wrong = []
    for name, target, inside in imports():
        allowed = IMPORTS[folder(name)]
        if name in FRONT or allowed is None:
            continue
        allowed = [folder(name), *allowed, *(AT_CALL.get(folder(name), []) if inside else [])]
        if target not in allowed:
            wrong.append(f"{name} -> {target}")
    assert not wrong


def test_tests_share_helpers_through_support():
    """No file of tests imports another one."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    importing = re.compile(r"^\s*(?:from|import) (?:\S*\.)?test_\w+", re.M)
    assert [str(file.relative_to(ROOT)) for file in files if importing.search(file.read_text())] == []
