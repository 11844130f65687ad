"""Solve the folded network of a whole model: make each run of equal blocks a table over the top network's variables
(`repeated_block`), eliminate the top network, and go back to the state of every variable.

All tables hold lower bounds. The loop is:

1. Find the best assignment under the bounds.
2. Make exact what it uses: compute the shared states that it uses, and settle the entries that it uses.
3. If a bound rose, go to 1. Else the assignment costs what the bounds say, and every other one costs at least its own bound,
   which is not lower. So it is the optimum.

Example: entries with the bounds 5, 6 and 9, whose true costs are 8, 7 and 9. The first is the best under the bounds; settled,
it stands at 8. Now the second is the best; settled, it stands at 7. It is the best again, so 7 is the optimum. The true cost of
the third was never needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner_core.cost import NUM_COMPONENTS, Component, Shares
from planner_core.search.algebra.bucket_tree import BucketTree
from planner_core.search.algebra.elimination import Floats, Table
from planner_core.search.algebra.pareto_points import PointBudget, TooManyPoints
from planner_core.search.network.folded import Problem
from planner_core.search.network.search_cache import Assignment, Copy
from planner_core.search.objective import EVEN_SHARES, TIE, Objective
from planner_core.search.repeated_block import Chain, between_bytes, boundary, chain_states
from planner_core.search.units.dual_shares import best_shares
from planner_core.search.units.reduction import eliminate_all
from planner_core.search.units.tables import weighted_tables
from planner_core.search.units.unit import UnitCost, sum_factors
from planner_core.search.units.unit_points import least_by_points

MAX_TOP_SHARES = 6
"""Shares of the top block's own maxima that are tried."""
MAX_SETTLED_IN_VAIN = 2
"""Times that entries are settled at shares whose bound stays below a known one."""

TIGHTEN_ROUND, BATCH_ROUNDS = 2, (10, 40, 160)
"""After round TIGHTEN the bounds of shared states are raised. After the rounds TOGETHER all shared states that may be in the best
assignment are computed at once, which costs as much as a few rounds."""


def solve_folded(problem: Problem, objective: Objective, abandon_above: float = float("inf")) -> Assignment | None:
    """The assignment of least priced cost, or None if no assignment is possible.

    The problem keeps it: searches for other budgets ask for the same objective again, and start from what was found.
    `abandon_above`: stop as soon as the `bound` is above this value. The assignment is then not the best one.
    """
    cache = problem.cache
    pruned = cache.pruned.get(objective)
    if pruned is not None and pruned.bound > abandon_above:
        return pruned
    if objective not in cache.exact:
        folded = cache.last = None if problem.impossible else _tables_for(problem, objective)
        found = folded.best(abandon_above) if folded else None
        if found is not None and found.bound > abandon_above:
            cache.pruned[objective] = found
            if objective.exact and not (objective.after_forward or objective.after_backward):
                cache.rough[objective] = folded  # a later search goes on from there
            return found
        cache.exact[objective] = found
    return cache.exact[objective]


@dataclass(frozen=True, slots=True)
class RunTable:
    """A run of equal copies on a mesh of one axis, as the search sees it. `states` are the placements of the residual stream and of
    its gradient, `ways` is log10 of the number of joint states of one copy, and `one` and `all` [entry, exit] are the least weighted
    times of one copy and of all `copies`, in s. A pair of states that cannot be is infinite."""

    block: str
    copies: int
    states: tuple[str, ...]
    ways: float
    one: Floats
    all: Floats


def run_tables(problem: Problem) -> list[RunTable]:
    """The tables of the runs that pass nothing on but the residual stream, with equal shares for the sides of each maximum."""
    folded = FoldedTables(problem, Objective("time", problem.model.step_time, fixed=EVEN_SHARES))
    found = []
    for run in (r for r in folded.runs if r.count > 1 and not r.axes.shared):
        stream = run.compiled.net.tensors[run.axes.entry]
        pairs = [stream.pairs[i] for i in stream.index[chain_states(run.axes, run.compiled)][:, -1]]
        ways = float(np.log10(list(run.compiled.sizes.values())).sum())
        names = tuple(f"{forward}|{gradient}" for forward, gradient in pairs)
        found.append(RunTable(run.run.block, run.count, names, ways, run.matrix(0), run.cost[0]))
    return found


def tables_at(problem: Problem, objective: Objective) -> FoldedTables:
    """The folded network under an objective: that of the last solution if it had this objective."""
    last = problem.cache.last
    return last if isinstance(last, FoldedTables) and last.objective == objective else FoldedTables(problem, objective)


