"""Every installed header compiles as the first thing that a program includes."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import ROOT, TORCH_DIR, run_program

PRIVATE = {
    "core",
    "detail",
    "cpu",
    "cuda",
    "meta",
    "autograd",
    "autocast",
    "batched",
    "lazy",
}  # the folders of cmake/Install.cmake
SOURCES = ROOT / "csrc/attnpack"
HEADERS = [path.relative_to(SOURCES) for path in sorted(SOURCES.rglob("*.h")) if not PRIVATE & set(path.parts)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder for programs, next to an include/attnpack as installed."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include/attnpack").symlink_to(SOURCES)
    return tmp_path


def complaints(folder: Path, headers: list[Path]) -> list[str]:
    """The compiler's messages for programs that each include one header and nothing else."""
    includes = [f"-I{folder / 'include'}"]
    includes += [f"-isystem{TORCH_DIR / part}" for part in ("include", "include/torch/csrc/api/include")]

    def compile_alone(header: Path) -> str:
        source = folder / f"{'_'.join(header.parts)}.cpp"
        source.write_text(f"#include <attnpack/{header}>\n")
        process = run_program("g++", "-std=c++17", "-fsyntax-only", *includes, source)
        return f"{header}: {process.text}" if process.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [text for text in pool.map(compile_alone, headers) if text]


def reached(header: Path) -> set[str]:
    """The headers that a header includes, directly or through headers of ours."""
    names = set(re.findall(r"#include <(\S+)>", (SOURCES / header).read_text()))
    own = [Path(name).relative_to("attnpack") for name in names if name.startswith("attnpack/")]
    return names.union(*map(reached, own))


def test_headers_reach_what_their_macro_needs():
    """torch/torch.h and the precompiled headers of the build include them too, so the build does not notice a missing
    one."""
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
    """Compiles all headers, for about 5 minutes."""
    assert not complaints(folder, HEADERS)
