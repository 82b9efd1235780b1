"""The README is true: its Python runs, its C++ is the example's, its names and commands exist."""

import re
from pathlib import Path

import attnpack
import pytest
import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    found = re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)
    assert found, f"the README has no {language}"
    return found


def lines(text):
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_opens_with_what_it_is_and_where_it_runs():
    first, second = README.split("\n\n")[:2]
    assert first.startswith("attnpack: ") and "a CPU library today" in first
    assert second.startswith("Linux x86-64 (ARM compiles), Python >= 3.11, torch >= 2.11;")
    assert "C++20" in second and "set(CMAKE_CXX_STANDARD 20)" in (ROOT / "CMakeLists.txt").read_text()


def test_python_snippets_run():
    torch.manual_seed(0)
    names = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert names["out"].shape == (1, 10, 512)
    assert [tuple(names[name].shape) for name in "qkv"] == [(1, 8, 10, 64), (1, 2, 10, 64), (1, 2, 10, 64)]


@pytest.mark.parametrize("language, file", [("cpp", "main.cpp"), ("cmake", "CMakeLists.txt")])
def test_cpp_is_that_of_the_example_which_the_tests_build_and_run(language, file):
    example = iter(lines((ROOT / "examples/cpp/hello_attention" / file).read_text()))
    for line in lines("".join(blocks(language))):
        assert line in example, f"{line!r} is not in {file}, or not in this order"


def test_the_table_of_caches_has_every_cache():
    rows = set(re.findall(r"^\| `(\w+Cache)\(", README, flags=re.M))
    others = {"ModelCache"}  # the list of a model's caches, in prose
    assert rows == {name for name in attnpack.__all__ if name.endswith("Cache")} - others
    missing = README.split("## Not there yet")[1].split("\n\n")[1]
    assert "missing" in missing and "cache" not in missing


def test_named_things_exist():
    tables = re.findall(r"^\| `(\w+)` \|", README, flags=re.M)
    prose = re.search(r"^Around them:.*?\.\s\[", README, flags=re.S | re.M).group()
    names = tables + re.findall(r"`(\w+)`", prose)
    assert {"MultiQueryAttention", "CausalLM", "apply_rope"} <= set(names)
    assert [name for name in names if not hasattr(attnpack, name)] == []


def test_linked_files_and_scripts_exist():
    paths = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"^bash (\S+)", README, flags=re.M)
    assert len(paths) > 4
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    "keyword, value", [("window", (3, 0)), ("softcap", 30.0), ("sinks", True), ("alibi", True), ("dropout", 0.1)]
)
def test_what_modules_are_said_to_take_they_take(keyword, value):
    assert f"`{keyword}`" in README
    for module in (attnpack.MultiHeadAttention, attnpack.cpp.MultiHeadAttention):
        assert module(16, 2, **{keyword: value}).forward(torch.zeros(1, 2, 16)).shape == (1, 2, 16)
    if keyword not in ("sinks", "alibi"):
        attnpack.ProjectedAttention(2, 2, 8, **{keyword: value})


def test_rope_types_are_those_that_the_readme_names():
    (line,) = re.findall(r"`RotaryEmbedding` stretches positions.*?\.", README, flags=re.S)
    for kind in re.findall(r"`(\w+)`", line)[2:]:
        lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
        attnpack.RotaryEmbedding(8, scaling={"rope_type": kind, "factor": 2.0, **lists})
