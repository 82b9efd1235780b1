"""Pages of one class, function or module: ```{api-class} attnpack.GroupedQueryAttention```, and tables of names:
```{api-table}``` has them as its lines, ```{api-contents} modules``` takes them from that page."""

import importlib
import operator
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

PAGES = Path(__file__).parents[1] / "api/python"
NAMES = re.compile(
    r"^## (?P<heading>.*)$|^```{api-table}\n(?P<table>[^`]*)```|^```{api-module} (?P<module>\S+)$"
    r"|^\.\. auto(?:class|function):: (?P<name>\S+)",
    re.M,
)


def contents(page: str) -> Iterator[tuple[str, list[str]]]:
    """(heading, names) of each part of a page of the API, as far as it has names of its own."""
    heading, names = "", []
    for found in NAMES.finditer((PAGES / f"{page}.md").read_text(encoding="utf-8")):
        if found["heading"] or (found["module"] and names):
            if names:
                yield heading, names
            heading, names = found["heading"] or "", []
        if found["module"]:
            heading = heading or found["module"]
            names = [f"~{found['module']}.{name}" for name in public_names(found["module"])]
        elif found["table"]:
            names = [*names, *found["table"].split()]
        elif found["name"]:
            names = [*names, f"~{found['name']}"]
    if names:
        yield heading, names


def public_names(module: str) -> list[str]:
    """Those of `__all__`, or else those that the module defines, in its order."""
    content = importlib.import_module(module)
    own = [name for name, value in vars(content).items() if getattr(value, "__module__", "") == module]
    return [name for name in getattr(content, "__all__", own) if not name.startswith("_")]


class _Rst(SphinxDirective):
    """Writes reStructuredText into a page of Markdown."""

    def rst(self, text: str) -> list[nodes.Node]:
        return self.parse_text_to_nodes("```{eval-rst}\n" + text + "\n```\n")


class ApiClassDirective(_Rst):
    """The class: what it is, its `forward` if it has one, then its other members."""

    required_arguments = 1

    def run(self):
        import attnpack

        name = self.arguments[0]
        lines = [f".. autoclass:: {name}", "   :show-inheritance:", "   :members:"]
        if hasattr(operator.attrgetter(name.removeprefix("attnpack."))(attnpack), "forward"):
            lines.append("   :inherited-members: Module")
            lines.append("   :exclude-members: forward, extra_repr")  # torch asks for extra_repr, users do not
            lines += ["", "   .. automethod:: forward"]
        else:
            lines.append("   :inherited-members:")
        return self.rst("\n".join(lines))


class ApiFunctionDirective(_Rst):
    required_arguments = 1

    def run(self):
        return self.rst(f".. autofunction:: {self.arguments[0]}")


class ApiModuleDirective(_Rst):
    """What the module is, a table of its names, and each of them."""

    required_arguments = 1

    def run(self):
        module = self.arguments[0]
        content = importlib.import_module(module)
        lines = [f".. automodule:: {module}", "", *_table(public_names(module))]
        for name in public_names(module):
            if isinstance(getattr(content, name), type):
                lines += ["", f".. autoclass:: {module}.{name}", "   :members:"]
            else:
                lines += ["", f".. autofunction:: {module}.{name}"]
        return self.rst("\n".join(lines))


class ApiTableDirective(_Rst):
    """A row per name: a link and the first sentence of the docstring. `~` shows the last part of a name."""

    has_content = True

    def run(self):
        return self.rst("\n".join(_table(self.content)))


class ApiContentsDirective(_Rst):
    """The tables of a page, or of one heading of it, so that names are listed once."""

    required_arguments = 1
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self):
        page, *wanted = self.arguments
        self.env.note_dependency(str(PAGES / f"{page}.md"))
        parts = [(heading, names) for heading, names in contents(page) if wanted in ([], [heading])]
        if not parts:
            raise self.error(f"docs/api/python/{page}.md has no names below '{''.join(wanted)}': see its headings")
        lines = []
        for heading, names in parts:
            lines += ["", f".. rubric:: {heading}"] if heading and len(parts) > 1 else []
            lines += ["", *_table(names)]
        return self.rst("\n".join(lines))


def _table(names: Iterable[str]) -> list[str]:
    return [".. autosummary::", "   :nosignatures:", "", *(f"   {name}" for name in names)]
