"""How the choice of a plan changes with bandwidth, batch and GPU count: a map of regions, and where one ends.

    sweep        the kind of the best plan at each point of a grid of two quantities
    changes      neighbours of the grid that differ
    crossover    between two neighbours that differ, the value at which the choice changes, by bisection

Along one quantity the kind of the best plan is taken to change once between two neighbours of the grid; a kind that
appears and goes between them is not seen. What counts as one kind is the caller's to say; `mesh_kind` takes the mesh alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from planner_core.errors import PlannerError
from planner_core.plan import Plan

CLOSE = 0.04
"""A crossover is known when the values on its two sides differ by less than this share."""

@dataclass(frozen=True, slots=True)
class Axis:
    """One quantity of the map: its name, its values upward, and the step between values that it may take (0: any)."""

    name: str
    values: tuple[float, ...]
    step: float = 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    """The best plan at one point: what kind it is, its step time and memory; kind None where nothing can be planned or fits."""

    x: float
    y: float
    kind: Hashable | None
    step_time_s: float = math.inf
    memory_bytes: int = 0


Look = Callable[[float, float], Cell]
"""The cell at (x, y)."""


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
    return Cell(x, y, kind(plan), plan.cost.step_time_s, plan.cost.memory_bytes["peak"])


def sweep(x: Axis, y: Axis, look: Look) -> Iterator[Cell]:
    """Every cell of the grid, row by row, as it is found: whoever draws may stop at any of them."""
    for b in y.values:
        for a in x.values:
            yield look(a, b)


def changes(cells: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Neighbours in a row of the map whose kinds differ."""
    rows: dict[float, list[Cell]] = {}
    for c in cells:
        rows.setdefault(c.y, []).append(c)
    return [pair for row in rows.values() for pair in itertools.pairwise(row) if pair[0].kind != pair[1].kind]


def crossover(left: Cell, right: Cell, step: float, look: Look) -> Crossover:
    """Where between two cells of one row the kind changes. Halves the ratio until it is below CLOSE; where x has a step,
    until no value is left between."""
    low, high = left, right
    while (middle := _between(low.x, high.x, step)) is not None:
        found = look(middle, left.y)
        if found.kind == low.kind:
            low = found
        else:
            high = found
    return Crossover(left.y, low.x, high.x, low.kind, high.kind)


def _between(low: float, high: float, step: float) -> float | None:
    """The next value to look at, or None where the two sides are close enough."""
    middle = math.sqrt(low * high)
    if not step:
        return None if high <= low * (1 + CLOSE) else middle
    middle = round(middle / step) * step
    if middle <= low:
        middle = low + step
    return middle if low < middle < high else None
