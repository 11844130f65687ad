"""The results of searches of one problem, and a cache of them.

A problem is searched again and again: for other budgets of memory, for a proof, for a plan with another restriction on time. Each search
begins with what those before it found. Nothing here changes which plan is best, only how long it takes to find it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from planner_core.core import BlockPlan
from planner_core.cost import Floats
from planner_core.search.algebra.pareto_points import MAX_UNIT_POINTS, PointAllowance
from planner_core.search.objective import TIE, Objective


@dataclass(eq=False, frozen=True, slots=True)
class Copy:
    """How one copy of a block runs: its variant, the state of every variable (in the numbering of its network), and its cost
    `totals` [component]."""

    variant: str
    states: Mapping[str, int]
    totals: Floats


@dataclass
class Assignment:
    """The state of every variable: `top` (in the numbering of the top network), and one `Copy` per call, in order of the calls.

    `totals` [component] is the sum over all units, `top_totals` [component] that of the top block. `seconds` is the objective's
    value: the sum of `Objective.seconds` over units. `step_time_s` is the step's time. The priced cost of every assignment is
    at least `bound`. `peak_bytes`: bytes per GPU at the simulated peak of memory, by kind, if they were asked for (`budget.memory_fit`).
    """

    top: dict[str, int]
    copies: list[Copy]
    top_totals: Floats
    totals: Floats
    step_time_s: float
    seconds: float
    bound: float = 0.0
    peak_bytes: dict[str, int] | None = None


@dataclass
class Answer:
    """The best known assignment, its value, and a lower bound on the value of every assignment.

    If nothing fits, `assignment` is None and `smallest` is the assignment of least memory. `solves` counts solutions of the
    folded network.
    """

    assignment: Assignment | None
    value: float
    bound: float
    least_memory: float
    solves: int = 0
    smallest: Assignment | None = None
    prices: tuple[float, float] = (0.0, 0.0)
    """The prices of memory that gave the bound: seconds per byte at the end of forward and at the end of backward."""

    @property
    def optimal(self) -> bool:
        """Whether the bound proves that no assignment is better."""
        return self.assignment is not None and self.value <= self.bound * (1 + TIE)

    @property
    def gap(self) -> float:
        """Relative distance between the value and the bound: (value - bound) / bound."""
        return 0.0 if self.optimal else (self.value - self.bound) / max(self.bound, 1e-30)


@dataclass(frozen=True, slots=True)
class SumMatch:
    """The budget of the network's sum of memory that meets a budget of simulated memory, found without a proof.

    `answer` is the best there, from a search that gave up above `abandoned_above` seconds. No plan that fits is below `bound`, and
    `least_within_sum` is the least value of an assignment whose sum is within the GPU's budget, of any peak.
    """

    answer: Answer
    sum_budget: float
    bound: float
    least_within_sum: float
    abandoned_above: float


class SearchTables(Protocol):
    """The tables of a search (`FoldedTables`), which another search of the problem continues with."""

    objective: Objective

    def make_exact(self, objective: Objective) -> None:
        """Change to the same objective, but exact."""

    def best_assignment(self, abandon_above: float) -> Assignment | None:
        """Return the assignment of least priced cost, or the first one whose bound is above `abandon_above`."""


@dataclass
class SearchCache:
    """What is known of one problem: by objective, or by the kind of one and a budget of memory in bytes per GPU."""

    exact: dict[Objective, Assignment | None] = field(default_factory=dict)
    """The best assignments, by objective."""
    inexact_tables: dict[Objective, SearchTables] = field(default_factory=dict)
    """The tables of searches that were not exact, by objective. An exact search of the same objective continues with them."""
    pruned: dict[Objective, Assignment] = field(default_factory=dict)
    """The last assignment of searches that ended early, since another problem has a better plan; by objective."""
    infeasible: dict[tuple[str, float], Answer] = field(default_factory=dict)
    """The answers of searches within a budget that ended above what was asked for."""
    sum_matches: dict[tuple[str, float], SumMatch] = field(default_factory=dict)
    plans: dict[tuple[str, str, frozenset[tuple[str, int]]], BlockPlan] = field(default_factory=dict)
    """Finished block plans, by block, variant and states (see `extract_plan`)."""
    walks: dict[Any, Any] = field(default_factory=dict)
    """Simulated memory of copies of repeated blocks (see `cost.memory.block_memories`)."""
    last_tables: SearchTables | None = None
    """The tables of the last search."""
    unit_points: PointAllowance = field(default_factory=lambda: PointAllowance(MAX_UNIT_POINTS))
    """The points that may be formed to make costs of units exact while memory has prices. All prices share them: each has entries of its
    own. The gap that they leave is closed after the last price, or it is reported (see `lagrangian`)."""
