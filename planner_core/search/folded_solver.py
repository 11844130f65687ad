"""Solve the folded network of a whole model: make each run of equal blocks a table over the top network's variables
(`repeated_block`), eliminate the top network, and go back to the state of every variable.

All tables hold lower bounds. The loop is:

1. Find the best assignment under the bounds.
2. Make exact what it uses: compute the shared states that it uses, and settle the entries that it uses.
3. If a bound rose, go to 1. Otherwise the assignment costs as much as its bounds, and every other one costs at least its own bound,
   which is not lower. So it is the optimum.

Example: entries with the bounds 5, 6 and 9, whose true costs are 8, 7 and 9. The first is the best under the bounds; settled,
it stands at 8. Now the second is the best; settled, it stands at 7. It is the best again, so 7 is the optimum. The true cost of
the third was never needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner_core.cost import NUM_COMPONENTS, Component, Floats, Shares
from planner_core.search.algebra.bucket_tree import BucketTree
from planner_core.search.algebra.elimination import Table
from planner_core.search.algebra.pareto_points import PointAllowance, TooManyPoints
from planner_core.search.network.folded import Problem
from planner_core.search.network.search_cache import Assignment, Copy, SearchCache, SearchTables
from planner_core.search.objective import EVEN_SHARES, TIE, Objective
from planner_core.search.repeated_block import Chain
from planner_core.search.units.dual_shares import best_shares
from planner_core.search.units.reduction import ReducedVariant, eliminate_all, eliminate_inside
from planner_core.search.units.tables import weighted_tables
from planner_core.search.units.unit import UnitCost, VariantSolver, sum_factors
from planner_core.search.units.unit_points import least_by_points

MAX_TOP_SHARES = 6
"""Shares of the top block's own maxima that are tried."""
MAX_SETTLED_IN_VAIN = 2
"""Times that entries are settled at shares whose bound stays below a known one."""

TIGHTEN_ROUND, BATCH_ROUNDS = 2, (10, 40, 160)
"""After round TIGHTEN_ROUND the bounds of shared states are raised. After the rounds BATCH_ROUNDS all shared states that may be in the best
assignment are computed at once, which costs as much as a few rounds."""


def solve_folded(problem: Problem, objective: Objective, abandon_above: float = float("inf")) -> Assignment | None:
    """Return the assignment of least priced cost, or None if no assignment is possible.

    The problem's cache stores it, since searches for other budgets ask for the same objective again. `abandon_above`: the search stops
    as soon as the `bound` is above this value. The assignment is then not the best one.
    """
    cache = problem.cache
    pruned = cache.pruned.get(objective)
    if pruned is not None and pruned.bound > abandon_above:
        return pruned
    if objective not in cache.exact:
        tables = cache.last_tables = None if problem.is_infeasible else _tables_for(problem, objective)
        assignment = tables.best_assignment(abandon_above) if tables else None
        if tables is not None and assignment is not None and assignment.bound > abandon_above:
            cache.pruned[objective] = assignment
            if objective.exact and not (objective.after_forward or objective.after_backward):
                cache.inexact_tables[objective] = tables  # a later search goes on from there
            return assignment
        cache.exact[objective] = assignment
    return cache.exact[objective]


@dataclass(frozen=True, slots=True)
class RunTable:
    """A run of equal copies on a mesh of one axis, as the search sees it.

    `states` are the placements of the residual stream and of its gradient. `log10_states` is log10 of the number of joint states of one
    copy. `copy_seconds` and `run_seconds` [entry, exit] are the least weighted times of one copy and of all `copies`, in seconds. They
    are infinite for an impossible pair of states.
    """

    block: str
    copies: int
    states: tuple[str, ...]
    log10_states: float
    copy_seconds: Floats
    run_seconds: Floats


def run_tables(problem: Problem) -> list[RunTable]:
    """Return the tables of the runs that pass nothing on but the residual stream, with equal shares for the sides of each maximum."""
    folded = FoldedTables(problem, Objective("time", problem.model.step_time, fixed_shares=EVEN_SHARES))
    result = []
    for run in (r for r in folded.runs if r.count > 1 and not r.boundary.shared):
        stream = run.compiled.net.tensors[run.boundary.entry]
        pairs = [stream.axis_states[i] for i in stream.index[run.states][:, -1]]
        log10_states = float(np.log10(list(run.compiled.sizes.values())).sum())
        names = tuple(f"{forward}|{gradient}" for forward, gradient in pairs)
        result.append(RunTable(run.run.block, run.count, names, log10_states, run.copy_matrix(0), run.cost[0]))
    return result


