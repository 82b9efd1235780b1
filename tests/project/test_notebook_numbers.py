"""Numbers in the notebooks' prose: those that look measured stand in an output close by, after rounding."""

import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
ALONE = r"(?<![\w.,/^_{-])"  # no part of a name, a formula or a longer number
NUMBER = re.compile(
    rf"{ALONE}\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?|{ALONE}\d+\.\d+"
    rf"|{ALONE}\d+(?= ?(?:%|(?:times|ms|us|KB|MB|GB|seconds|points)\b))"
)
PRINTED = re.compile(r"(?<![\w.])\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
NO_PROSE = (
    r"```.*?```",
    r"`[^`]*`",
    r"\$\$.*?\$\$",
    r"\$[^$]*\$",
    r"\[[^\]]*\]\([^)]*\)",
    r"arXiv[: ]*[\d., ]+",
)
NEAR = 3  # how many cells before and after a text print its numbers
# Sizes that the code sets, and a number of the paper.
ELSEWHERE = {
    "conversion_and_uptraining": {"2,048": 2048, "1,024": 1024, "5": 5},
    "performance": {"100": 100},  # the whole
}


def prose(cell):
    text = cell.source
    for pattern in NO_PROSE:
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    return text


def printed(cell):
    """Every number among the outputs of a code cell, without those in the source of a page."""
    texts = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        texts += [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]
    return {
        float(number.replace(",", "")) for text in texts if "<iframe" not in text for number in PRINTED.findall(text)
    }


def unheld(notebook, elsewhere):
    """The numbers of the prose that no output near it and no entry of `elsewhere` rounds to."""
    numbers = [printed(cell) for cell in notebook.cells]
    for place, cell in enumerate(notebook.cells):
        if cell.cell_type != "markdown":
            continue
        near = set().union(*numbers[max(place - NEAR, 0) : place + NEAR + 1])
        for match in NUMBER.findall(prose(cell)):
            value, digits = float(match.replace(",", "")), len(match.partition(".")[2])
            known = [*near, elsewhere[match]] if match in elsewhere else near
            if not any(round(number, digits) == value for number in known):
                yield match


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_numbers_of_the_prose_are_printed(path):
    notebook = nbformat.read(path, as_version=4)
    assert list(unheld(notebook, ELSEWHERE.get(path.stem, {}))) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_exception_is_left_over(path):
    held = set(unheld(nbformat.read(path, as_version=4), {}))
    assert set(ELSEWHERE.get(path.stem, {})) <= held


def test_a_wrong_number_is_found():
    """Nor does a number count that is printed far away, or that stands in the source of a page."""
    markdown, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    output = nbformat.v4.new_output("stream", text="GQA  1,024.44  12.55 ms\n")
    page = nbformat.v4.new_output("display_data", {"text/html": "<iframe srcdoc='40'></iframe>"})
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        markdown("GQA caches 1,024.4 bytes in 13 ms, `99.9` aside, and is 2.5 times as fast: 40%."),
        code("", outputs=[output, page]),
        *(markdown("") for _ in range(NEAR)),
        markdown("It takes 13 ms."),
    ]
    assert list(unheld(notebook, {"2.5": 5 / 2})) == ["40", "13"]
