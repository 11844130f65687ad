"""How the choice of a plan changes with bandwidth, batch and number of GPUs: a map of regions, and where a region ends.

    sweep        the kind of the best plan at each point of a grid of two quantities
    changes      neighbours of the grid whose kinds differ
    crossover    the value between two such neighbours at which the choice changes; both sides of it are searched

Faster links never make the best plan slower. Let a plan be best at two values of the links' speed. At a point between them it is
priced, and takes at most SAME longer than the best plan at the faster end. Then it is within SAME of the best plan at that
point. Such a cell is inferred and not searched, and it says so.

The kind of the best plan is taken to change at most once between two neighbours of the grid. A kind that appears only between them
is not seen. The caller says what a kind is; `mesh_kind` takes the mesh alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner_core.core import Plan, PlannerError

CLOSE = 0.04
"""A crossover is found when the values on its two sides differ by less than this share."""
SAME = 0.01
"""A plan within this share of the best counts as equally good. It is well below the error of the estimate."""
GUESSES = 4
"""Attempts to find a crossover where two plans cost the same, before the range is halved instead."""
UNKNOWN = "not found in time"
"""The kind of a point at which the search took too long."""


@dataclass(frozen=True, slots=True)
class MapAxis:
    """One quantity of the map: its name, its rising values, the step between allowed values (0: any value is allowed), and whether it
    is the speed of links."""

    name: str
    values: tuple[float, ...]
    step: float = 0.0
    links: bool = False


@dataclass(frozen=True, slots=True)
class RegionCell:
    """The best plan at one point: its kind, step time and memory. The kind is None if no plan runs or fits.

    If it is not `searched`, it is a plan within SAME of the best, inferred from the neighbours. `proven`: whether the search proved
    that no plan is better.
    """

    x: float
    y: float
    kind: Hashable | None
    step_time_s: float = math.inf
    memory_bytes: int = 0
    proven: bool = False
    searched: bool = True


Look = Callable[[float, float], RegionCell]
"""Searches the cell at (x, y)."""
Reprice = Callable[[RegionCell, float, float], float]
"""Gives the seconds of the plan of a searched cell at another point (x, y), where only the speed of links differs."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """At `y` the best plan is of kind `below` up to `low` and of kind `above` from `high` on."""

    y: float
    low: float
    high: float
    below: Hashable | None
    above: Hashable | None

    @property
    def value(self) -> float:
        """The value at which the choice changes: the middle between `low` and `high`."""
        return math.sqrt(self.low * self.high)


def mesh_kind(plan: Plan) -> Hashable:
    """The sizes of the mesh's axes."""
    return plan.mesh.axis_sizes


def search_cell(
    x: float, y: float, find: Callable[[], Plan], kind: Callable[[Plan], Hashable] = mesh_kind
) -> RegionCell:
    """The cell of the plan that `find` returns. Its kind is None if `find` raises PlannerError or the plan does not fit."""
    try:
        plan = find()
    except PlannerError:
        return RegionCell(x, y, None)
    if not plan.fits:
        return RegionCell(x, y, None)
    return RegionCell(x, y, kind(plan), plan.cost.step_time_s, plan.cost.memory_bytes["peak"], plan.optimal)


def sweep_map(x: MapAxis, y: MapAxis, look: Look, priced: Reprice | None = None) -> Iterator[RegionCell]:
    """Yield every cell of the grid when it is found; the caller may stop after any. With `priced`, cells along an axis that is the
    speed of links may be inferred."""
    if priced and x.links:
        for b in y.values:
            yield from _cells_of_line([(a, b) for a in x.values], look, priced)
    elif priced and y.links:
        for a in x.values:
            yield from _cells_of_line([(a, b) for b in y.values], look, priced)
    else:
        for b in y.values:
            yield from (look(a, b) for a in x.values)


def _cells_of_line(points: Sequence[tuple[float, float]], look: Look, priced: Reprice) -> Iterator[RegionCell]:
    """The cells at points along which the links become faster: first the ends, then the points between them."""
    ends = [look(*p) for p in (points[0], points[-1])]
    yield from ends
    yield from _fill_between(list(points[1:-1]), ends[0], ends[1], look, priced)