def least_copy_costs(problem: Problem, weights: Floats) -> dict[str, float]:
    """Return by block the least cost of one copy at `weights` [component], whatever the units around it pass on."""
    least_by_block = {}
    for name, variants in problem.blocks.items():
        together = eliminate_inside([*variants.values()], weights)
        solvers = (VariantSolver(c, ReducedVariant(together, k)) for k, c in enumerate(variants.values()))
        least_by_block[name] = min(float(solver.eliminate_except((), {}).table) for solver in solvers)
    return least_by_block


def least_costs_at_ends(problem: Problem, weights: Floats) -> tuple[float, float]:
    """Return the least costs, at `weights` [component], of the operators before the first copy and of the operators behind the last.

    Each group of operators runs in its cheapest way, whatever it is given and has to give."""
    top = problem.coarse.graph.top
    calls = top.call_positions
    before, behind = 0.0, 0.0
    for factor in problem.top.factors:
        if len(factor.vars) == 1 and (node := problem.top.net.nodes.get(factor.vars[0])) is not None:
            least, items = float((factor.costs.weighted(weights) + factor.barrier).min()), node.strategy.group.items
            if max(items) < calls[0]:
                before += least
            elif min(items) > calls[-1]:
                behind += least
    return before, behind


def tables_at(problem: Problem, objective: Objective) -> FoldedTables:
    """Return the folded network under an objective: that of the last solution if it had this objective."""
    last = problem.cache.last_tables
    return last if isinstance(last, FoldedTables) and last.objective == objective else FoldedTables(problem, objective)


def _tables_for(problem: Problem, objective: Objective) -> SearchTables:
    """Return the folded network under an objective. An exact search without prices continues with the tables of a rough one."""
    if not objective.exact:
        tables = FoldedTables(problem, objective)
        if not (objective.after_forward or objective.after_backward):
            problem.cache.inexact_tables[replace(objective, exact=True)] = tables
        return tables
    inexact_tables = problem.cache.inexact_tables.pop(objective, None)
    if inexact_tables is None:
        return FoldedTables(problem, objective)
    inexact_tables.make_exact(objective)
    return inexact_tables


