"""Parts of SVG pictures: text, lines, boxes, circles, as strings."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .colours import INK


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def text(
    x: float,
    y: float,
    words: str,
    colour: str = INK,
    *,
    bold=False,
    left=False,
    right=False,
    size: int = 12,
) -> str:
    """`left` and `right` say at which end of the words x is; without them x is the middle."""
    anchor = "start" if left else "end" if right else "middle"
    look = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"' + (' font-weight="bold"' if bold else "")
    return f'<text x="{number(x)}" y="{number(y)}" {look}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, words: str, fill: str, *, small=False, dashed=False) -> str:
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    dash = ' stroke-dasharray="3 2"' if dashed else ""
    drawn = f'<rect {place} rx="3" fill="{fill}" stroke="{INK}"{dash}/>'
    return drawn + (text(x + width / 2, y + height / 2 + 4, words, size=9 if small else 11) if words else "")


def line(
    x1: float, y1: float, x2: float, y2: float, colour: str = INK, *, arrow=False, dashed=False, width: float = 1.6
) -> str:
    way = f"M {number(x1)} {number(y1)} L {number(x2)} {number(y2)}"
    return path(way, colour, arrow=arrow, dashed=dashed, width=width)


def path(way: str, colour: str = INK, *, arrow=False, dashed=False, width: float = 1.6) -> str:
    ends = (' marker-end="url(#arrow)"' if arrow else "") + (' stroke-dasharray="3 2"' if dashed else "")
    return f'<path d="{way}" fill="none" stroke="{colour}" stroke-width="{width}"{ends}/>'


def circle(x: float, y: float, words: str) -> str:
    return f'<circle cx="{x}" cy="{y}" r="11" fill="white" stroke="{INK}"/>' + text(x, y + 5, words, size=15)


def dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{number(x)}" cy="{number(y)}" r="5" fill="{colour}"/>'


def strip(
    x: float, y: float, values: Sequence[float], colour: str, *, cell: float = 9, height: float = 16, faint=False
) -> str:
    """A vector as a row of cells, darker where a number is larger in size."""
    largest = max((abs(value) for value in values), default=0.0) or 1.0
    ink = "#bbbbbb" if faint else INK
    cells = [
        f'<rect x="{number(x + i * cell)}" y="{number(y)}" width="{number(cell)}" height="{number(height)}" '
        f'fill="{colour}" fill-opacity="{(0.3 if faint else 1.0) * (0.15 + 0.85 * abs(value) / largest):.2f}" '
        f'stroke="{ink}" stroke-width="0.6"/>'
        for i, value in enumerate(values)
    ]
    return "".join(cells)
