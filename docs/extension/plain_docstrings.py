"""Docstrings are plain text with names in back-ticks. Sphinx reads them as reStructuredText, where some signs mean
something else: they are escaped."""

import re

CODE = re.compile(r"(:\w+:`[^`]*`|``.*?``|`[^`]*`)")
SIGNS = re.compile(r"[*|\\]|(?<=\w)_(?!\w)")


def escape_lines(lines: list[str]) -> list[str]:
    """The lines with `*`, `|`, back-slashes and trailing underscores escaped, but for what stands in back-ticks."""
    return [_escape(line) for line in lines]


def _escape(line: str) -> str:
    parts = CODE.split(line)
    parts[::2] = [SIGNS.sub(lambda sign: "\\" + sign.group(), part) for part in parts[::2]]
    return "".join(parts)
