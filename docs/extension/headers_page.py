"""```{headers} ops``` describes every public header below csrc/attnpack/ops, and begins with a table of them."""

import re

from docutils import nodes
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

from .headers import INCLUDE, Paragraph, public_headers, read


class HeadersDirective(SphinxDirective):
    """A section for each header, in it one for each paragraph of declarations: names, comment, code."""

    required_arguments = 1

    def run(self):
        headers = public_headers(self.arguments[0])
        if not headers:
            raise self.error(f"csrc/attnpack/{self.arguments[0]} has no public header. Name a folder that has one.")
        parts = [self._header(header) for header in headers]
        return [_table(parts), *parts] if len(parts) > 1 else parts

    def _header(self, header: str) -> nodes.section:
        self.env.note_dependency(str(INCLUDE / header))
        part = nodes.section(ids=[nodes.make_id(header)], names=[header])
        part += nodes.title("", "", nodes.literal("", header))
        for paragraph in read((INCLUDE / header).read_text(encoding="utf-8")):
            part += self._paragraph(header, paragraph)
        return part

    def _paragraph(self, header: str, paragraph: Paragraph) -> nodes.Node:
        if not paragraph.names:
            return nodes.container("", *_prose(paragraph.comment), *_code(paragraph.code))
        title = ", ".join(paragraph.names)
        part = nodes.section(ids=[nodes.make_id(f"{header} {title}")], names=[])
        part += nodes.title("", "", nodes.literal("", title))
        entries = [("single", f"{name} (C++)", part["ids"][0], "", None) for name in paragraph.names]
        part += [addnodes.index(entries=entries), *_prose(paragraph.comment), *_code(paragraph.code)]
        return part


def _table(parts: list[nodes.section]) -> nodes.bullet_list:
    """A line for each header: its name and, as links, the names that it declares."""
    table = nodes.bullet_list(classes=["headers"])
    for part in parts:
        line = nodes.paragraph("", "", _link(part), nodes.Text(": "))
        for n, section in enumerate(part.findall(nodes.section)):
            if section is not part:
                line += [nodes.Text(", ")] if n > 1 else []
                line += _link(section)
        table += nodes.list_item("", line)
    return table


def _link(section: nodes.section) -> nodes.reference:
    return nodes.reference("", "", nodes.literal("", section[0].astext()), internal=True, refid=section["ids"][0])


def _code(code: str) -> list[nodes.Node]:
    return [nodes.literal_block(code, code, language="cpp")] if code else []


def _prose(comment: str) -> list[nodes.Node]:
    """A comment as paragraphs, with what stands in back-ticks as code. Indented lines stay as they are."""
    found = []
    for text in re.split(r"\n\s*\n", comment.strip("\n")):
        if not text.strip():
            continue
        if re.search(r"^ ", text, flags=re.M):
            found.append(nodes.literal_block(text, text, language="text"))
            continue
        pieces = re.split(r"`([^`]*)`", text)
        kinds = (nodes.Text, lambda piece: nodes.literal("", piece))
        found.append(nodes.paragraph("", "", *(kinds[i % 2](piece) for i, piece in enumerate(pieces) if piece)))
    return found