def _tables_for(problem: Problem, objective: Objective) -> FoldedTables:
    """The folded network under an objective. An exact solution without prices goes on from what a quick solution found."""
    if not objective.exact:
        fresh = FoldedTables(problem, objective)
        if not (objective.after_forward or objective.after_backward):
            problem.cache.rough[replace(objective, exact=True)] = fresh
        return fresh
    known = problem.cache.rough.pop(objective, None)
    if not isinstance(known, FoldedTables):
        return FoldedTables(problem, objective)
    known.sharpen(objective)
    return known


class FoldedTables:
    """A folded network under an objective: the tables of its runs (`runs`), and those of the top block (`fixed`)."""

    def __init__(self, problem: Problem, objective: Objective) -> None:
        self.problem, self.objective = problem, objective
        priced = bool(objective.after_forward or objective.after_backward)
        self.work = problem.cache.at_prices if priced else PointBudget(problem.unit_work)
        self.units = {n: UnitCost(variants, objective, work=self.work) for n, variants in problem.blocks.items()}
        self.runs = [Chain(problem, run, self.units[run.block]) for run in problem.runs]
        self.shares: Shares = objective.top or EVEN_SHARES
        self.fixed = weighted_tables(problem.top.factors, objective.weights(self.shares))
        self._tree: tuple[int, BucketTree] | None = None

    def sharpen(self, objective: Objective) -> None:
        """Change to the same `objective`, but exact. Entries whose bound was left open are forgotten, and the work is as at first."""
        self.objective = objective
        self.work.left = self.problem.unit_work
        for unit in self.units.values():
            unit.objective = objective
            unit.settled = {at: f for at, f in unit.settled.items() if f.cost <= f.bound * (1 + TIE / 10)}

    @property
    def tables(self) -> list[Table]:
        """All tables over the top variables. They hold lower bounds."""
        return [*self.fixed, *(r.table() for r in self.runs)]

    def weighed(self, more: Sequence[Table] = ()) -> BucketTree:
        """The top network as a weighed bucket tree, with `more` tables over top variables. Raises TooLarge."""
        # Bounds change only when a shared state is computed or tightened, or an entry is settled. So these counts tell an old tree.
        known = sum(len(r.powers) + r.tight for r in self.runs) + sum(u.settlings for u in self.units.values())
        if not more and self._tree is not None and self._tree[0] == known:
            return self._tree[1]
        tree = BucketTree(self.problem.top.sizes, [*self.tables, *more], self.problem.top.sequence, ())
        tree.weigh()
        if not more:
            self._tree = known, tree  # it serves until bounds change
        return tree

    def best(self, abandon_above: float = float("inf")) -> Assignment | None:
        """The assignment of least priced cost (see the head of the file), or the first one whose bound is above `abandon_above`."""
        found: Assignment | None = None
        totals: list[Floats] = []
        bound = -np.inf
        for _ in range(MAX_TOP_SHARES):
            exact = self._exact_below(abandon_above, bound)
            if exact is None:
                return None
            states, least = exact
            # Every choice of shares gives a lower bound, so the highest one holds. Costs are compared as they are, at no shares.
            bound = max(bound, least)
            mine = self._assignment(states)
            if found is None or self._priced(mine) < self._priced(found):
                found = mine
            bound = min(bound, self._priced(found))
            done = self.objective.is_sum or self.objective.top or self._priced(found) <= bound * (1 + TIE / 10)
            if done or bound > abandon_above:
                break
            totals.append(mine.top_totals)
            following = best_shares(self.objective, totals, self.shares)
            if following == self.shares:
                break
            self.shares = following
            self.fixed = weighted_tables(self.problem.top.factors, self.objective.weights(following))
        assert found is not None
        if self.objective.exact and not (self.objective.is_sum or self.objective.top) and bound <= abandon_above:
            found, bound = self._close(found, bound)
        found.bound = bound
        return found

    def _close(self, found: Assignment, bound: float) -> tuple[Assignment, float]:
        """Close the gap that no shares of the top block's own maxima close: enumerate all assignments between bound and best."""
        top = self.problem.top
        while self._priced(found) > bound * (1 + TIE / 10) and self.work.left >= 0:
            runs = [r.table() for r in self.runs]
            states, least = least_by_points(
                top, top.sequence, {}, self.objective, self.shares, self._priced(found), self.work, runs
            )
            bound = max(bound, min(least, self._priced(found)))
            if states is None:
                return found, bound
            # The runs' tables are bounds themselves. If one was not exact where this assignment uses it, look again with the exact one.
            if sum(r.work_out(states) for r in self.runs) or self._settle(states, np.inf):
                continue
            mine = self._assignment(states)
            if self._priced(mine) >= self._priced(found) * (1 - TIE / 10):
                return found, bound
            found = mine
        return found, bound

    def _exact_below(self, abandon_above: float, known: float) -> tuple[dict[str, int], float] | None:
        """The best states of the top variables at the present shares, with every copy that they use exact; and a lower bound.

        Shares that give less than the bound that is `known` are only tried to find better ones. Any states serve that, so few
        copies are made exact for them.
        """
        top = self.problem.top
        rounds = settled = 0
        while True:
            result = eliminate_all(top, self.tables)
            if not np.isfinite(result.table):
                return None
            states = result.assignment({})
            fresh = sum(r.work_out(states) for r in self.runs)
            if fresh:
                rounds += 1
                if rounds == TIGHTEN_ROUND:
                    for r in self.runs:
                        r.tighten()
                elif rounds in BATCH_ROUNDS:
                    self._work_out_more(states)
                continue
            least = float(result.table)
            in_vain = least < known and settled >= MAX_SETTLED_IN_VAIN
            if least > abandon_above or in_vain or not self._settle(states, abandon_above * (1 + TIE) - least):
                return states, least
            settled += 1

    def _settle(self, states: Mapping[str, int], room: float) -> bool:
        """Settle what the states of the top variables use, until their cost rose by `room`. Returns whether it rose at all."""
        raised = 0.0
        for run in self.runs:
            if raised < room:
                raised += run.settle(states, room - raised)
        return raised > 0

    def _work_out_more(self, assignment: Mapping[str, int]) -> None:
        """Compute all shared states together through which something as good as `assignment` may lead."""
        try:
            tree = self.weighed()
        except TooManyPoints:  # then they are computed one by one
            return
        value = sum(float(t[tuple(assignment[v] for v in names)]) for names, t in self.tables)
        for r in self.runs:
            r.work_out_below(tree, value)

    def _assignment(self, states: Mapping[str, int]) -> Assignment:
        return make_assignment(self.problem, self.objective, states, [c for r in self.runs for c in r.copies(states)])

    def _priced(self, a: Assignment) -> float:
        return priced_value(self.objective, a)


