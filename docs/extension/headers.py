"""Reads the public C++ headers: their declarations, and the comments before them."""

import re
from pathlib import Path
from typing import NamedTuple

INCLUDE = Path(__file__).parents[2] / "csrc"
NOT_PUBLIC = ("core", "kernels", "threads", "detail", "cpu", "cuda", "meta", "autograd", "autocast", "batched", "lazy")
NAME = re.compile(
    r"\b(?:class|struct|enum class)\s+(\w+)|\busing\s+(\w+)\s*=|\bTORCH_MODULE\((\w+)\)"
    r"|(?<![\w:.])(?!if\b|for\b|sizeof\b|decltype\b|noexcept\b)(operator\W+|\w+)\(|(\w+)\s*(?:=|\{|;)"
)


# Lines around declarations that are not shown.
OUTSIDE = ("namespace ", "}  // namespace", 'extern "C" {', "}  // extern")

# A list of members, #define LIST(X) /* comment */ X(type, name, default, "..."), and what stands for it in a struct.
LIST = re.compile(r"^#define (\w+)\(X\)((?:.*\\\n)+.*)", re.M)
ENTRY = re.compile(r'/\*( .*?) \*/|X\(([^,]+), (\w+), ([^,]+), "')
MEMBERS = re.compile(r"^( +)(\w+)\(\w+_MEMBER\)$", re.M)


class Paragraph(NamedTuple):
    """Lines of a header without an empty line outside of braces."""

    names: list[str]
    comment: str
    code: str
    """As in the header, without private and protected members. Empty for a comment that stands alone."""


def public_headers(folder: str = "") -> list[str]:
    """Headers as users include them, below attnpack/folder; without a folder all. A header's name gives that one, and
    folder/* those of the folder itself."""
    place = INCLUDE / "attnpack" / folder.removesuffix("/*")
    files = [place] if place.is_file() else place.glob("*.h") if folder.endswith("/*") else place.rglob("*.h")
    found = [path.relative_to(INCLUDE) for path in files]
    return sorted(str(path) for path in found if not set(path.parts) & set(NOT_PUBLIC))


def read(text: str) -> list[Paragraph]:
    """The paragraphs inside the namespaces of a header's text."""
    found, lines, depth = [], [], 0
    for line in _declarations(text):
        if not line.strip() and depth == 0:
            found += [_paragraph(lines)] if lines else []
            lines = []
        else:
            lines.append(line)
            depth += _opens(line)
    return found + ([_paragraph(lines)] if lines else [])


def _declarations(text: str) -> list[str]:
    """The lines without the preprocessor's, those that open and close namespaces, and unnamed namespaces."""
    kept, hidden = [], 0
    lists = {name: ENTRY.findall(body) for name, body in LIST.findall(text)}
    text = MEMBERS.sub(lambda found: _members(found[1], lists[found[2]]), text)
    text = re.sub(r"^#.*(?:(?<=\\)\n.*)*", "#", text, flags=re.M)  # a macro of several lines is one
    for line in text.splitlines():
        if hidden or re.match(r"namespace( detail)? \{", line):
            hidden += _opens(line)
        elif line.startswith(("#", *OUTSIDE)) or re.match(r"\}$", line):
            kept += [line] if line == "}" else [""]
        else:
            kept.append(line)
    return kept


def _members(indent: str, entries: list[tuple[str, str, str, str]]) -> str:
    """The members of a list as if the struct declared them."""
    lines = [f"//{comment}" if comment else f"{kind} {name} = {value};" for comment, kind, name, value in entries]
    return "\n".join(indent + line for line in lines)


def _opens(line: str) -> int:
    code = re.sub(r'"(?:\\.|[^"\\])*"|//.*', "", line)
    return code.count("{") - code.count("}")


def _paragraph(lines: list[str]) -> Paragraph:
    first_code = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
    comment = "\n".join(line[2:].removeprefix(" ") for line in lines[:first_code])
    code = _visible(lines[first_code:])
    return Paragraph(_names(code), comment, "\n".join(code))


def _visible(lines: list[str]) -> list[str]:
    """The lines without the private and protected parts of classes."""
    kept, hidden = [], False
    for line in lines:
        if label := re.fullmatch(r" +(public|protected|private):", line):
            hidden = label[1] != "public"
        elif line.startswith("}"):
            hidden = False
        if not hidden:
            kept.append(line)
    return _tidy(kept)


def _tidy(lines: list[str]) -> list[str]:
    """The lines without two empty ones in a row, and without a label or an empty line at the end of a class."""
    kept = []
    for line in lines:
        while line.startswith("}") and kept and re.fullmatch(r" +public:|\s*", kept[-1]):
            kept.pop()
        if line.strip() or (kept and kept[-1].strip()):
            kept.append(line)
    return kept


def _names(code: list[str]) -> list[str]:
    """Names that stand outside of braces and parentheses."""
    names, depth, open_statement = [], 0, False
    for line in code:
        plain = re.sub(r'"(?:\\.|[^"\\])*"|//.*', "", line)
        if depth == 0 and not open_statement and not plain.startswith(("template", "}", " ")):
            match = NAME.search(re.sub(r"\[\[.*?\]\]|<[^<>]*>", "", plain))
            name = next((group for group in match.groups() if group), None) if match else None
            if name and name not in names:
                names.append(name)
        depth += _opens(line)
        if plain.strip() and not plain.startswith("template"):
            open_statement = depth == 0 and not plain.rstrip().endswith((";", "}"))
    return names
