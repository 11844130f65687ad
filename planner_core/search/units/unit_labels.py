"""The least true cost of one unit among all assignments within a limit, by labels (see `algebra.pareto_labels`).

The step's time of a unit is a maximum of sums. A label carries each of these sums, so that the true cost of a whole
assignment can be told at the end; on the way a label is dropped where another is no worse in every sum, or where even its
weighted sum exceeds the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner_core.cost import NUM_COMPONENTS, Component, Shares
from planner_core.search.algebra.bucket_tree import BucketTree
from planner_core.search.algebra.elimination import Floats, Table, given
from planner_core.search.algebra.pareto_labels import Allowance, Pruning
from planner_core.search.network.folded import Compiled
from planner_core.search.objective import TIE, Objective
from planner_core.search.units.tables import scalar, vectors

MOST_LABELS = 8_000
"""Labels of one unit held at once."""
WORK = 200_000
"""Labels that may be formed to settle one entry."""
ALL_WORK = 400_000
"""Labels that may be formed to solve one model on one mesh under one objective."""


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
) -> dict[str, int] | None:  # fmt: skip
    """The assignment of least true cost below `limit` with some variables given `at`; None where there is none.

    `others` are tables of seconds that are added, of other units. States are numbered as in `compiled.alive`. Raises TooMuch,
    also where the `work` that is left does not allow it.
    """
    how = TimeSums(objective)
    free = {v: n for v, n in compiled.sizes.items() if v not in at}
    tables = [*scalar(compiled.factors, objective.weights(shares)), *others]
    tree = BucketTree(free, given(tables, at), sequence, ())
    tree.weigh()
    if not float(tree.root) < limit * (1 - TIE / 10):
        return None
    steps = np.full(len(how.places), limit * TIE * 1e-3)
    here = Allowance(min(WORK, work.left))
    pruning = Pruning(limit * (1 - TIE / 10), steps, MOST_LABELS, work=here)
    rows = [*vectors(compiled.factors, how.sums), *(_added(table, len(how.places)) for table in others)]
    before = here.left
    try:
        labels = tree.carry(given(rows, at), [], pruning)
    finally:
        work.left -= before - max(here.left, 0)
    if not len(labels.cost):
        return None
    costs = how.cost(labels.cost)
    best = int(costs.argmin())
    if costs[best] >= limit:
        return None
    states, _ = tree.assignment(best)
    return dict.fromkeys(compiled.sizes, 0) | dict(at) | states


def _added(table: Table, rows: int) -> Table:
    """A table of seconds as rows: all of it in the last, which is added."""
    names, seconds = table
    found = np.zeros((rows, *seconds.shape))
    found[-1] = np.where(np.isfinite(seconds), seconds, 0.0)  # an impossible entry is never asked for
    return names, found
