"""Executes notebooks/*.py (jupytext percent format), and writes each as an .ipynb with outputs into the same folder.

python scripts/run_notebooks.py [NOTEBOOK.py ...]
"""

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"


def execute_script(script: Path) -> nbformat.NotebookNode:
    """The notebook of one script, run in the script's folder; raises if a cell raises."""
    notebook = jupytext.read(script)
    NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=120,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": script.parent}},
    ).execute()
    return notebook


def main() -> None:
    for script in [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.py")):
        notebook = execute_script(script)
        # Cell ids are the same each time, so that a second run changes only the outputs.
        for number, cell in enumerate(notebook.cells):
            cell.id = f"cell-{number}"
        notebook.metadata["jupytext"]["formats"] = "ipynb,py:percent"
        nbformat.write(notebook, script.with_suffix(".ipynb"))
        print(f"wrote {script.with_suffix('.ipynb')}")


if __name__ == "__main__":
    main()
