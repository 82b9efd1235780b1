"""Each strong claim is held by a test: claims/*.toml give, for each file, sentences or parts of them and their tests.

Strong words are searched in README and the docstrings of the modules that define the names of `attnpack.__all__` and
`attnpack.convert.__all__` (and of hf, the readers of checkpoints and the reference). A new "never" needs a line in
claims/, and so a test. Other files may be listed too, and are not searched: `scripts/advice.py` shows
their strong words.
"""

import ast
import inspect
import re
import sys
import tomllib
from pathlib import Path

import attnpack
import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # last: scripts/fuzz.py is not our package fuzz
from advice import STRONG  # noqa: E402

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
CLAIMS = {
    file: claims
    for listed in sorted((TESTS / "claims").glob("*.toml"))
    for file, claims in tomllib.loads(listed.read_text(encoding="utf-8")).items()
}


def public_files():
    """Paths of the files whose strong words are searched, from the root."""
    classes = []
    for module in (attnpack, attnpack.convert):
        for thing in (getattr(module, name) for name in module.__all__):
            classes += thing.__mro__ if inspect.isclass(thing) else [thing]
    names = {getattr(each, "__module__", "") for each in classes}
    paths = [Path(sys.modules[name].__file__) for name in names if name.startswith("attnpack.")]
    modules = [f"python/attnpack/{path.relative_to(Path(attnpack.__file__).parent)}" for path in paths]
    modules += [
        "python/attnpack/hf/__init__.py",
        "python/attnpack/checkpoints/build.py",
        "python/attnpack/reference.py",
    ]
    return ["README.md", *sorted(modules)]


def prose(file):
    """The texts of a file that a user reads: Markdown without code blocks, docstrings of public things, comments."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if file.endswith(".md"):
        return [re.sub(r"^```.*?^```", "\n", text, flags=re.S | re.M)]
    if file.endswith(".h"):
        return [
            re.sub(r"^ *// ?", "", run, flags=re.M)
            for run in re.findall(r"(?:^ *//.*\n)+|(?<=  )//.*", text, flags=re.M)
        ]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    documented = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return [ast.get_docstring(node) or "" for node in documented if not getattr(node, "name", "").startswith("_")]


def sentences(file):
    """Cut at full stops and semicolons, at empty lines, list items, rows of tables and the entries of a docstring."""
    parts = [
        part
        for text in prose(file)
        for paragraph in re.split(r"\n\s*\n|\n(?=\||\s*(?:-|\d+\.) | +\w+(?:, \w+)*: )", text)
        for part in re.split(r"(?<=[.;])\s+|(?<=\.\))\s+", " ".join(paragraph.split()))
    ]
    return [part for part in parts if part not in ("", "Raises:")]


def names_in(file):
    """Names of the tests of a Python file, or of the test cases of a C++ file."""
    text = (TESTS / file).read_text(encoding="utf-8")
    if file.endswith(".cpp"):
        return re.findall(r'TEST_CASE\("([^"]*)"', text)
    return [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("file", CLAIMS)
def test_listed_claims_are_made_and_held(file):
    made = sentences(file)
    for claim, names in CLAIMS[file].items():
        assert any(claim in sentence for sentence in made), f"{file} says no more {claim!r}: take it out of claims/"
        assert names, f"no test holds {claim!r}"
        for name in names:
            test_file, _, test = name.partition("::")
            assert test in names_in(test_file), f"{name}, which holds {claim!r}, is gone"


@pytest.mark.parametrize("file", public_files())
def test_strong_sentences_are_listed(file):
    claims = CLAIMS.get(file, {})
    said = [sentence for sentence in sentences(file) if STRONG.search(re.sub(r"`[^`]*`", "", sentence))]
    free = [sentence for sentence in said if not any(claim in sentence for claim in claims)]
    assert not free, "\n".join(["name the tests that hold these in tests/claims/, or say less:", *free])
