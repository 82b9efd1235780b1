"""The picture of a comparison: loss against the bytes of the cache, and against the time of a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..plot import colours, svg
from ..plot.schematic import Drawing
from .axes import Axis, LogAxis
from .report import Entry

_WIDTH, _HEIGHT = 920, 470
_TOP, _BOTTOM = 66, 356  # of the panels
_PANELS = ((72, 476), (500, 904))  # left and right
_GRID, _FRONT, _SOFT = "#e6e6e6", "#a0a0a0", "#666666"
_LETTER = 8  # width of a bold letter of 12 pixels
_OTHERS = (colours.BLACK, colours.SKY, colours.AMBER, colours.BROWN)  # that no kind has

_Area = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass
class _Point:
    name: str
    colour: str
    cost: float  # where its cost is on the axis
    x: float  # where it stands
    y: float
    top: float
    bottom: float  # the ends of the bar

    @property
    def moved(self) -> bool:
        return abs(self.x - self.cost) > 0.5


# Where a name may stand: to the side of its point, above or below its bar, or beside it aslant.
_PLACES = (("right", 4), ("left", 4), ("above", 0), ("below", 0), ("right", -8), ("right", 16))


class _Place:
    """A place for the name of a point, `down` pixels lower than the point."""

    def __init__(self, point: _Point, side: str, down: float) -> None:
        width = _LETTER * len(point.name)
        self._point, self._side = point, side
        self._x = point.x + {"right": 10, "left": -10}.get(side, 0)
        heights = {"above": min(point.top, point.y - 6) - 5, "below": max(point.bottom, point.y + 6) + 14}
        self._y = heights.get(side, point.y + down)
        begin = self._x - {"right": 0, "left": width}.get(side, width / 2)
        self.area: _Area = (begin, self._y - 10, begin + width, self._y + 2)

    def drawn(self) -> str:
        anchor = {"left": self._side == "right", "right": self._side == "left"}
        return svg.text(self._x, self._y, self._point.name, self._point.colour, bold=True, **anchor)


def draw(entries: dict[str, Entry], title: str, context: int) -> Drawing:
    """Two panels side by side, with a point for each variant. A line joins those to which no other is better in both
    loss and cost."""
    ends = [entry.loss + side * (entry.loss_spread or 0.0) for entry in entries.values() for side in (-1, 1)]
    losses = Axis(ends, _BOTTOM, _TOP)
    cache_bytes = {name: entry.cache_bytes_per_token for name, entry in entries.items()}
    took = {name: entry.ms_per_token for name, entry in entries.items()}
    left = _Panel(entries, losses, cache_bytes, LogAxis(list(cache_bytes.values()), *_PANELS[0]), _PANELS[0])
    right = _Panel(entries, losses, took, Axis(list(took.values()), *_PANELS[1]), _PANELS[1])
    seeds = max(len(entry.losses) for entry in entries.values())
    notes = [
        "Lower and further left is better",
        *(["bars: one standard deviation over the seeds"] if seeds > 1 else []),
        *(["grey line: nothing else is better in both"] if left.has_front or right.has_front else []),
    ]
    begin = _PANELS[0][0]
    moved = "A point that would cover another stands beside it; the short line at its side leads to its own cost"
    parts = [
        svg.text(begin, 26, "Loss against memory and time", bold=True, left=True, size=17),
        svg.text(begin, 47, title, _SOFT, left=True),
        *left.frame(f"cache: bytes per token, after {context:,} tokens"),
        *right.frame(f"decoding: ms per token, after {context:,} tokens"),
        *(svg.text(begin - 8, losses(y) + 4, losses.words(y), _SOFT, right=True, size=11) for y in losses.ticks),
        _upright(24, (_TOP + _BOTTOM) / 2, "held-out loss, nats per byte"),
        *left.points(),
        *right.points(),
        svg.text(begin, 434, "; ".join(notes), _SOFT, left=True),
        *([svg.text(begin, 452, moved, _SOFT, left=True)] if left.has_moved or right.has_moved else []),
    ]
    return Drawing(_WIDTH, _HEIGHT, tuple(parts))


class _Panel:
    def __init__(
        self, entries: dict[str, Entry], losses: Axis, costs: dict[str, float], axis: Axis, place: tuple[int, int]
    ) -> None:
        self._losses, self._axis = losses, axis
        self._left, self._right = place
        self._best = _front({name: (costs[name], entry.loss) for name, entry in entries.items()})
        self._points = []
        others = itertools.cycle(_OTHERS)
        for name in entries:
            colour = colours.KINDS.get(name.partition("-")[0].upper()) or next(others)
            loss, spread = entries[name].loss, entries[name].loss_spread or 0.0
            heights = [losses(each) for each in (loss, loss + spread, loss - spread)]
            self._points.append(_Point(name, colour, axis(costs[name]), axis(costs[name]), *heights))
        _set_apart(self._points)

    @property
    def has_front(self) -> bool:
        return len(self._best) > 1

    @property
    def has_moved(self) -> bool:
        return any(point.moved for point in self._points)

    def frame(self, label: str) -> list[str]:
        """The grid, and the costs below it."""
        parts = [svg.line(self._left, y, self._right, y, _GRID, width=1) for y in map(self._losses, self._losses.ticks)]
        for cost in self._axis.ticks:
            x = self._axis(cost)
            parts.append(svg.line(x, _TOP, x, _BOTTOM, _GRID, width=1))
            parts.append(svg.text(x, _BOTTOM + 18, self._axis.words(cost), _SOFT, size=11))
        return [*parts, svg.text((self._left + self._right) / 2, _BOTTOM + 42, label)]

    def points(self) -> list[str]:
        parts = [svg.line(a.x, a.y, b.x, b.y, _FRONT, dashed=True) for a, b in self._front_pairs()]
        for point in self._points:
            x, colour = point.x, point.colour
            parts.append(svg.line(x, point.top, x, point.bottom, colour))
            parts += [svg.line(x - 4, end, x + 4, end, colour) for end in (point.top, point.bottom) if end != point.y]
            parts += [svg.line(point.cost, point.y, x, point.y, colour)] if point.moved else []
            parts.append(svg.dot(x, point.y, colour))
        return parts + self._names()

    def _front_pairs(self) -> list[tuple[_Point, _Point]]:
        named = {point.name: point for point in self._points}
        return list(itertools.pairwise(named[name] for name in self._best))

    def _names(self) -> list[str]:
        """A name beside each point, where it covers the least."""
        taken = [(p.x - 6, min(p.top, p.y - 6), p.x + 6, max(p.bottom, p.y + 6)) for p in self._points]
        for a, b in self._front_pairs():
            middles = [(a.x + (b.x - a.x) * n / 16, a.y + (b.y - a.y) * n / 16) for n in range(17)]
            taken += [(x - 3, y - 2, x + 3, y + 2) for x, y in middles]
        parts = []
        for point in self._points:
            places = [_Place(point, *place) for place in _PLACES]
            best = min(places, key=lambda place: self._covered(place.area, taken))
            taken.append(best.area)
            parts.append(best.drawn())
        return parts

    def _covered(self, area: _Area, taken: list[_Area]) -> float:
        """The pixels of an area that others have, and, as worse, those outside of the panel."""
        begin, top, end, bottom = area
        inside = max(begin, self._left), max(top, _TOP), min(end, self._right), min(bottom, _BOTTOM)
        outside = (end - begin) * (bottom - top) - _shared(area, inside)
        return sum(_shared(area, other) for other in taken) + 100 * outside


def _shared(a: _Area, b: _Area) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return max(0.0, width) * max(0.0, height)


def _front(places: dict[str, tuple[float, float]]) -> list[str]:
    """The names of the points (cost, loss) to which no other is at most equal in both, from the cheapest on."""
    best: list[str] = []
    for name in sorted(places, key=lambda name: places[name]):
        if not best or places[name][1] < places[best[-1]][1]:
            best.append(name)
    return best


def _set_apart(points: Sequence[_Point], least: float = 12.0) -> None:
    """Moves points aside whose bars would cover each other. The picture shows by how much."""
    groups: list[list[_Point]] = []
    for point in sorted(points, key=lambda point: point.x):
        if groups and any(_overlap(point, other, least) for other in groups[-1]):
            groups[-1].append(point)
        else:
            groups.append([point])
    for group in groups:
        middle = sum(point.x for point in group) / len(group)
        for place, point in enumerate(group):
            point.x = middle + least * (place - (len(group) - 1) / 2)


def _overlap(a: _Point, b: _Point, least: float) -> bool:
    return abs(a.x - b.x) < least and max(a.top, b.top) - least < min(a.bottom, b.bottom)


def _upright(x: float, y: float, words: str) -> str:
    return f'<g transform="rotate(-90 {x} {svg.number(y)})">{svg.text(x, y, words)}</g>'
