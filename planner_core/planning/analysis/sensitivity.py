"""How the choice of a plan changes with bandwidth, batch and GPU count: a map of regions, and where one ends.

    sweep        the kind of the best plan at each point of a grid of two quantities
    changes      neighbours of the grid that differ
    crossover    between two neighbours that differ, the value at which the choice changes, both sides of it searched

Faster links never make the best plan slower. So where links grow faster, a plan that is best at both ends and, priced
between them, takes at most SAME longer than the best at the faster end is within SAME of the best there: such a cell is
not searched but inferred, and says so.

Along one quantity the kind of the best plan is taken to change once between two neighbours of the grid; a kind that
appears and goes between them is not seen. What counts as one kind is the caller's to say; `mesh_kind` takes the mesh alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner_core.core import Plan, PlannerError

CLOSE = 0.04
"""A crossover is known when the values on its two sides differ by less than this share."""
SAME = 0.01
"""A plan within this share of the best is as good; well below the estimate's error."""
GUESSES = 4
"""How often a crossover is looked for where two plans are priced alike, before the range is halved."""
UNKNOWN = "not found in time"
"""The kind of a point at which the search was given up."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One quantity of the map: its name, its values upward, the step between values that it may take (0: any), and whether it
    is the speed of links."""

    name: str
    values: tuple[float, ...]
    step: float = 0.0
    links: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """The best plan at one point: what kind it is, its step time and memory; kind None where nothing can be planned or fits.
    Not `searched`: a plan within SAME of the best, inferred from its neighbours. `proven`: a search's own word."""

    x: float
    y: float
    kind: Hashable | None
    step_time_s: float = math.inf
    memory_bytes: int = 0
    proven: bool = False
    searched: bool = True


Look = Callable[[float, float], Cell]
"""The cell at (x, y), searched."""
Priced = Callable[[Cell, float, float], float]
"""Seconds that the plan of a searched cell takes at (x, y), a point that differs in the speed of links only."""


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
        """Where the choice changes: the middle of what is not known."""
        return math.sqrt(self.low * self.high)


def mesh_kind(plan: Plan) -> Hashable:
    """The sizes of the mesh's axes."""
    return plan.mesh.axis_sizes


def cell(x: float, y: float, find: Callable[[], Plan], kind: Callable[[Plan], Hashable] = mesh_kind) -> Cell:
    """The cell of the plan that `find` gives; of kind None where it raises PlannerError or the plan does not fit."""
    try:
        plan = find()
    except PlannerError:
        return Cell(x, y, None)
    if not plan.fits:
        return Cell(x, y, None)
    return Cell(x, y, kind(plan), plan.cost.step_time_s, plan.cost.memory_bytes["peak"], plan.optimal)


def sweep(x: Axis, y: Axis, look: Look, priced: Priced | None = None) -> Iterator[Cell]:
    """Every cell of the grid as it is found: whoever draws may stop at any of them. With `priced`, cells are inferred along an
    axis of links."""
    if priced and x.links:
        for b in y.values:
            yield from _line([(a, b) for a in x.values], look, priced)
    elif priced and y.links:
        for a in x.values:
            yield from _line([(a, b) for b in y.values], look, priced)
    else:
        for b in y.values:
            yield from (look(a, b) for a in x.values)


def _line(points: Sequence[tuple[float, float]], look: Look, priced: Priced) -> Iterator[Cell]:
    """The cells at points along which links grow faster: the ends first, then what lies between."""
    ends = [look(*p) for p in (points[0], points[-1])]
    yield from ends
    yield from _between_ends(list(points[1:-1]), ends[0], ends[1], look, priced)


def _between_ends(
    points: list[tuple[float, float]], low: Cell, high: Cell, look: Look, priced: Priced
) -> Iterator[Cell]:
    """Cells between two searched ones, the fastest links first: inferred as long as that can be said, else searched."""
    while points:
        known = _inferred(points[-1], low, high, priced)
        if known is None:
            break
        yield known
        points.pop()
    if not points:
        return
    # where kinds differ the border is somewhere between; else it is the next point that wants a search
    at = (len(points) - 1) // 2 if low.kind != high.kind else len(points) - 1
    found = look(*points[at])
    yield found
    yield from _between_ends(points[:at], low, found, look, priced)
    yield from _between_ends(points[at + 1 :], found, high, look, priced)


def _inferred(point: tuple[float, float], low: Cell, high: Cell, priced: Priced) -> Cell | None:
    """The cell at a point between two searched ones without a search; None where it wants one."""
    if low.kind is None and high.kind is None:  # what fits does not depend on links
        return Cell(*point, None, searched=False)
    if low.kind != high.kind or not high.proven:
        return None
    seconds, plan = min((priced(c, *point), c.memory_bytes) for c in (low, high))
    if seconds > high.step_time_s * (1 + SAME):
        return None
    return replace(high, x=point[0], y=point[1], step_time_s=seconds, memory_bytes=plan, proven=False, searched=False)


def changes(cells: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Neighbours in a row of the map whose kinds differ, and are known."""
    rows: dict[float, list[Cell]] = {}
    for c in sorted(cells, key=lambda c: (c.y, c.x)):
        rows.setdefault(c.y, []).append(c)
    pairs = [pair for row in rows.values() for pair in itertools.pairwise(row)]
    return [(a, b) for a, b in pairs if a.kind != b.kind and UNKNOWN not in (a.kind, b.kind)]


def crossover(left: Cell, right: Cell, step: float, look: Look, priced: Priced | None = None) -> Crossover:
    """Where between two cells of one row the kind changes, to within CLOSE, or where x has a step to within that. With `priced`
    (x is the speed of links) it is looked for first on both sides of where their plans take equally long; else, and where
    that is not it, the ratio is halved. What is told was searched on both sides."""
    low, high = left, right
    guesses = GUESSES if priced else 0
    while (middle := _between(low.x, high.x, step)) is not None:
        if guesses and priced and (alike := _alike(low, high, priced)) is not None:
            middle = _beside(alike, low.x, high.x)
        guesses -= guesses > 0
        found = look(middle, left.y)
        if found.kind == low.kind:
            low = found
        else:
            high = found
    return Crossover(left.y, low.x, high.x, low.kind, high.kind)


def _alike(low: Cell, high: Cell, priced: Priced) -> float | None:
    """The value of x at which the plans of two cells take equally long; None where one is slower throughout."""

    def slower(x: float) -> bool:
        return priced(low, x, low.y) > priced(high, x, low.y)

    a, b = low.x, high.x
    if slower(a) or not slower(b):
        return None
    while b > a * (1 + CLOSE / 4):
        middle = math.sqrt(a * b)
        a, b = (a, middle) if slower(middle) else (middle, b)
    return math.sqrt(a * b)


def _beside(alike: float, low: float, high: float) -> float:
    """The point to look at where a change is expected at `alike`: just below it, or, if one side is near already, as far from
    that side as is close."""
    near = 1 + CLOSE * 0.999
    if low * near > alike:
        return low * near
    return high / near if high / near < alike else alike / math.sqrt(near)


def _between(low: float, high: float, step: float) -> float | None:
    """The next value to look at, or None where the two sides are close enough."""
    middle = math.sqrt(low * high)
    if not step:
        return None if high <= low * (1 + CLOSE) else middle
    middle = round(middle / step) * step
    if middle <= low:
        middle = low + step
    return middle if low < middle < high else None
