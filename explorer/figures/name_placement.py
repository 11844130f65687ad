"""Places names at points without overlap. Each takes the nearest free place, and a leader line where it could be another point's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from explorer.graph.layered import text_width

HEIGHT = 16.0
MARK = 8.0
"""Pixels from the middle of a mark to its edge."""
NAME_OFFSET = 15.0
"""Pixels from a point to a name right beside it."""
OWN_REACH = 26.0
"""A name without a leader is this far from every other point."""
REACHES = (NAME_OFFSET, 30.0, 50.0, 75.0)
STEPS = tuple(sign * 18.0 * k for k in range(8) for sign in (-1, 1))[1:]

Rect = tuple[float, float, float, float]
Point = tuple[float, float]


@dataclass(frozen=True)
class Plot:
    """The pixels of a plot at one width of the window: its points, and the rectangles that are taken already."""

    width: float
    height: float
    points: Sequence[Point]
    drawn: Sequence[Rect] = ()


class Place(NamedTuple):
    """Where a name lies: its near end, in pixels right of and below its point, and whether a leader joins the two."""

    right: float
    down: float
    leader: bool

    @property
    def way(self) -> float:
        """Pixels from the point to the name, and one for its left side."""
        return math.hypot(self.right, self.down) + (self.right < 0)

    def box(self, point: Point, length: float) -> Rect:
        """Return the rectangle of a name of `length` pixels."""
        x, y = point[0] + self.right, point[1] + self.down
        left = x if self.right > 0 else x - length
        return left, y - HEIGHT / 2, left + length, y + HEIGHT / 2


def place_names(plots: Sequence[Plot], names: Sequence[str]) -> list[Place]:
    """Return the place of each point's name, one for all `plots`: the same points, as windows of several widths draw them."""
    drawings = [_Drawing(p) for p in plots]
    places = [Place(NAME_OFFSET, 0.0, leader=False)] * len(names)
    steps = [Place(side * dx, dy, leader=True) for dy in STEPS for dx in REACHES for side in (1, -1)]
    for i in sorted(range(len(names)), key=lambda i: plots[0].points[i]):
        length = text_width(names[i], 12.5)
        beside = [Place(side * NAME_OFFSET, 0.0, leader=False) for side in (1, -1)]
        alone = [o for o in beside if all(d.is_alone(i, o, length) for d in drawings)]
        options = sorted((*alone, *steps), key=lambda o: o.way)
        inside = [o for o in options if all(d.is_inside(i, o, length) for d in drawings)]
        least = math.inf
        for option in inside or options:
            if len(drawings) * option.way >= least:
                break  # the way is a part of the cost, and grows from here
            cost = sum(d.cost(i, option, length) for d in drawings)
            if cost < least:
                least, places[i] = cost, option
        for d in drawings:
            d.add_name(i, places[i], length)
    return places


class _Drawing:
    """A plot, and the names and leaders that were placed in it."""

    def __init__(self, plot: Plot) -> None:
        self.plot = plot
        self.marks = [(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in plot.points]
        self.taken = list(plot.drawn)
        self.lines: list[Point] = []

    def is_inside(self, i: int, place: Place, length: float) -> bool:
        left, top, right, bottom = place.box(self.plot.points[i], length)
        return left >= 0 and right <= self.plot.width and top >= 0 and bottom <= self.plot.height

    def is_alone(self, i: int, place: Place, length: float) -> bool:
        """Tell if no other point could own a name here."""
        box = place.box(self.plot.points[i], length)
        return all(_distance(box, p) >= OWN_REACH for p in self._other_points(i))

    def cost(self, i: int, place: Place, length: float) -> float:
        """Return how bad a place is.

        Every pixel that is covered costs more than any way; then a leader's way over what is not its own, and another point that the
        name almost touches; then the way to the name, and its left side.
        """
        point = self.plot.points[i]
        box = place.box(point, length)
        others = self.marks[:i] + self.marks[i + 1 :] + self.taken
        hidden = sum(_is_within(box, p) for p in self.lines)
        crossed = sum(_is_within(o, p) for o in others for p in _line(point, place))
        near = sum(max(0.0, NAME_OFFSET - _distance(box, p)) for p in self._other_points(i))
        return 100 * (_covered_area(box, others) + hidden) + 8 * (2 * crossed + near) * place.leader + place.way

    def add_name(self, i: int, place: Place, length: float) -> None:
        self.taken.append(place.box(self.plot.points[i], length))
        if place.leader:
            self.lines += _line(self.plot.points[i], place)

    def _other_points(self, i: int) -> Iterator[Point]:
        return (p for j, p in enumerate(self.plot.points) if j != i)


def _line(point: Point, place: Place) -> list[Point]:
    """Return points about four pixels apart on the leader of a place."""
    count = max(1, int(math.hypot(place.right, place.down) / 4))
    return [(point[0] + place.right * k / count, point[1] + place.down * k / count) for k in range(1, count)]


def _distance(box: Rect, point: Point) -> float:
    return math.hypot(
        max(box[0] - point[0], 0.0, point[0] - box[2]),
        max(box[1] - point[1], 0.0, point[1] - box[3]),
    )


def _is_within(box: Rect, point: Point) -> bool:
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]


def _covered_area(box: Rect, others: Sequence[Rect]) -> float:
    total = 0.0
    for o in others:
        total += max(0.0, min(box[2], o[2]) - max(box[0], o[0])) * max(0.0, min(box[3], o[3]) - max(box[1], o[1]))
    return total