def priced_value(objective: Objective, a: Assignment) -> float:
    """The value of an assignment plus its memory at the objective's prices."""
    weights = objective.weights()
    memory = [Component.AFTER_FORWARD, Component.AFTER_BACKWARD]
    return a.seconds + float(weights[memory] @ a.totals[memory])


def make_assignment(problem: Problem, objective: Objective, top: Mapping[str, int], copies: list[Copy]) -> Assignment:
    """The assignment of these states, with its totals. `top` is in the numbering of the states that are alive."""
    full = {v: int(problem.top.alive[v][s]) for v, s in top.items()}
    own = sum_factors(problem.top.net.factors, full)
    totals = own + sum(count * copy.totals for copy, count in Counter(copies).items())
    position = 0
    for run in problem.runs:
        mine = copies[position : position + len(run.calls)]
        position += len(run.calls)
        if len(mine) > 1:  # the memory of the tensors between two copies
            axes, kept = boundary(problem, run), between_bytes(problem, run)
            both = chain_states(axes, problem.compiled(run.block))
            totals[Component.AFTER_FORWARD] += sum(
                count * kept[np.searchsorted(both, copy.states[axes.exit])]
                for copy, count in Counter(mine[:-1]).items()
            )
    return with_objective(Assignment(full, copies, own, totals, 0.0, 0.0), objective)


def with_objective(a: Assignment, objective: Objective) -> Assignment:
    """The same assignment, with its value under another objective."""
    units = [(1, a.top_totals), *((count, copy.totals) for copy, count in Counter(a.copies).items())]
    step_time = sum(n * float(objective.step_time.seconds(totals)) for n, totals in units)
    return replace(a, step_time_s=step_time, seconds=sum(n * float(objective.seconds(totals)) for n, totals in units))


def total_of_copies(problem: Problem, a: Assignment, name: str) -> Floats:
    """[component]: the part of an assignment's totals that all copies of one block add."""
    mine = [c for call, c in zip(problem.coarse.graph.calls(), a.copies, strict=True) if call.block == name]
    zero = np.zeros(NUM_COMPONENTS)
    return sum((n * copy.totals for copy, n in Counter(mine).items()), start=zero)
