"""The least true cost of one unit among all assignments within a limit, by labels (see `algebra.pareto_labels`).

The step's time of a unit is a maximum of sums. A label carries each of these sums, so that the true cost of a whole
assignment can be told at the end; on the way a label is dropped where another is no worse in every sum, or where even its
weighted sum exceeds the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner_core.cost import NUM_COMPONENTS, Component, Shares
from planner_core.search.algebra.bucket_tree import BucketTree
from planner_core.search.algebra.elimination import Floats, Table, given
from planner_core.search.algebra.pareto_labels import Allowance, Pruning, TooMuch
from planner_core.search.network.folded import Compiled
from planner_core.search.objective import TIE, Objective
from planner_core.search.units.tables import scalar, vectors

MOST_LABELS = 8_000
"""Labels of one unit held at once."""
WORK = 200_000
"""Labels that may be formed to settle one entry."""
ALL_WORK = 400_000
"""Labels that may be formed to solve one model on one mesh under one objective."""

NARROW, WIDER = 16, 2
"""The part of the gap that is looked through first, and how much wider each next one is."""
GRID = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of one maximum at which labels are bounded."""


@dataclass(frozen=True, slots=True)
class TimeSums:
    """The sums that tell a unit's cost: one row per side of a maximum, and one for everything that is added.

    With one micro-batch the traffic of every micro-batch and that of once a step are one sum. Where the step's time only
    breaks ties, one row holds all. `priced`: memory at its prices is added too.
    """

    objective: Objective
    priced: bool = True

    @property
    def places(self) -> tuple[Component, ...]:
        """The component that each row stands for; the rest stands for seconds once a step."""
        c = Component
        if self.objective.is_sum:
            return (c.STEP,)
        once = (c.FORWARD_ONCE, c.BACKWARD_ONCE) if self.objective.step_time.accumulate > 1 else ()
        return (c.FORWARD, c.FORWARD_TRAFFIC, c.BACKWARD, c.BACKWARD_TRAFFIC, *once, c.STEP)

    @property
    def sums(self) -> Floats:
        """[row, component]; the last row holds everything that is added, memory at its prices included."""
        plain = (self.objective if self.priced else self.objective.priced(0.0, 0.0)).weights()
        if self.objective.is_sum:
            return plain[None, :]
        rows = np.zeros((len(self.places), NUM_COMPONENTS))
        rows[np.arange(len(rows)), self.places] = 1.0
        if self.objective.step_time.accumulate == 1:
            rows[1, Component.FORWARD_ONCE] = rows[3, Component.BACKWARD_ONCE] = 1.0
        added = [Component.STEP, Component.COMMUNICATION, Component.AFTER_FORWARD, Component.AFTER_BACKWARD]
        rows[-1, added] = plain[added]
        return rows

    def prices(self, shares: Shares) -> Floats:
        """[row] prices at which the rows add up to the objective's weighted sum at `shares`."""
        weights = self.objective.weights(shares)
        return np.array([*(weights[place] for place in self.places[:-1]), 1.0])

    def cost(self, rows: Floats) -> Floats:
        """The true cost of assignments whose sums are `rows` [..., row]."""
        if self.objective.is_sum:
            return rows[..., 0]
        totals = np.zeros((*rows.shape[:-1], NUM_COMPONENTS))
        totals[..., list(self.places)] = rows
        return self.objective.step_time.seconds(totals)


def least_by_labels(
    compiled: Compiled, sequence: Sequence[str], at: Mapping[str, int], objective: Objective, shares: Shares, limit: float,
    work: Allowance, others: Sequence[Table] = (),
) -> tuple[dict[str, int] | None, float]:  # fmt: skip
    """The assignment of least true cost below `limit` with some variables given `at`, None where none was found; and a bound that
    nothing is below: the least itself where it was found, `limit` where there is nothing below it, less where the `work` that is
    left does not allow more.

    `others` are tables of seconds that are added, of other units. States are numbered as in `compiled.alive`.
    """
    how = TimeSums(objective)
    free = {v: n for v, n in compiled.sizes.items() if v not in at}
    tree = _weighed(compiled, sequence, free, at, objective, shares, others)
    if not float(tree.root) < limit * (1 - TIE / 10):
        return None, limit
    bounds = [
        (how.prices(other), _weighed(compiled, sequence, free, at, objective, other, others))
        for other in _around(shares, how)
    ]
    steps = np.full(len(how.places), limit * TIE * 1e-3)
    rows = given([*vectors(compiled.factors, how.sums), *(_added(table, len(how.places)) for table in others)], at)
    here = Allowance(min(WORK, work.left))
    before = here.left
    bound = float(tree.root)
    try:
        for most in _widening(float(tree.root), limit * (1 - TIE / 10)):
            labels = tree.carry(rows, [], Pruning(most, steps, MOST_LABELS, work=here), bounds)
            costs = how.cost(labels.cost)
            if len(costs) and costs.min() <= most:
                states, _ = tree.assignment(int(costs.argmin()))
                return dict.fromkeys(compiled.sizes, 0) | dict(at) | states, float(costs.min())
            bound = most
    except TooMuch:
        return None, bound
    finally:
        work.left -= before - max(here.left, 0)
    return None, limit


def _widening(bound: float, limit: float) -> Iterator[float]:
    """Limits to look through one after the other, the last of them `limit`: few labels lie near the bound, and what is found
    there is the least."""
    width = (limit - bound) / NARROW
    while bound < limit:
        bound = limit if bound + width >= limit else bound + width
        yield bound
        width *= WIDER


def _added(table: Table, rows: int) -> Table:
    """A table of seconds as rows: all of it in the last, which is added."""
    names, seconds = table
    found = np.zeros((rows, *seconds.shape))
    found[-1] = np.where(np.isfinite(seconds), seconds, 0.0)  # an impossible entry is never asked for
    return names, found


def _around(shares: Shares, how: TimeSums) -> list[Shares]:
    """Shares that differ from those given in one maximum."""
    single = how.objective.step_time.accumulate == 1
    dims = [name for name in Shares._fields if name.endswith("edge") or not single]
    return list(dict.fromkeys(shares._replace(**{dim: share}) for dim in dims for share in GRID))


def _weighed(
    compiled: Compiled, sequence: Sequence[str], free: Mapping[str, int], at: Mapping[str, int], objective: Objective,
    shares: Shares, others: Sequence[Table],
) -> BucketTree:  # fmt: skip
    """The network of the free variables with its maxima weighted at `shares`."""
    tree = BucketTree(free, given([*scalar(compiled.factors, objective.weights(shares)), *others], at), sequence, ())
    tree.weigh()
    return tree
