"""```{course}``` shows the notebooks as cards, in the order and with the words of docs/notebooks.md. A card's picture
is that of the cell with the tag "card", or else the notebook's first schematic, or its first picture."""

import base64
import functools
import html
import json
import re
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+) \| \[(\w+)\]\(\.\./notebooks/\w+\.ipynb\) \| (.*) \|$", re.M)
TYPES = {"image/svg+xml": "svg", "image/png": "png"}


@functools.cache
def _cells(name: str) -> list[dict]:
    return json.loads((ROOT / f"notebooks/{name}.ipynb").read_text(encoding="utf-8"))["cells"]


class Notebook(NamedTuple):
    number: int
    name: str
    shows: str

    def title(self) -> str:
        """The title without what follows a colon."""
        first = next(line for cell in _cells(self.name) for line in cell["source"] if line.startswith("# "))
        return first[2:].split(":")[0].strip()

    def picture(self) -> tuple[str, bytes]:
        """(the file's name, its bytes)"""
        chosen = [cell for cell in _cells(self.name) if "card" in cell["metadata"].get("tags", [])]
        outputs = [each.get("data", {}) for cell in chosen or _cells(self.name) for each in cell.get("outputs", [])]
        for kind, ending in TYPES.items():
            for data in outputs:
                if kind in data:
                    text = "".join(data[kind])
                    return f"{self.name}.{ending}", text.encode() if ending == "svg" else base64.b64decode(text)
        raise ValueError(f"notebooks/{self.name}.ipynb stores no picture: run scripts/run_notebooks.py")


def notebooks() -> list[Notebook]:
    """In the order in which they are read."""
    text = (ROOT / "docs/notebooks.md").read_text(encoding="utf-8")
    return [Notebook(int(number), name, shows) for number, name, shows in ROW.findall(text)]


def write_pictures(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for notebook in notebooks():
        name, data = notebook.picture()
        (folder / name).write_bytes(data)


class CourseDirective(SphinxDirective):
    def run(self):
        self.env.note_dependency(str(ROOT / "docs/notebooks.md"))
        here = self.env.docname
        cards = []
        for notebook in notebooks():
            self.env.note_dependency(str(ROOT / f"notebooks/{notebook.name}.ipynb"))
            page = self.env.app.builder.get_relative_uri(here, f"notebooks/{notebook.name}")
            folder = "/".join([".."] * (here.count("/") - 1) + ["course"])
            picture, title = f"{folder}/{notebook.picture()[0]}", html.escape(notebook.title())
            cards.append(
                f'<a class="card" href="{page}"><img src="{picture}" alt="" loading="lazy">'
                f"<b>{notebook.number}. {title}</b><span>{_code(html.escape(notebook.shows))}</span></a>"
            )
        return [nodes.raw("", f'<div class="cards">{"".join(cards)}</div>', format="html")]


def _code(text: str) -> str:
    return re.sub("`([^`]*)`", r"<code>\1</code>", text)