def _fill_between(
    points: list[tuple[float, float]], low: RegionCell, high: RegionCell, look: Look, priced: Reprice
) -> Iterator[RegionCell]:
    """The cells between two searched ones, the fastest links first. A cell is inferred if that is possible, else searched."""
    while points:
        known = _infer_cell(points[-1], low, high, priced)
        if known is None:
            break
        yield known
        points.pop()
    if not points:
        return
    # if the kinds differ, the border is anywhere between, so halve; else the next point is the one to search
    at = (len(points) - 1) // 2 if low.kind != high.kind else len(points) - 1
    found = look(*points[at])
    yield found
    yield from _fill_between(points[:at], low, found, look, priced)
    yield from _fill_between(points[at + 1 :], found, high, look, priced)


def _infer_cell(point: tuple[float, float], low: RegionCell, high: RegionCell, priced: Reprice) -> RegionCell | None:
    """The cell at a point between two searched ones, without a search; None if it needs a search."""
    if low.kind is None and high.kind is None:  # what fits does not depend on links
        return RegionCell(*point, None, searched=False)
    if low.kind != high.kind or not high.proven:
        return None
    seconds, plan = min((priced(c, *point), c.memory_bytes) for c in (low, high))
    if seconds > high.step_time_s * (1 + SAME):
        return None
    return replace(high, x=point[0], y=point[1], step_time_s=seconds, memory_bytes=plan, proven=False, searched=False)


def kind_changes(cells: Sequence[RegionCell]) -> list[tuple[RegionCell, RegionCell]]:
    """Neighbours in a row of the map whose kinds are known and differ."""
    rows: dict[float, list[RegionCell]] = {}
    for c in sorted(cells, key=lambda c: (c.y, c.x)):
        rows.setdefault(c.y, []).append(c)
    pairs = [pair for row in rows.values() for pair in itertools.pairwise(row)]
    return [(a, b) for a, b in pairs if a.kind != b.kind and UNKNOWN not in (a.kind, b.kind)]


def find_crossover(
    left: RegionCell, right: RegionCell, step: float, look: Look, priced: Reprice | None = None
) -> Crossover:
    """Find where the kind changes between two cells of one row, to within CLOSE, or to within the `step` of x.

    With `priced` (x is the speed of links), first search on both sides of the point at which the two plans take equally long. If it
    is not there, or without `priced`, halve the range. Both sides of the result were searched.
    """
    low, high = left, right
    guesses = GUESSES if priced else 0
    while (middle := _midpoint(low.x, high.x, step)) is not None:
        if guesses and priced and (alike := _equal_time_at(low, high, priced)) is not None:
            middle = _next_near(alike, low.x, high.x)
        guesses -= guesses > 0
        found = look(middle, left.y)
        if found.kind == low.kind:
            low = found
        else:
            high = found
    return Crossover(left.y, low.x, high.x, low.kind, high.kind)


def _equal_time_at(low: RegionCell, high: RegionCell, priced: Reprice) -> float | None:
    """The value of x at which the plans of two cells take equally long; None if one is slower everywhere between them."""

    def slower(x: float) -> bool:
        return priced(low, x, low.y) > priced(high, x, low.y)

    a, b = low.x, high.x
    if slower(a) or not slower(b):
        return None
    while b > a * (1 + CLOSE / 4):
        middle = math.sqrt(a * b)
        a, b = (a, middle) if slower(middle) else (middle, b)
    return math.sqrt(a * b)


def _next_near(alike: float, low: float, high: float) -> float:
    """The next point to search if the change is expected at `alike`: just below it. If one side is near it already, the point that is
    just close enough to that side."""
    near = 1 + CLOSE * 0.999
    if low * near > alike:
        return low * near
    return high / near if high / near < alike else alike / math.sqrt(near)


def _midpoint(low: float, high: float, step: float) -> float | None:
    """The next value to search, or None if the two sides are close enough."""
    middle = math.sqrt(low * high)
    if not step:
        return None if high <= low * (1 + CLOSE) else middle
    middle = round(middle / step) * step
    if middle <= low:
        middle = low + step
    return middle if low < middle < high else None
