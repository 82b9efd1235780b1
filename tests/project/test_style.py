"""The code follows the formatters (.clang-format, ruff in pyproject.toml) and the rules of CONTRIBUTING."""

import re
import sysconfig
from pathlib import Path

import pytest
from processes import ROOT, run_program

SCRIPTS = Path(sysconfig.get_path("scripts"))
CPP = [
    file
    for folder in ("csrc", "tests/cpp", "examples/cpp", "examples/c")
    for file in (ROOT / folder).rglob("*")
    if file.suffix in (".h", ".c", ".cpp", ".cu", ".cuh")
]


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=" ".join)
def test_python(arguments):
    checked = run_program(SCRIPTS / "ruff", *arguments, "--no-cache", ROOT)
    assert checked.returncode == 0, checked.stdout


def test_cpp():
    checked = run_program(SCRIPTS / "clang-format", "--dry-run", "--Werror", *CPP)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("script", sorted([*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci/run"]), ids=lambda p: p.name)
def test_shell(script):
    """bash can read it: some scripts are for systems that nobody here has."""
    checked = run_program("bash", "-n", script)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    "header, allowed",
    [
        (r"pybind11/|torch/extension\.h|torch/python\.h|torch/csrc/utils/pybind\.h", "bindings"),
        (
            r"torch/(?:nn|all|torch)\.h|torch/nn/",
            "attnpack/modules|attnpack/models|bindings|attnpack/convert|attnpack/distributed|attnpack/attnpack.h",
        ),
    ],
    ids=["pybind11", "torch.nn"],
)
def test_layers(header, allowed):
    """pybind11 stays in bindings; torch's modules stay above the operators."""
    files = [file for file in CPP if file.is_relative_to(ROOT / "csrc")]
    users = [
        str(file.relative_to(ROOT / "csrc"))
        for file in files
        if re.search(rf"#include [<\"](?:{header})", file.read_text())
    ]
    assert users, "the pattern finds nothing at all"
    assert [user for user in users if not re.match(allowed, user)] == []


@pytest.mark.parametrize("folder, suffix", [("ops/cpu/isa", ""), ("ops/cuda", ".cu"), ("ops/cuda", ".cuh")])
def test_kernels_see_nothing_of_torch(folder, suffix):
    """Neither do the headers that they include."""
    files = (ROOT / "csrc/attnpack" / folder).rglob("*")
    waiting = [file for file in files if file.is_file() and file.name.endswith(suffix)]
    assert waiting, "the pattern finds nothing at all"
    seen = set()
    while waiting:
        file = waiting.pop()
        seen.add(file)
        included = re.findall(r'^#include [<"]([^>"]*)', file.read_text(), flags=re.M)
        assert [name for name in included if re.match(r"ATen/|c10/|torch/|pybind11/", name)] == [], file
        ours = [ROOT / "csrc" / name for name in included if name.startswith("attnpack/")]
        beside = [file.parent / name for name in included]
        waiting += [each for each in ours + beside if each.is_file() and each not in seen]


def test_texts_do_not_follow_the_locale():
    """c10::str, plain streams and torch's checks of several parts write 1.024 for 1024 in a German program: texts with
    numbers come from core/text.h."""
    follows = re.compile(r"c10::(?:str|Join)\(|stringstream")
    words_only = ["attnpack/modules/part.h", "attnpack/ops/cuda/target.h", "bindings/ops.cpp"]
    found = []
    for file in (file for file in CPP if file.is_relative_to(ROOT / "csrc")):
        text = file.read_text()
        checks = [check for check in re.findall(r"\bTORCH_CHECK\w*\([^;]*;", text) if "text_of(" not in check]
        if follows.search(text) or any(re.search(r'",\s*[^"\s]', check) for check in checks):
            found.append(str(file.relative_to(ROOT / "csrc")))
    assert sorted(found) == sorted(["attnpack/core/text.h", *words_only])


def test_no_build_for_this_machine_alone():
    """-march=native in what is installed would crash on another CPU."""
    files = [ROOT / "CMakeLists.txt", ROOT / "setup.py", *(ROOT / "cmake").iterdir()]
    assert [file.name for file in files if "march=native" in file.read_text()] == []
