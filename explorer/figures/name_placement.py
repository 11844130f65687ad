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
# 18 pixels a step: a name of 16, and two between it and the next.
STEPS = tuple(sign * 18.0 * k for k in range(8) for sign in (-1, 1))[1:]

ROUNDS = 2
"""Times that each name takes its place: in the second it knows where the later ones lie."""
CROSSING = 300.0
"""Two leaders that cross are as bad as a way of so many pixels: a reader takes each for the other."""

Rect = tuple[float, float, float, float]
Point = tuple[float, float]
Line = tuple[Point, Point]


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
    def distance(self) -> float:
        """Pixels from the point to the name, and one for its left side."""
        return math.hypot(self.right, self.down) + (self.right < 0)

    def line(self, point: Point) -> Line:
        """Return the leader from a point to its name."""
        return point, (point[0] + self.right, point[1] + self.down)

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
    for i in sorted(range(len(names)), key=lambda i: plots[0].points[i]) * ROUNDS:
        length = text_width(names[i], 12.5)
        beside = [Place(side * NAME_OFFSET, 0.0, leader=False) for side in (1, -1)]
        alone = [o for o in beside if all(d.is_alone(i, o, length) for d in drawings)]
        options = sorted((*alone, *steps), key=lambda o: o.distance)
        inside = [o for o in options if all(d.is_inside(i, o, length) for d in drawings)]
        # In the second round a name stays where it is unless another place costs less.
        least = sum(d.cost(i, places[i], length) for d in drawings) if i in drawings[0].names else math.inf
        for option in inside or options:
            if len(drawings) * option.distance >= least:
                break  # the way is a part of the cost, and grows from here
            cost = sum(d.cost(i, option, length) for d in drawings)
            if cost < least:
                least, places[i] = cost, option
        for d in drawings:
            d.put_name(i, places[i], length)
    return places


class _Drawing:
    """A plot, and the names and leaders that were placed in it."""

    def __init__(self, plot: Plot) -> None:
        self.plot = plot
        self.marks = [(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in plot.points]
        self.names: dict[int, Rect] = {}
        self.leaders: dict[int, tuple[Line, list[Point]]] = {}

    def is_inside(self, i: int, place: Place, length: float) -> bool:
        left, top, right, bottom = place.box(self.plot.points[i], length)
        return left >= 0 and right <= self.plot.width and top >= 0 and bottom <= self.plot.height

    def is_alone(self, i: int, place: Place, length: float) -> bool:
        """Tell if no other point could own a name here."""
        box = place.box(self.plot.points[i], length)
        return all(_distance(box, p) >= OWN_REACH for p in self._other_points(i))

    def cost(self, i: int, place: Place, length: float) -> float:
        """Return how bad a place is.

        Every pixel that is covered costs more than any way; then a leader that crosses another; then its way over what is not its own,
        and another point that the name almost touches; then the way to the name, and its left side.
        """
        point = self.plot.points[i]
        box = place.box(point, length)
        names = (rect for j, rect in self.names.items() if j != i)
        others = [*self.marks[:i], *self.marks[i + 1 :], *self.plot.drawn, *names]
        leaders = [leader for j, leader in self.leaders.items() if j != i]
        hidden = sum(_is_within(box, p) for _, points in leaders for p in points)
        cost = 100 * (_covered_area(box, others) + hidden) + place.distance
        if not place.leader:
            return cost
        own = place.line(point)
        path = _points_on(own)
        crossed = sum(_is_within(o, p) for o in others for p in path)
        near = sum(max(0.0, NAME_OFFSET - _distance(box, p)) for p in self._other_points(i))
        return cost + 8 * (2 * crossed + near) + CROSSING * sum(_do_cross(own, line) for line, _ in leaders)

    def put_name(self, i: int, place: Place, length: float) -> None:
        """Put the name of a point at a place, in exchange for the one before."""
        self.names[i] = place.box(self.plot.points[i], length)
        self.leaders.pop(i, None)
        if place.leader:
            line = place.line(self.plot.points[i])
            self.leaders[i] = line, _points_on(line)

    def _other_points(self, i: int) -> Iterator[Point]:
        return (p for j, p in enumerate(self.plot.points) if j != i)


def _points_on(line: Line) -> list[Point]:
    """Return points about four pixels apart on a leader."""
    (x, y), end = line
    right, down = end[0] - x, end[1] - y
    count = max(1, int(math.hypot(right, down) / 4))
    return [(x + right * k / count, y + down * k / count) for k in range(1, count)]


def _do_cross(one: Line, other: Line) -> bool:
    """Tell whether two leaders cross: the ends of each lie on both sides of the other."""
    return all(_side(a, b, c) * _side(a, b, d) < 0 for (a, b), (c, d) in ((one, other), (other, one)))


def _side(start: Point, end: Point, point: Point) -> float:
    """Return a number whose sign is the side of a line on which a point lies."""
    return (end[0] - start[0]) * (point[1] - start[1]) - (end[1] - start[1]) * (point[0] - start[0])


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
