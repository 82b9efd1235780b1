"""Every option of a struct with a list of options is on the list."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc" / "attnpack"
STRUCTS = re.compile(r"^struct (\w+) : OptionList<[^;{]*\{\n(.*?)^\};", re.M | re.S)
LISTED = {
    (path.relative_to(CSRC).as_posix(), name): body
    for path in sorted(CSRC.rglob("*.h"))
    for name, body in STRUCTS.findall(path.read_text())
}


def test_the_structs_are_found():
    assert len(LISTED) >= 20 and ("modules/attention/grouped_attention.h", "GroupedOptions") in LISTED


@pytest.mark.parametrize("struct", LISTED, ids=" ".join)
def test_no_option_is_missing_from_the_list(struct):
    """TORCH_ARG would make an option that no list has."""
    assert re.findall(r"TORCH_ARG\(|ATTNPACK_OPTION", LISTED[struct]).count("TORCH_ARG(") == 0
    assert "ATTNPACK_OPTION(" in LISTED[struct]