class FoldedTables:
    """A folded network under an objective: the tables of its runs (`runs`), and those of the top block (`top_tables`)."""

    def __init__(self, problem: Problem, objective: Objective) -> None:
        # The problem's cache holds tables. Were the cache held by them in turn, they would stay until a collection of cycles, and a search
        # of many problems would take half as much memory again.
        self.problem, self.objective = replace(problem, cache=SearchCache()), objective
        priced = bool(objective.after_forward or objective.after_backward)
        self.points = problem.cache.unit_points if priced else PointAllowance(problem.max_unit_points)
        self.units = {n: UnitCost(variants, objective, points=self.points) for n, variants in problem.blocks.items()}
        self.runs: list[Chain] = []
        first_of_kind: dict[tuple[object, ...], Chain] = {}
        for run in problem.runs:
            # Runs of one kind differ only in the top variables that they touch, so they share their bounds (see `Chain`).
            kind = run.block, len(run.calls), run.chain_in, run.chain_out
            self.runs.append(Chain(self.problem, run, self.units[run.block], first_of_kind.get(kind)))
            first_of_kind.setdefault(kind, self.runs[-1])
        self.shares: Shares = objective.top_shares or EVEN_SHARES
        self.top_tables = weighted_tables(problem.top.factors, objective.weights(self.shares))
        self._tree: tuple[int, BucketTree] | None = None

    def make_exact(self, objective: Objective) -> None:
        """Change to the same `objective`, but exact. Entries whose bound was left open are forgotten, and the work is as at first."""
        self.objective = objective
        self.points.remaining = self.problem.max_unit_points
        for unit in self.units.values():
            unit.objective = objective
            unit.settled = {
                entry: settled
                for entry, settled in unit.settled.items()
                if settled.cost <= settled.bound * (1 + TIE / 10)
            }

    @property
    def tables(self) -> list[Table]:
        """All tables over the top variables. They hold lower bounds."""
        return [*self.top_tables, *self.run_tables]

    @property
    def run_tables(self) -> list[Table]:
        """The table of each run over the top variables. Runs whose tables are equal share one array."""
        arrays: dict[tuple[object, ...], Floats] = {}
        for r in self.runs:
            if r.table_key not in arrays:
                arrays[r.table_key] = r.top_table()[1]
        return [(r.top_scope, arrays[r.table_key]) for r in self.runs]

    def weighed_tree(self, extra_tables: Sequence[Table] = ()) -> BucketTree:
        """Return the top network as a weighed bucket tree, with `extra_tables` tables over top variables. Raises TablesTooLarge."""
        # Bounds change only when a shared state is computed or tightened, or an entry is settled. So the sum of these counts is a version.
        version = sum(len(r.powers) + r.bounds.is_tight for r in self.runs) + sum(
            u.num_settlings for u in self.units.values()
        )
        if not extra_tables and self._tree is not None and self._tree[0] == version:
            return self._tree[1]
        tree = BucketTree(self.problem.top.sizes, [*self.tables, *extra_tables], self.problem.top.sequence, ())
        tree.compute_margins()
        if not extra_tables:
            self._tree = version, tree  # valid until a bound changes
        return tree

    def best_assignment(self, abandon_above: float = float("inf")) -> Assignment | None:
        """Return the assignment of least priced cost (see the head of the file), or the first one whose bound is above `abandon_above`."""
        best: Assignment | None = None
        totals: list[Floats] = []
        bound = -np.inf
        for _ in range(MAX_TOP_SHARES):
            solution = self._solve_at_shares(abandon_above, bound)
            if solution is None:
                return None
            states, least = solution
            # Every choice of shares gives a lower bound, so the highest one holds. Costs are compared as they are, at no shares.
            bound = max(bound, least)
            assignment = self._make_assignment(states)
            if best is None or self._priced_value(assignment) < self._priced_value(best):
                best = assignment
            bound = min(bound, self._priced_value(best))
            done = (
                self.objective.is_sum or self.objective.top_shares or self._priced_value(best) <= bound * (1 + TIE / 10)
            )
            if done or bound > abandon_above:
                break
            totals.append(assignment.top_totals)
            next_shares = best_shares(self.objective, totals, self.shares)
            if next_shares == self.shares:
                break
            self.shares = next_shares
            self.top_tables = weighted_tables(self.problem.top.factors, self.objective.weights(next_shares))
        assert best is not None
        if self.objective.exact and not (self.objective.is_sum or self.objective.top_shares) and bound <= abandon_above:
            best, bound = self._close_top_gap(best, bound)
        best.bound = bound
        return best

    def _close_top_gap(self, best: Assignment, bound: float) -> tuple[Assignment, float]:
        """Close the gap that no shares of the top block's own maxima close: enumerate all assignments between bound and best."""
        top = self.problem.top
        while self._priced_value(best) > bound * (1 + TIE / 10) and self.points.remaining >= 0:
            runs = self.run_tables
            states, least = least_by_points(
                top, top.sequence, {}, self.objective, self.shares, self._priced_value(best), self.points, runs
            )
            bound = max(bound, min(least, self._priced_value(best)))
            if states is None:
                return best, bound
            # The runs' tables are bounds themselves. If one was not exact where this assignment uses it, look again with the exact one.
            if sum(r.compute_used_state(states) for r in self.runs) or self._settle_used_entries(states, np.inf):
                continue
            assignment = self._make_assignment(states)
            if self._priced_value(assignment) >= self._priced_value(best) * (1 - TIE / 10):
                return best, bound
            best = assignment
        return best, bound

    def _solve_at_shares(self, abandon_above: float, known_bound: float) -> tuple[dict[str, int], float] | None:
        """Return the best states of the top variables at the present shares, with every copy that they use exact; and a lower bound.

        Shares whose bound is below `known_bound` only help to find better shares. Any states are enough for that, so few
        copies are made exact for them.
        """
        top = self.problem.top
        rounds = settled = 0
        while True:
            result = eliminate_all(top, self.tables)
            if not np.isfinite(result.table):
                return None
            states = result.assignment({})
            num_computed = sum(r.compute_used_state(states) for r in self.runs)
            if num_computed:
                rounds += 1
                if rounds == TIGHTEN_ROUND:
                    for r in self.runs:
                        r.tighten_bounds()
                elif rounds in BATCH_ROUNDS:
                    self._compute_promising_states(states)
                continue
            least = float(result.table)
            is_in_vain = least < known_bound and settled >= MAX_SETTLED_IN_VAIN
            if (
                least > abandon_above
                or is_in_vain
                or not self._settle_used_entries(states, abandon_above * (1 + TIE) - least)
            ):
                return states, least
            settled += 1

    def _settle_used_entries(self, states: Mapping[str, int], room: float) -> bool:
        """Settle the entries that the states of the top variables use, until their cost rose by `room`. Returns whether it rose at all."""
        raised = 0.0
        for run in self.runs:
            if raised < room:
                raised += run.settle_used_entries(states, room - raised)
        return raised > 0

    def _compute_promising_states(self, assignment: Mapping[str, int]) -> None:
        """Compute all shared states together through which something as good as `assignment` may lead."""
        try:
            tree = self.weighed_tree()
        except TooManyPoints:  # then they are computed one by one
            return
        value = sum(float(t[tuple(assignment[v] for v in names)]) for names, t in self.tables)
        for r in self.runs:
            r.compute_promising_states(tree, value)

    def _make_assignment(self, states: Mapping[str, int]) -> Assignment:
        # Runs are in the order of the model's calls, so their copies are too (`Assignment.copies`).
        copies = [copy for run in self.runs for copy in run.copies(states)]
        return make_assignment(self.problem, self.objective, self.runs, states, copies)

    def _priced_value(self, a: Assignment) -> float:
        return priced_value(self.objective, a)


