"""```{readme} In C++``` puts that section of the README on a page, so that there is no second copy of it."""

import re
from pathlib import Path

from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]


def section(text: str, heading: str) -> str:
    """The text below `## heading`, up to the next heading of that level, without the heading itself."""
    parts = re.split(r"^## (.*)$", text, flags=re.M)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    if heading not in sections:
        raise ValueError(
            f"README.md has no section '{heading}', only {sorted(sections)}. Name one of them, or write the section's "
            f"text on this page if it has left the README."
        )
    return sections[heading].strip() + "\n"


def links_from_root(text: str) -> str:
    """Links of the README as links from the root of the site. A folder of an example is its part of the examples."""
    text = re.sub(r"\]\(examples/cpp/(\w+)\)", lambda found: f"](/docs/examples.md#{found[1].replace('_', '-')})", text)
    return re.sub(r"\]\((?![a-z]+:|/|#)", "](/", text)


class ReadmeDirective(SphinxDirective):
    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        readme = ROOT / "README.md"
        self.env.note_dependency(str(readme))
        try:
            text = section(readme.read_text(encoding="utf-8"), self.arguments[0])
        except ValueError as error:
            raise self.error(str(error)) from None
        return self.parse_text_to_nodes(links_from_root(text))
