"""What the points within a budget count (see `copy_points` and `algebra.pareto_points`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner_core.cost import NUM_COMPONENTS, Component, Floats
from planner_core.search.algebra.elimination import Table
from planner_core.search.algebra.pareto_points import MAX_POINTS, PointAllowance, Points, Pruning
from planner_core.search.network.factors import Factor
from planner_core.search.objective import Objective
from planner_core.search.units.tables import sum_tables
from planner_core.search.units.unit_points import TimeSums

MAX_POINTS_AT_FIRST = 20_000
"""Points that are held at once in the first attempt at the whole gap."""


@dataclass(frozen=True)
class Goal:
    """What points count: the value of `objective` without memory, and memory at the `ends` of the step.

    Inside a unit a point holds *rows*: the sums of `TimeSums`, then memory at each end. A point of whole units holds *sums*: the
    value, then memory at each end. The weighted cost is the value plus memory at the objective's prices. It may be at most
    `limit`. Sums are rounded to multiples of `steps` [sum] when they are compared.
    """

    objective: Objective
    ends: tuple[Component, ...]
    limit: float
    steps: Floats
    sample_size: int = 0
    """If > 0, only a sample is enumerated: this number of points of each group, and a quarter of this number of shared states."""
    gives_up_early: bool = False
    """Whether to give up early."""
    points: PointAllowance = field(default_factory=PointAllowance)

    @property
    def time_sums(self) -> TimeSums:
        """The rows from which the value of a unit follows."""
        return TimeSums(self.objective, priced=False)

    @property
    def prices(self) -> Floats:
        """[sum]: the price of one second of value (1), and of one byte at each end."""
        by_end = {
            Component.AFTER_FORWARD: self.objective.after_forward,
            Component.AFTER_BACKWARD: self.objective.after_backward,
        }
        return np.array([1.0, *(by_end[end] for end in self.ends)])

    @property
    def pruning(self) -> Pruning:
        """The pruning of points of whole units."""
        return Pruning(
            self.limit,
            self.steps,
            MAX_POINTS_AT_FIRST if self.gives_up_early else MAX_POINTS,
            self.sample_size,
            self.points,
        )

    @property
    def row_pruning(self) -> Pruning:
        """The pruning of points inside a unit."""
        seconds = np.full(len(self.time_sums.row_components), self.steps[0])
        return replace(self.pruning, steps=np.concatenate([seconds, self.steps[1:]]), sampled_sum=len(seconds))

    def row_tables(self, factors: Sequence[Factor]) -> list[Table]:
        """Tables [row, entry of their variables]: the rows of each factor."""
        memory = np.zeros((len(self.ends), NUM_COMPONENTS))
        memory[np.arange(len(self.ends)), list(self.ends)] = 1.0
        return sum_tables(factors, np.concatenate([self.time_sums.sums, memory]))

    def sums_of_rows(self, rows: Floats) -> Floats:
        """[point, sum]: the sums of points whose rows are `row_tables` [point, row]."""
        count = len(self.time_sums.row_components)
        return np.column_stack([self.time_sums.cost(rows[:, :count]), rows[:, count:]])

    def as_rows(self, points: Points) -> Points:
        """Points of whole units as points with rows, for the top unit: the value is put in the row of `TimeSums` that is added."""
        rows = np.zeros((len(points.cost), len(self.time_sums.row_components) + len(self.ends)))
        rows[:, len(self.time_sums.row_components) - 1 :] = points.cost
        return replace(points, cost=rows)
