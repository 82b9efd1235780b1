"""Pages of one class or function: ```{api-class} attnpack.GroupedQueryAttention```, and tables of them,
```{api-table}```, whose lines are names."""

import operator

from docutils import nodes
from sphinx.util.docutils import SphinxDirective


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


class ApiTableDirective(_Rst):
    """A row per name: a link and the first sentence of the docstring. `~` shows the last part of a name."""

    has_content = True

    def run(self):
        names = "\n".join(f"   {name}" for name in self.content)
        return self.rst(f".. autosummary::\n   :nosignatures:\n\n{names}")
