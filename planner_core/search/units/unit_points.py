"""The least true cost of one unit among all assignments within a limit, by points (see `algebra.pareto_points`).

The time of a unit is a maximum of sums. A point carries each of these sums, so the true cost of a whole assignment is known
at its end. On the way a point is dropped if another point is no worse in every sum, or if its weighted sum exceeds the limit.

Example: a unit's time is max(A + 0.1 B, B). A point is a pair (A, B). Two operators have the points {(6, 1), (4, 5)} and
{(4, 3), (3, 7)}. Together they have (10, 4), (9, 8), (8, 8) and (7, 12). (9, 8) is dominated by (8, 8). The true costs of the
others are 10.4, 8.8 and 12: the least is 8.8, although (7, 12) has the least A and (10, 4) has the least B.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner_core.cost import NUM_COMPONENTS, Component, Floats, Shares
from planner_core.search.algebra.bucket_tree import WeightedBounds
from planner_core.search.algebra.elimination import Table
from planner_core.search.algebra.pareto_points import PointAllowance, Pruning, TablesTooLarge, TooManyPoints
from planner_core.search.network.folded import CompiledNetwork
from planner_core.search.objective import TIE, Objective
from planner_core.search.units.pruned_unit import PrunedUnit, WeightedSums, prune_by_limit
from planner_core.search.units.tables import sum_tables

MAX_LIVE_POINTS = 8_000
"""Points of one unit that are in memory at once."""
MAX_ENTRY_POINTS = 200_000
"""Points that may be formed to settle one entry."""
POINTS_PER_ENUMERATION = 5_000
"""Points that are formed in the time in which the tables of one enumeration are made. Each enumeration takes them from the allowance.
Otherwise a long series of enumerations of few points would not end."""

MAX_FIRST_POINTS = 5_000
"""Points that may be formed in a first attempt at the whole gap."""
FIRST_SHARE, WIDENING = 16, 2
"""If that is too much, first 1/FIRST_SHARE of the gap is enumerated; each next part is WIDENING times as wide."""
SHARE_GRID = (0.0, 0.5, 1.0)
"""Points are also bounded by the weighted sums at these shares of one maximum."""


@dataclass(frozen=True, slots=True)
class TimeSums:
    """The sums from which a unit's cost follows. There is one *row* per side of a maximum, and one row for all that is added.

    With one micro-batch, the traffic of every micro-batch and the traffic once a step are one sum. If the objective is a plain
    sum, one row holds everything. `priced`: memory at its prices is added too.
    """

    objective: Objective
    priced: bool = True

    @property
    def row_components(self) -> tuple[Component, ...]:
        """The component that each row stands for. The last row is STEP: seconds that are added once a step."""
        c = Component
        if self.objective.is_sum:
            return (c.STEP,)
        once = (c.FORWARD_ONCE, c.BACKWARD_ONCE) if self.objective.step_time.accumulate > 1 else ()
        return (c.FORWARD, c.FORWARD_TRAFFIC, c.BACKWARD, c.BACKWARD_TRAFFIC, *once, c.STEP)

    @property
    def sums(self) -> Floats:
        """[row, component]: the weights of each row's sum. The last row holds all that is added, also memory at its prices."""
        plain = (self.objective if self.priced else self.objective.with_prices(0.0, 0.0)).weights()
        if self.objective.is_sum:
            return plain[None, :]
        rows = np.zeros((len(self.row_components), NUM_COMPONENTS))
        rows[np.arange(len(rows)), self.row_components] = 1.0
        if self.objective.step_time.accumulate == 1:
            # With one micro-batch, what comes once a step comes once a micro-batch: it joins the traffic of its direction.
            rows[1, Component.FORWARD_ONCE] = rows[3, Component.BACKWARD_ONCE] = 1.0
        added = [Component.STEP, Component.COMMUNICATION, Component.AFTER_FORWARD, Component.AFTER_BACKWARD]
        rows[-1, added] = plain[added]
        return rows

    def prices(self, shares: Shares) -> Floats:
        """[row]: the prices at which the rows add up to the objective's weighted sum at `shares`."""
        weights = self.objective.weights(shares)
        return np.array([*(weights[component] for component in self.row_components[:-1]), 1.0])

    def cost(self, rows: Floats) -> Floats:
        """Return the true cost of assignments whose sums are `rows` [..., row]."""
        if self.objective.is_sum:
            return rows[..., 0]
        totals = np.zeros((*rows.shape[:-1], NUM_COMPONENTS))
        totals[..., list(self.row_components)] = rows
        return self.objective.step_time.seconds(totals)


