"""Every installed header compiles as the first thing that a program includes."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import ROOT, TORCH_DIR, run

PRIVATE = {"core", "detail", "cpu", "cuda", "meta", "autograd", "autocast", "lazy"}  # as cmake/Install.cmake has them
SOURCES = ROOT / "csrc/attnpack"
HEADERS = [path.relative_to(SOURCES) for path in sorted(SOURCES.rglob("*.h")) if not PRIVATE & set(path.parts)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """For programs, beside an include/attnpack as it is installed."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include/attnpack").symlink_to(SOURCES)
    return tmp_path


def complaints(folder: Path, headers: list[Path]) -> list[str]:
    """What the compiler says of programs that include one of the headers each, and nothing else."""
    includes = [f"-I{folder / 'include'}"]
    includes += [f"-isystem{TORCH_DIR / part}" for part in ("include", "include/torch/csrc/api/include")]

    def compile_alone(header: Path) -> str:
        source = folder / f"{'_'.join(header.parts)}.cpp"
        source.write_text(f"#include <attnpack/{header}>\n")
        process = run("g++", "-std=c++17", "-fsyntax-only", *includes, source)
        return f"{header}: {process.text}" if process.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [text for text in pool.map(compile_alone, headers) if text]


def reached(header: Path) -> set[str]:
    """What a header includes, and what our own ones among that include."""
    names = set(re.findall(r"#include <(\S+)>", (SOURCES / header).read_text()))
    own = [Path(name).relative_to("attnpack") for name in names if name.startswith("attnpack/")]
    return names.union(*map(reached, own))


def test_headers_reach_what_their_macro_needs():
    """torch/torch.h and the build's precompiled headers bring it too, so that the build does not see it missing."""
    users = [header for header in HEADERS if "FORWARD_HAS_DEFAULT_ARGS(" in (SOURCES / header).read_text()]
    assert len(users) > 5
    assert not [header for header in users if "torch/nn/modules/common.h" not in reached(header)]


def test_headers_without_torch_alone(folder):
    plain = [header for header in HEADERS if not any(re.match("torch/|ATen/|c10/", name) for name in reached(header))]
    assert len(plain) > 3
    assert not complaints(folder, plain)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_headers_alone(folder):
    """All of them: 5 minutes of compiling."""
    assert not complaints(folder, HEADERS)
