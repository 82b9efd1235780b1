"""```{course}``` shows the notebooks as cards, in the order and with the words of docs/notebooks.md, and with the
pictures of cards.py."""

import html
import json
import re
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from .cards import CARDS

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+) \| \[(\w+)\]\(\.\./notebooks/\w+\.ipynb\) \| (.*) \|$", re.M)


class Notebook(NamedTuple):
    number: int
    name: str
    shows: str

    def title(self) -> str:
        """The title without what follows a colon."""
        cells = json.loads((ROOT / f"notebooks/{self.name}.ipynb").read_text(encoding="utf-8"))["cells"]
        first = next(line for cell in cells for line in cell["source"] if line.startswith("# "))
        return first[2:].split(":")[0].strip()


def notebooks() -> list[Notebook]:
    """In the order in which they are read."""
    text = (ROOT / "docs/notebooks.md").read_text(encoding="utf-8")
    return [Notebook(int(number), name, shows) for number, name, shows in ROW.findall(text)]


def write_pictures(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for notebook in notebooks():
        CARDS[notebook.name]().save(folder / f"{notebook.name}.svg")


class CourseDirective(SphinxDirective):
    def run(self):
        self.env.note_dependency(str(ROOT / "docs/notebooks.md"))
        here = self.env.docname
        cards = []
        for notebook in notebooks():
            self.env.note_dependency(str(ROOT / f"notebooks/{notebook.name}.ipynb"))
            page = self.env.app.builder.get_relative_uri(here, f"notebooks/{notebook.name}")
            folder = "/".join([".."] * (here.count("/") - 1) + ["course"])
            picture, title = f"{folder}/{notebook.name}.svg", html.escape(notebook.title())
            cards.append(
                f'<a class="card" href="{page}"><img src="{picture}" alt="">'
                f"<b>{notebook.number}. {title}</b><span>{_code(html.escape(notebook.shows))}</span></a>"
            )
        return [nodes.raw("", f'<div class="cards">{"".join(cards)}</div>', format="html")]


def _code(text: str) -> str:
    return re.sub("`([^`]*)`", r"<code>\1</code>", text)