def least_by_points(
    compiled: CompiledNetwork,
    sequence: Sequence[str],
    fixed: Mapping[str, int],
    objective: Objective,
    shares: Shares,
    limit: float,
    allowance: PointAllowance,
    other_tables: Sequence[Table] = (),
) -> tuple[dict[str, int] | None, float]:
    """Return the assignment of least true cost below `limit`, with the variables in `fixed` fixed; and a lower bound on that cost.

    The assignment is None if none was found. The bound is then `limit` if none exists, or less if the `allowance` ran out. If an
    assignment was found, the bound is its cost. `other_tables` are tables of seconds of other units, which are added. States are
    numbered as in `compiled`.
    """
    # Taken before any point is formed, so that enumerations which form none still end (see POINTS_PER_ENUMERATION).
    allowance.remaining -= POINTS_PER_ENUMERATION
    sums, below = TimeSums(objective), limit * (1 - TIE / 10)
    unit = PrunedUnit.from_network(compiled, sequence, fixed, other_tables)
    tree = unit.bucket_tree(objective, shares)
    # The root is a lower bound: if it is not below the limit, nothing else has to be made.
    if not (root := float(tree.root)) < below:
        return None, limit
    bounds: WeightedBounds | None = None
    with contextlib.suppress(TablesTooLarge):
        unit, bounds = prune_by_limit(unit, tree, sums_around(shares, sums), below)
        if unit.is_empty:
            return None, limit
        tree = unit.bucket_tree(objective, shares)
    # Sums that differ by a thousandth of a tie are equal, so rounding does not keep points alive.
    steps = np.full(len(sums.row_components), limit * TIE * 1e-3)
    rows = [*sum_tables(unit.factors, sums.sums), *(_as_rows(t, len(steps)) for t in unit.other_tables)]

    def within(limit_of_part: float, points_left: PointAllowance) -> tuple[dict[str, int], float] | None:
        points = tree.enumerate_points(
            rows, [], Pruning(limit_of_part, steps, MAX_LIVE_POINTS, points=points_left), bounds
        )
        costs = sums.cost(points.cost)
        # A point has a weighted sum within the limit, but its true cost may be above. Then a cheaper one may lie beyond the limit.
        if not len(costs) or costs.min() > limit_of_part:
            return None
        return unit.full_states(tree.assignment(int(costs.argmin()))[0]), float(costs.min())

    # Most gaps are small enough to be enumerated at once. Only if one is not, the limit is raised step by step, from the bound on.
    with contextlib.suppress(TooManyPoints):
        return within(below, PointAllowance(MAX_FIRST_POINTS)) or (None, limit)
    bound = root
    with contextlib.suppress(TooManyPoints), allowance.portion(MAX_ENTRY_POINTS) as portion:
        for limit_of_part in _rising_limits(root, below):
            solution = within(limit_of_part, portion)
            if solution is not None:
                return solution
            # All assignments up to this limit were enumerated without a solution, so each one costs more.
            bound = limit_of_part
        return None, limit
    return None, bound


def _rising_limits(bound: float, limit: float) -> Iterator[float]:
    """Rising limits from `bound` to `limit`. Few points lie near the bound. An assignment whose cost is within such a limit is the
    least, since all assignments up to that limit were looked at."""
    width = (limit - bound) / FIRST_SHARE
    while bound < limit:
        bound = limit if bound + width >= limit else bound + width
        yield bound
        width *= WIDENING


def _as_rows(table: Table, rows: int) -> Table:
    """Return a table of seconds as rows: the last row, which is added, holds all of it."""
    names, seconds = table
    row_table = np.zeros((rows, *seconds.shape))
    row_table[-1] = np.where(np.isfinite(seconds), seconds, 0.0)  # impossible entries are never looked up
    return names, row_table


def sums_around(shares: Shares, time_sums: TimeSums, added_prices: Sequence[float] = ()) -> WeightedSums:
    """Return the weighted sums at shares that differ in one maximum, at the values of SHARE_GRID. `added_prices`: the prices
    of further rows."""
    single = time_sums.objective.step_time.accumulate == 1
    dims = [name for name in Shares._fields if name.endswith("edge") or not single]
    all_shares = list(dict.fromkeys(shares._replace(**{dim: share}) for dim in dims for share in SHARE_GRID))
    return WeightedSums.from_shares(
        time_sums.objective, all_shares, [np.array([*time_sums.prices(s), *added_prices]) for s in all_shares]
    )
