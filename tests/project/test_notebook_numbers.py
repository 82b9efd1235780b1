"""Claims of the notebooks' prose: numbers that look measured stand in an output close by, after rounding, and sentences
of a summary that compare name the output that shows it, by words in quotes that it prints or that a picture has."""

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
COMPARES = re.compile(
    r"\b(?:fast(?:er|est)?|slow(?:er|est)?|close[rst]*|same|equal|best|better|worst|worse"
    r"|more|less|fewer|smaller|larger|lower|higher|pays|gains)\b",
    re.I,
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


def summary_sentences(notebook):
    """Those between the headings Summary and Exercises."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    summary = text.partition("## Summary\n")[2].partition("\n## ")[0]
    for item in re.split(r"\n(?:- |\n)", summary):
        yield from re.split(r"(?<=[.:?)]) (?=[A-Z])", " ".join(item.removeprefix("- ").split()))


def shown(notebook):
    """The text of the outputs, and the sources of the cells that draw."""
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            texts += [output.get("text", ""), data.get("text/plain", "")]
            texts += [cell.source] if "image/png" in data else []
    return " ".join(" ".join(texts).split())


def unnamed(notebook):
    """The sentences of the summary that compare, and name no output of the notebook."""
    outputs = shown(notebook)
    for sentence in summary_sentences(notebook):
        quotes = re.findall(r'"([^"]+)"', sentence)
        said = re.sub(r'"[^"]*"', "", sentence)
        if COMPARES.search(said) and not (quotes and all(quote in outputs for quote in quotes)):
            yield sentence


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_comparisons_of_a_summary_name_their_output(path):
    notebook = nbformat.read(path, as_version=4)
    assert len(list(summary_sentences(notebook))) >= 2
    assert list(unnamed(notebook)) == []


def test_a_comparison_without_an_output_is_found():
    markdown, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    output = nbformat.v4.new_output("stream", text="MQA against MHA:  3 times\n")
    picture = nbformat.v4.new_output("display_data", {"image/png": ""})
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        code("", outputs=[output]),
        code("axes.set_title('Reading')", outputs=[picture]),
        code("print('nothing of this')"),
        markdown(
            "All is faster.\n\n## Summary\n\n(A word before.)\n\n"
            '- MQA is faster ("MQA against\n  MHA"). It reads one head.\n'
            '- It is the best. Pictures show the same ("Reading").\n'
            '- They are close ("nothing of this").\n- Is it "worse"?\n- Sharing pays where caches are larger.\n'
            "\n## Exercises\n\n1. Which is the same?"
        ),
    ]
    assert list(unnamed(notebook)) == [
        "It is the best.",
        'They are close ("nothing of this").',
        "Sharing pays where caches are larger.",
    ]


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
