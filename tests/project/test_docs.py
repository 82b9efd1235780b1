"""The files that CONTRIBUTING.md and PERFORMANCE.md name exist; ratios have one form in all texts."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = [ROOT, ROOT / "csrc/attnpack", ROOT / "csrc", ROOT / "python/attnpack", ROOT / "csrc/attnpack/ops"]
PLACES += [ROOT / "csrc/attnpack/ops/cpu/isa", ROOT / "csrc/attnpack/ops/cuda", ROOT / "tests"]


def named_files(text: str) -> set[str]:
    """Paths in back-ticks that end in a file's name; of `a.{h,cpp}` both."""
    found = set()
    for path in re.findall(r"`([\w./{},-]+\.(?:\w+|\{[\w,]+\}))`", text):
        stem, _, endings = path.partition("{")
        found |= {stem + ending for ending in endings.rstrip("}").split(",")} if endings else {path}
    found = {path for path in found if not path.startswith(("torch/", "ATen/", "c10/", "cpython/"))}
    return {path for path in found if re.search(r"\.(py|h|cpp|cu|cuh|md|toml|sh|txt)$", path)}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "PERFORMANCE.md"])
def test_named_files_exist(page):
    files = named_files((ROOT / page).read_text())
    assert len(files) > 5
    for name in sorted(files):
        nested = [place for place in PLACES if (place / name).exists()] or list(ROOT.glob(f"csrc/**/{name}"))
        assert nested or list(ROOT.glob(f"tests/**/{name}")), f"{page} names {name}, which does not exist"


TEXTS = [path for pattern in ("*.md", "docs/**/*.md", "notebooks/*.py", "python/attnpack/**/*.py", "benchmarks/*.py")
         for path in ROOT.glob(pattern) if path.name != "CONTRIBUTING.md"]  # fmt: skip
UNCLEAR = re.compile(r"\btimes\s+(?:#\s+)?(?:faster|slower|less|fewer|more|smaller|larger|bigger|cheaper)\b")


def test_ratios_have_one_form():
    """ "N times as fast", "1/N of the bytes": readers count "N times faster" and "N times less" in two ways."""
    assert len(TEXTS) > 100 and UNCLEAR.search("it is 3 times\n# faster")
    found = [
        f"{path.relative_to(ROOT)}: {words.group()}" for path in TEXTS for words in UNCLEAR.finditer(path.read_text())
    ]
    assert not found, found
