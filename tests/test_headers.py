"""Every installed header compiles as the first thing that a program includes."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import ROOT, TORCH_DIR, run

PRIVATE = {"cpu", "cuda", "meta", "autograd", "autocast", "bindings"}  # as cmake/Install.cmake leaves them out
SOURCES = ROOT / "csrc"
HEADERS = [path.relative_to(SOURCES) for path in sorted(SOURCES.rglob("*.h")) if not PRIVATE & set(path.parts)]
# What every torch::nn module starts from: most headers bring it along, and it costs 9 s.
BASE = "#include <torch/nn/cloneable.h>\n#include <torch/nn/pimpl.h>\n"


@pytest.fixture
def folder(tmp_path) -> Path:
    """For programs, beside an include/attnpack as it is installed."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include/attnpack").symlink_to(SOURCES)
    return tmp_path


def compile_text(source: Path, text: str, *options) -> str:
    """The compiler's complaint, or nothing."""
    source.write_text(text)
    includes = [f"-I{source.parent / 'include'}"]
    includes += [f"-isystem{TORCH_DIR / part}" for part in ("include", "include/torch/csrc/api/include")]
    process = run("g++", "-std=c++17", *includes, *options, source)
    return f"{text}{process.text}" if process.returncode else ""


def complaints(folder: Path, headers: list[Path], *options) -> list[str]:
    """Of programs that include one of the headers each, and nothing else."""

    def compile_alone(header: Path) -> str:
        source = folder / f"{'_'.join(header.parts)}.cpp"
        return compile_text(source, f"#include <attnpack/{header}>\n", "-fsyntax-only", *options)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [text for text in pool.map(compile_alone, headers) if text]


def test_headers_on_what_torch_modules_start_from(folder):
    """A quick look at all but the umbrella, which every program includes: those of core/ stand on nothing of torch."""
    core = [header for header in HEADERS if header.parts[0] == "core" and header.name != "check.h"]
    others = [header for header in HEADERS if header not in core and header.name != "attnpack.h"]
    assert len(core) > 2 and len(others) > 40
    assert not compile_text(folder / "base.h", BASE, "-xc++-header", "-o", folder / "base.h.gch")
    assert not complaints(folder, core)
    assert not complaints(folder, others, "-include", folder / "base.h")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_headers_alone(folder):
    assert not complaints(folder, HEADERS)
