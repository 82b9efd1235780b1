"""Schematics of attention as SVG: who reads whose keys and values, what a block does, how a cache grows.

Each function gives a `Drawing`. A notebook shows one that a cell ends with; `save` writes it to a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...atomic_write import atomic_file
from .colours import GROUPS, INK, KEY, LATENT, NEW, PLAIN, QUERY, WEIGHT
from .svg import box, circle, line, path, text


class Drawing(NamedTuple):
    """An SVG picture, sized in pixels."""

    width: int
    height: int
    parts: tuple[str, ...]

    def _repr_svg_(self) -> str:  # the name by which notebooks ask
        return str(self)

    def __repr__(self) -> str:  # notebooks store it beside the picture
        return f"Drawing({self.width} x {self.height})"

    def __str__(self) -> str:
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
        return "\n".join(
            [head, f'<rect width="{self.width}" height="{self.height}" fill="white"/>', *self.parts, "</svg>\n"]
        )

    def save(self, path: str | Path) -> None:
        """Writes the SVG to `path`, whole or not at all."""
        with atomic_file(Path(path)) as partial:
            partial.write_text(str(self), encoding="utf-8")


def grouping(head_map: Sequence[int], *, title: str = "") -> Drawing:
    """Query heads over the key-value heads that they read: `head_map` names one for each query head."""
    return _grouping(list(head_map), title)


def variants(num_heads: int = 8, num_kv_heads: int = 2) -> Drawing:
    """Multi-head, grouped-query, multi-query and latent attention side by side, with what each caches per token."""
    group = num_heads // num_kv_heads
    panels = [
        _grouping(list(range(num_heads)), "MHA: a key-value head for each", f"cached: {num_heads} keys, values"),
        _grouping(
            [h // group for h in range(num_heads)], "GQA: one for each group", f"cached: {num_kv_heads} keys, values"
        ),
        _grouping([0] * num_heads, "MQA: one for all", "cached: 1 key, value"),
        latent(num_heads, note="cached: 1 latent, 1 rotated key"),
    ]
    return beside(panels)


def latent(num_heads: int = 8, *, note: str = "") -> Drawing:
    """Latent attention: every head has keys and values of its own, all made from one cached latent, and the keys of
    all heads have one cached rotated key as a part."""
    step, width = 30, max(30 * num_heads + 20, 200)
    left, middle = (width - step * num_heads) / 2, width / 2
    latent_at, rotated_at = middle - 48, middle + 52  # the middles of the two boxes
    parts = [text(middle, 18, "MLA: made from one latent", bold=True)]
    for h in range(num_heads):
        x = left + h * step
        parts += [
            line(x + 11, 58, x + 11, 88, GROUPS[h % len(GROUPS)]),
            line(x + 11, 112, latent_at, 142, "#888888", dashed=True),
            line(x + 11, 112, rotated_at, 142, "#e0a070", dashed=True),
            box(x, 34, 22, 24, f"q{h}", QUERY),
            box(x, 88, 22, 24, f"kv{h}", PLAIN, dashed=True),
        ]
    parts += [
        box(latent_at - 46, 142, 92, 24, "latent c", LATENT),
        box(rotated_at - 40, 142, 80, 24, "rotated key", KEY),
        text(middle, 186, note),
    ]
    return Drawing(width, 196, tuple(parts))


def block(*, cross: bool = False) -> Drawing:
    """A block with its norms before attention and before the feed-forward, and its two residual connections; with
    `cross` a third part that reads an encoder's output."""
    names = ["attention", *(["cross-attention"] if cross else []), "feed-forward"]
    parts, x, y = [text(20, 44, "x")], 36, 40
    for name in names:
        colour = PLAIN if name == "feed-forward" else WEIGHT
        parts += [
            line(x, y, x + 250, y, arrow=True),
            path(f"M {x + 10} {y} V {y + 44} H {x + 228} V {y + 12}", arrow=True),
            box(x + 28, y - 13, 50, 26, "norm", PLAIN),
            box(x + 92, y - 13, 112, 26, name, colour),
            circle(x + 228, y, "+"),
            text(x + 118, y + 40, "residual: unchanged"),
        ]
        if name == "cross-attention":
            parts += [
                line(x + 148, 4, x + 148, y - 13, arrow=True),
                text(x + 154, 12, "the encoder's output", left=True),
            ]
        x += 250
    parts.append(text(x + 14, 44, "out"))
    return Drawing(x + 34, 96, (ARROW, *parts))


def cache_growth(prompt: int = 3, steps: int = 3, words: Sequence[str] | None = None) -> Drawing:
    """A cache over a prompt and some steps: what is projected in a call, what is read from the cache. `words` are the
    tokens, prompt + steps of them."""
    cell, parts = 58 if words else 34, []
    for row in range(steps + 1):
        y, old = 26 + row * 44, 0 if row == 0 else prompt + row - 1
        name = "prompt" if row == 0 else f"step {row}"
        parts.append(text(70, y + 20, name, right=True))
        for i in range(prompt + row):
            label = words[i].strip() if words else f"k v {i}"
            parts.append(box(84 + i * cell, y, cell - 4, 30, label, KEY if i < old else NEW, small=True))
    width = 84 + (prompt + steps) * cell + 270
    x = width - 256
    for i, (colour, says) in enumerate(((NEW, "projected in this call, and appended"), (KEY, "read from the cache"))):
        parts += [box(x, 40 + 34 * i, 20, 20, "", colour), text(x + 28, 55 + 34 * i, says, left=True)]
    parts.append(text(84, 16, "keys and values, one pair per token", left=True))
    return Drawing(width, 34 + 44 * (steps + 1), tuple(parts))


def beside(drawings: Sequence[Drawing]) -> Drawing:
    """Drawings in one row."""
    parts, x = [], 0
    for each in drawings:
        parts += [f'<g transform="translate({x} 0)">', *each.parts, "</g>"]
        x += each.width + 12
    return Drawing(x - 12, max(each.height for each in drawings), tuple(parts))


def _grouping(head_map: list[int], title: str = "", note: str = "") -> Drawing:
    num_kv_heads, step = max(head_map) + 1, 30
    width = step * len(head_map) + 20
    readers = [[h for h, kv in enumerate(head_map) if kv == k] for k in range(num_kv_heads)]
    # A key-value head stands under the middle of its readers; one that nobody reads has no place.
    middles = [10 + step * sum(each) / len(each) + 11 if each else None for each in readers]
    parts = [text(width / 2, 18, title, bold=True)] if title else []
    for h, kv in enumerate(head_map):
        parts.append(line(10 + h * step + 11, 58, middles[kv], 142, GROUPS[kv % len(GROUPS)]))
    parts += [box(10 + h * step, 34, 22, 24, f"q{h}", QUERY) for h in range(len(head_map))]
    parts += [box(x - 13, 142, 26, 24, f"kv{k}", KEY) for k, x in enumerate(middles) if x is not None]
    return Drawing(width, 196, (*parts, *([text(width / 2, 186, note)] if note else [])))


ARROW = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    f'<path d="M 0 0 L 8 4 L 0 8 z" fill="{INK}"/></marker></defs>'
)
