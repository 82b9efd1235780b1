"""Numbers in the notebooks' prose: those that look measured stand in an output of the same notebook, after rounding."""

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
# Numbers that follow from others, and sizes that the code sets.
ELSEWHERE = {
    "conversion_and_uptraining": {"2,048": 2048, "1,024": 1024},  # of models and texts
    "performance": {"75": 75, "100": 100},  # GB/s on some days, and the whole
}


def prose(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text = cell.source
            for pattern in NO_PROSE:
                text = re.sub(pattern, "", text, flags=re.DOTALL)
            yield text


def printed(notebook):
    """Every number among the outputs."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    texts = [output.get("text", "") for output in outputs]
    texts += [
        output.data.get(kind, "") for output in outputs if "data" in output for kind in ("text/plain", "text/html")
    ]
    return {float(number.replace(",", "")) for text in texts for number in PRINTED.findall(text)}


def unheld(notebook, elsewhere):
    """The numbers of the prose that no output and no entry of `elsewhere` rounds to."""
    numbers = printed(notebook)
    for text in prose(notebook):
        for match in NUMBER.findall(text):
            value, digits = float(match.replace(",", "")), len(match.partition(".")[2])
            known = [*numbers, elsewhere[match]] if match in elsewhere else numbers
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
    notebook = nbformat.v4.new_notebook()
    output = nbformat.v4.new_output("stream", text="GQA  1,024.44  12.55 ms\n")
    notebook.cells = [
        nbformat.v4.new_markdown_cell(
            "GQA caches 1,024.4 bytes in 13 ms, `99.9` aside, and is 2.5 times as fast: 40%."
        ),
        nbformat.v4.new_code_cell("", outputs=[output]),
    ]
    assert list(unheld(notebook, {"2.5": 5 / 2})) == ["40"]
