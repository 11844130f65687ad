"""A good assignment within a budget, from few ways to run a copy: the incumbent with which a search begins.

At the price of memory at which a plan that fits and a plan that does not fit cost the same, plans between the two often cost the
same too: some copies run as in the one, the others as in the other. Solutions at a price do not show these plans, since each
takes one of the ends. So the ways in which copies ran in known solutions are collected, and the best way of each variant
between their states. The points of these few ways are put together as in `copy_points`, from a sample of the points of each
part. This is quick, and it proves nothing.

Example: 32 copies run in 3 s with 4 GB each, or in 5 s with 1 GB. At 2/3 s per GB, both ways cost 5.67. Within 120 GB, the
solutions at prices find 32 fast copies (128 GB, too much) and 32 small ones (160 s). The mixture of 29 fast copies and 3 small
ones holds 119 GB and takes 102 s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from planner_core.cost import NUM_COMPONENTS, Component, Floats, Ints
from planner_core.search.algebra.bucket_tree import group_points
from planner_core.search.algebra.distinct import sorted_distinct
from planner_core.search.algebra.elimination import Table
from planner_core.search.algebra.pareto_points import FormingPoints, PointAllowance, Points, TooManyPoints
from planner_core.search.budget.gap_closing import enumerate_points
from planner_core.search.budget.goal import Goal
from planner_core.search.folded_solver import FoldedTables, with_objective
from planner_core.search.network.search_cache import Assignment, Copy
from planner_core.search.objective import EVEN_SHARES, TIE
from planner_core.search.repeated_block import Chain
from planner_core.search.units.unit import UnitCost, View

MAX_ENTRIES = 16
"""Entries of a view at which the best copy of each variant is added."""
SAMPLE_SIZE = 12
"""Points of each group in the sample."""
MAX_POINTS = 100_000
"""Points that may be formed."""


class KnownCopyPoints:
    """The points of one copy in shared state `s` among a few known ways to run it; a `CopyPoints`, as `copy_points.AllCopyPoints` is."""

    def __init__(
        self, known_copies: Mapping[str, Sequence[Copy]], chain: Chain, goal: Goal, s: int, margin: Floats
    ) -> None:
        unit, view = chain.unit, chain.view(s)
        bound = unit.bound(view)
        used_entries = dict(_known_entries(known_copies[chain.run.block], unit, view, bound.shape))
        entry_by_copy = used_entries | dict(
            _best_copies(unit, view, margin, goal.limit, _crossed_entries(set(used_entries.values()), bound.shape))
        )
        self.known_copies = list(entry_by_copy)
        entry = np.array(list(entry_by_copy.values()), dtype=np.int64)
        totals = np.array([c.totals for c in self.known_copies]).reshape(len(entry), NUM_COMPONENTS)
        cost = np.column_stack([goal.objective.seconds(totals), totals[:, list(goal.ends)]])
        forming = FormingPoints(entry, cost, cost @ goal.prices - bound.ravel()[entry], [np.arange(len(entry))])
        forming = forming.select(forming.excess + margin.ravel()[entry] <= goal.limit)
        forming = forming.select(np.argsort(forming.row, kind="stable"))
        self.points: Points
        self.points, self.forming = group_points(forming, forming.row, bound.size, goal.pruning)

    def copy(self, point: int) -> Copy:
        """Return how the copy runs in one point."""
        return self.known_copies[int(self.forming.parts[0][point])]


def mix_solutions(
    folded: FoldedTables, best: Assignment, budget: float, solutions: Sequence[Assignment]
) -> Assignment | None:
    """Return an assignment within `budget` bytes per GPU that is better than `best`, or None if none was found.

    `folded` is under an objective with prices of memory; `solutions` are solutions at other prices.
    """
    # Copies known from solutions at different prices are put together. This proves nothing, but a mix may use what memory is left.
    objective, ends = folded.objective, (Component.AFTER_FORWARD, Component.AFTER_BACKWARD)
    # By identity: in one solution, one object stands for all copies that run alike.
    copies: dict[str, dict[int, Copy]] = {}
    calls = list(folded.problem.coarse.graph.calls())
    for a in (best, *solutions):
        for call, c in zip(calls, a.copies, strict=True):
            copies.setdefault(call.block, {})[id(c)] = c
    # A mixture that fits and beats `best` costs less than this, in seconds plus memory at its price (see `gap_closing`).
    limit = best.seconds * (1 - TIE / 2) + (objective.after_forward + objective.after_backward) * budget
    # Sums are compared in steps of 1 kB, and of 0.01 B where a gap is closed: nothing is proven here, and fewer points remain.
    goal = Goal(
        objective, ends, limit, np.array([best.seconds * TIE, 1e3, 1e3]), SAMPLE_SIZE, points=PointAllowance(MAX_POINTS)
    )
    try:
        make_copy_points = partial(KnownCopyPoints, {block: list(by_id.values()) for block, by_id in copies.items()})
        points = enumerate_points(folded, goal, make_copy_points, _forbid_unknown_states(folded, [best, *solutions]))
    except TooManyPoints:
        return None
    if points is None or not (within := np.flatnonzero((points.cost[:, 1:] <= budget).all(axis=1))).size:
        return None
    best = points.assignment(int(within[points.cost[within, 0].argmin()]))
    copies_by_run = [
        [
            copy
            for of_state in run.copy_points()
            if isinstance(of_state, KnownCopyPoints)
            for copy in of_state.known_copies
        ]
        for run in points.copies
    ]
    return best if folded.problem.uniform else use_free_memory(folded, best, copies_by_run, budget)


def _forbid_unknown_states(folded: FoldedTables, solutions: Sequence[Assignment]) -> list[Table]:
    """Tables that forbid the states of top variables which no known solution has."""
    alive = folded.problem.top.alive
    tables: list[Table] = []
    for v in folded.problem.top.sizes:
        table = np.full(len(alive[v]), np.inf)
        table[np.searchsorted(alive[v], [a.top[v] for a in solutions])] = 0.0
        if len(table) > 1:
            tables.append(((v,), table))
    return tables


def use_free_memory(
    folded: FoldedTables, a: Assignment, copies_by_run: Sequence[Sequence[Copy]], budget: float
) -> Assignment:
    """Exchange copies for faster ones of `copies_by_run` between the same states, as long as the budget allows it.

    The exchange that takes least memory for each second that it saves comes first.
    """
    objective, ends = folded.objective, [Component.AFTER_FORWARD, Component.AFTER_BACKWARD]
    copies, totals, first_call = list(a.copies), a.totals.copy(), 0
    for run, candidates in zip(folded.runs, copies_by_run, strict=True):
        calls = range(first_call, first_call + run.count)
        first_call += run.count
        swaps = []
        for old in {id(copies[i]): copies[i] for i in calls}.values():
            for new in (w for w in candidates if all(w.states[v] == old.states[v] for v in run.compiled.boundary)):
                gain = float(objective.seconds(old.totals) - objective.seconds(new.totals))
                if gain > 0:
                    swaps.append((float((new.totals - old.totals)[ends].max()) / gain, old, new))
        for _, old, new in sorted(swaps, key=lambda swap: swap[0]):
            for i in calls:
                # Totals are checked exchange by exchange: one may fit for three copies of a run and not for the fourth.
                changed = totals + new.totals - old.totals
                if copies[i] is old and max(changed[ends]) <= budget:
                    copies[i], totals = new, changed
    return with_objective(replace(a, copies=copies, totals=totals, peak_bytes=None), objective)


def _known_entries(
    copies: Sequence[Copy], unit: UnitCost, view: View, shape: tuple[int, ...]
) -> Iterator[tuple[Copy, int]]:
    """Yield the known copies whose states are in this view, each with its entry."""
    alive = unit.first_variant.alive
    for copy in copies:
        if any(alive[v][s] != copy.states[v] for v, s in view.fixed):
            continue
        entry = [int(np.searchsorted(alive[v], copy.states[v])) for v in view.free]
        if all(p < len(alive[v]) and alive[v][p] == copy.states[v] for v, p in zip(view.free, entry, strict=True)):
            yield copy, int(np.ravel_multi_index(entry, shape)) if entry else 0


def _crossed_entries(entries: set[int], shape: tuple[int, ...]) -> Ints:
    """Return the entries that lead from a state in which one of `entries` begins to one in which another ends."""
    sorted_entries = np.array(sorted(entries), dtype=np.int64)  # none where no known copy stands in this shared state
    if len(shape) != 2:
        return sorted_entries
    first, last = map(sorted_distinct, np.unravel_index(sorted_entries, shape))
    return np.ravel_multi_index(np.ix_(first, last), shape).ravel()


def _best_copies(unit: UnitCost, view: View, margin: Floats, limit: float, entries: Ints) -> Iterator[tuple[Copy, int]]:
    """Yield the best copy of each variant at those `entries` of a view that may be within the limit, each with its entry."""
    bound = unit.bound(view)
    rest = (margin - np.where(np.isfinite(bound), bound, 0.0)).ravel()[entries]
    for variant in unit.variants:
        within = unit.by_variant[variant, view].ravel()[entries] + rest <= limit
        shares = unit.shares.get(variant, [EVEN_SHARES])[-1]
        for entry in map(int, entries[within][:MAX_ENTRIES]):
            states = tuple(map(int, np.unravel_index(entry, bound.shape)))
            yield unit.best_copy(variant, shares, view, states), entry