def priced_value(objective: Objective, a: Assignment) -> float:
    """Return the value of an assignment plus its memory at the objective's prices."""
    weights = objective.weights()
    memory = [Component.AFTER_FORWARD, Component.AFTER_BACKWARD]
    return a.seconds + float(weights[memory] @ a.totals[memory])


def make_assignment(
    problem: Problem, objective: Objective, runs: Iterable[Chain], top: Mapping[str, int], copies: list[Copy]
) -> Assignment:
    """Return the assignment of these states, with its totals. `top` is in the numbering of the states that are alive."""
    top_states = {v: int(problem.top.alive[v][s]) for v, s in top.items()}
    top_totals = sum_factors(problem.top.net.factors, top_states)
    totals = top_totals + sum(count * copy.totals for copy, count in Counter(copies).items())
    position = 0
    for run in runs:
        run_copies = copies[position : position + run.count]
        position += run.count
        if run.count > 1:  # the memory of the tensors between two copies
            totals[Component.AFTER_FORWARD] += sum(
                count * run.between_bytes[np.searchsorted(run.states, copy.states[run.boundary.exit])]
                for copy, count in Counter(run_copies[:-1]).items()
            )
    return with_objective(Assignment(top_states, copies, top_totals, totals, 0.0, 0.0), objective)


def with_objective(a: Assignment, objective: Objective) -> Assignment:
    """Return the same assignment, with its value under another objective."""
    units = [(1, a.top_totals), *((count, copy.totals) for copy, count in Counter(a.copies).items())]
    step_time = sum(n * float(objective.step_time.seconds(totals)) for n, totals in units)
    return replace(a, step_time_s=step_time, seconds=sum(n * float(objective.seconds(totals)) for n, totals in units))


def total_of_copies(problem: Problem, a: Assignment, name: str) -> Floats:
    """[component]: the part of an assignment's totals that all copies of one block add."""
    copies = [c for call, c in zip(problem.coarse.graph.calls(), a.copies, strict=True) if call.block == name]
    zero = np.zeros(NUM_COMPONENTS)
    return sum((n * copy.totals for copy, n in Counter(copies).items()), start=zero)
