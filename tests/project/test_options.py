"""Every struct of options in a public header shows all of its options to visitors, in their order."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc" / "attnpack"
STRUCTS = re.compile(r"^struct (\w+)[^;{]*\{\n(.*?)^\};", re.M | re.S)
VISITED = {
    (path.relative_to(CSRC).as_posix(), name): body
    for path in sorted(CSRC.rglob("*.h"))
    for name, body in STRUCTS.findall(path.read_text())
    if "for_each_option" in body
}


def test_the_structs_are_found():
    assert len(VISITED) >= 20 and ("modules/grouped_attention.h", "GroupedOptions") in VISITED


@pytest.mark.parametrize("struct", VISITED, ids=" ".join)
def test_for_each_option_leaves_none_out(struct):
    body = VISITED[struct]
    options = re.findall(r"TORCH_ARG\([^;]*?,\s*(\w+)\);?", body)
    assert options and re.findall(r'visit\("(\w+)", self\.(\w+)_\)', body) == [(name, name) for name in options]
