"""Every installed header compiles as the first thing that a program includes, without warnings, and has comments."""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from private_headers import is_private
from processes import ROOT, TORCH_DIR, needs, run_program

# The reader of the documentation site. Its folder needs Sphinx, which not all who test have.
sys.path.insert(0, str(ROOT / "docs/extension"))
import headers as headers_of_docs  # noqa: E402

SOURCES = ROOT / "csrc/attnpack"
# attnpack's headers are no system headers here, so that these concern them.
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]
HEADERS = [
    path for path in (file.relative_to(SOURCES) for file in sorted(SOURCES.rglob("*.h"))) if not is_private(str(path))
]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder for programs, next to an include/attnpack as installed."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include/attnpack").symlink_to(SOURCES)
    return tmp_path


# torch's macros for default arguments, which stand in our headers.
OF_CLANG = ["-Wno-gnu-zero-variadic-macro-arguments"]


def complaints(folder: Path, headers: list[Path], compiler: str = "g++") -> list[str]:
    """The compiler's messages for programs that each include one header and nothing else."""
    includes = [f"-I{folder / 'include'}"]
    includes += [f"-isystem{TORCH_DIR / part}" for part in ("include", "include/torch/csrc/api/include")]

    warnings = WARNINGS + (OF_CLANG if compiler == "clang++" else [])

    def compile_alone(header: Path) -> str:
        source = folder / f"{'_'.join(header.parts)}.cpp"
        source.write_text(f"#include <attnpack/{header}>\n")
        process = run_program(compiler, "-std=c++20", "-fsyntax-only", *warnings, *includes, source)
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


@pytest.mark.parametrize("compiler", ["g++", pytest.param("clang++", marks=[needs("clang++"), pytest.mark.long])])
def test_headers_without_torch_alone(folder, compiler):
    plain = [header for header in HEADERS if not any(re.match("torch/|ATen/|c10/", name) for name in reached(header))]
    assert len(plain) > 3
    assert not complaints(folder, plain, compiler)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("compiler", ["g++", pytest.param("clang++", marks=needs("clang++"))])
def test_the_umbrella_has_no_warning(folder, compiler):
    assert not complaints(folder, [Path("attnpack.h")], compiler)


def test_the_forward_header_names_every_class():
    named = set(re.findall(r"^(?:class|struct) (\w+);", (SOURCES / "fwd.h").read_text(), flags=re.M))
    assert not reached(Path("fwd.h")), "it is for those who want no other header"
    text = "\n".join((SOURCES / header).read_text() for header in HEADERS if "convert" not in header.parts)
    holders = set(re.findall(r"^TORCH_MODULE\((\w+)\)", text, flags=re.M))
    own = holders | {f"{holder}Impl" for holder in holders}
    own |= set(re.findall(r"^class (\w+Cache|AttentionModule|RecurrentModule|TokenModule)\b", text, flags=re.M))
    own |= set(
        re.findall(
            r"(?<!>\n)^struct (\w+(?:Options|Inputs|Settings|States|Weights|Result|Scaling)) (?:: [^{;]+)?\{",
            text,
            flags=re.M,
        )
    )
    assert {"DecoderBlock", "StaticCache", "CausalLMOptions"} <= own
    inner = {"AttendOptions", "BlockOptions", "LatentAttendOptions", "LayerInputs", "NormOptions", "RopeSettings"}
    assert own - inner - named == set()
    assert named - own == set(), "fwd.h names what no public header has"


def test_every_public_class_and_function_has_a_comment():
    """Things without a comment of their own in a header are an option's struct, or a holder of a commented class; the
    names of fwd.h have theirs in their own headers."""
    silent = []
    for header in set(HEADERS) - {Path("fwd.h")}:
        for paragraph in headers_of_docs.read((SOURCES / header).read_text()):
            plain = re.match(r"(template <.*>\n)?struct \w+Options|TORCH_MODULE|using |class \w+;", paragraph.code)
            if paragraph.code and not paragraph.comment and not plain:
                silent.append(f"{header}: {paragraph.names}")
    assert silent == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_headers_alone(folder):
    """Compiles all headers, for about 5 minutes."""
    assert not complaints(folder, HEADERS)
