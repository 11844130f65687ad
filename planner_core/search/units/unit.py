"""The least cost of one copy of a block over its boundary: a lower bound, which is made exact where a plan would use it.

A block may run in several *variants* (ways of recomputation). Each variant is a network of its own over the same variables.
The step's time is not a sum (see `objective`), but at any shares of its maxima a weighted sum bounds it from below. One
elimination at these shares bounds all entries of the boundary at once:

    bound[entry] = max over the shares tried of  (elimination at these shares)[entry]  ≤  least true cost[entry]

Where the best plan would use an entry, `settle` finds the least true cost there. It tries other shares first. Then it
enumerates, by points, all assignments between the bound and the best assignment known. A plan that is optimal under the bounds
and uses only settled entries is optimal.

Example (docs/SEARCH.md, section 5): three ways p, q, r to run a copy take 10.4, 12 and 9.9 ms. At u = 1 the bound is 9.2 (q's
weighted sum), at u = 0.87 it is 9.56. The incumbent is p. The ways whose weighted sum is between 9.56 and 10.4 are enumerated:
r is found, and the entry is settled at 9.9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from planner_core.cost import NUM_COMPONENTS, Floats, Shares
from planner_core.search.algebra.elimination import Elimination, eliminate, fix_variables
from planner_core.search.algebra.elimination_order import choose_elimination_order
from planner_core.search.algebra.pareto_points import MAX_UNIT_POINTS, PointAllowance
from planner_core.search.network.factors import Factor
from planner_core.search.network.folded import CompiledNetwork
from planner_core.search.network.search_cache import Copy
from planner_core.search.objective import EVEN_SHARES, TIE, Objective
from planner_core.search.units.dual_shares import best_shares
from planner_core.search.units.reduction import ReducedVariant, eliminate_inside
from planner_core.search.units.unit_points import least_by_points

MAX_SHARES = 5
"""Shares that are tried for one entry before its assignments are enumerated."""
LAST_SHARES = 2
"""The bound of a new view is computed at this many shares: the last ones that helped."""


@dataclass(frozen=True, slots=True)
class View:
    """A choice of the boundary variables over which a table is made (`free`), and the states of the others (`fixed`)."""

    free: tuple[str, ...]
    fixed: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SettledEntry:
    """One settled entry: the best known copy, its priced `cost`, and a lower `bound`. The two differ if the work ran out, or
    if the bound was asked for up to a `limit` only."""

    cost: float
    bound: float
    copy: Copy
    limit: float = float("inf")


class VariantSolver:
    """One variant of a block whose costs are weighted with `weights` [component]: its tables, and its eliminations so far."""

    def __init__(self, compiled: CompiledNetwork, inside: ReducedVariant) -> None:
        self.compiled, self.reduced = compiled, inside
        self.solved: dict[tuple[tuple[str, ...], tuple[tuple[str, int], ...]], Elimination] = {}

    def eliminate_except(self, keep: tuple[str, ...], fixed: Mapping[str, int]) -> Elimination:
        """Eliminate all variables except `keep`, with the variables in `fixed` fixed (states numbered as in `alive`)."""
        key = (keep, tuple(fixed.items()))
        if key not in self.solved:
            tables = self.reduced.remaining_tables
            # "" keeps the orders of what remains after the inside apart from those of the whole block (`elimination_order`).
            sequence = self._order(("", *keep), fixed, self.reduced.remaining, [t[0] for t in tables])
            solution = eliminate(self.compiled.sizes, fix_variables(tables, fixed), sequence, keep)
            solution.previous = self.reduced
            self.solved[key] = solution
        return self.solved[key]

    def elimination_order(self, keep: tuple[str, ...], fixed: Mapping[str, int]) -> list[str]:
        """Return an order in which the whole block can be eliminated, except `keep` and the variables in `fixed`."""
        c = self.compiled
        return self._order(keep, fixed, c.sequence, [f.vars for f in c.factors])

    def _order(
        self, key: tuple[str, ...], fixed: Mapping[str, int], free: Sequence[str], scopes: Sequence[Sequence[str]]
    ) -> list[str]:
        """Return an order of the variables in `free` and of the boundary that are neither in `key` (kept) nor in `fixed` (fixed)."""
        c = self.compiled
        remaining = [v for v in (*free, *c.boundary) if v not in fixed and v not in key]
        # As many as the block's inside: no boundary variable joined them, so the order of compilation is still right.
        if len(remaining) < 2 or len(remaining) == len(c.sequence):
            return remaining
        cache_key = (key, tuple(fixed))
        if cache_key not in c.orders:
            sizes = {v: n for v, n in c.sizes.items() if v in remaining or v in key}
            scopes_inside = [[v for v in scope if v in sizes] for scope in scopes]
            c.orders[cache_key] = choose_elimination_order(sizes, scopes_inside, [v for v in key if v in sizes])
        return c.orders[cache_key]


@dataclass
class UnitCost:
    """One block under an objective, in all its variants.

    `bounds` has for each view a table of lower bounds over the view's free variables (states numbered as in `alive`).
    `by_variant` has the same for each variant; the bound of the block is the minimum over variants. `settled` holds the
    entries that were made exact. `shares` are the shares that helped, by variant.
    """

    variants: Mapping[str, CompiledNetwork]
    objective: Objective
    bounds: dict[View, Floats] = field(default_factory=dict)
    settled: dict[tuple[View, tuple[int, ...]], SettledEntry] = field(default_factory=dict)
    shares: dict[str, list[Shares]] = field(default_factory=dict)
    solvers: dict[tuple[str, Shares], VariantSolver] = field(default_factory=dict)
    by_variant: dict[tuple[str, View], Floats] = field(default_factory=dict)
    points: PointAllowance = field(default_factory=lambda: PointAllowance(MAX_UNIT_POINTS))
    num_settlings: int = 0
    """How often an entry was settled."""
    best_copies: dict[tuple[str, Shares, View, tuple[int, ...]], Copy] = field(default_factory=dict)
    """What `best_copy` gave: the runs of one block ask for the same entries."""

    @property
    def first_variant(self) -> CompiledNetwork:
        """The network of the first variant. Variables, states and boundary are the same in all variants."""
        return next(iter(self.variants.values()))

    def solver(self, variant: str, shares: Shares) -> VariantSolver:
        """Return a variant whose costs are weighted with the objective's weights at `shares`. All variants begin with even shares."""
        if (variant, shares) not in self.solvers:
            # At even shares all variants are needed for the first bound, and are eliminated together. Other shares help one variant.
            names = list(self.variants) if shares == EVEN_SHARES else [variant]
            together = eliminate_inside([self.variants[name] for name in names], self.objective.weights(shares))
            for k, name in enumerate(names):
                self.solvers[name, shares] = VariantSolver(self.variants[name], ReducedVariant(together, k))
        return self.solvers[variant, shares]

    def bound(self, view: View) -> Floats:
        """Return the table of lower bounds over the view's free variables: a copy at an entry costs at least this."""
        if view not in self.bounds:
            tables = []
            for variant in self.variants:
                tried = self.shares.get(variant, [EVEN_SHARES])[-LAST_SHARES:]
                # The bound at each choice of shares holds, so the largest does. A copy may run in any variant, so the smallest of these
                # counts.
                table = np.max([self._weighted_table(variant, shares, view) for shares in tried], axis=0)
                self.by_variant[variant, view] = table
                tables.append(table)
            self.bounds[view] = np.min(tables, axis=0)
        return self.bounds[view]

    def settle(self, view: View, entry: tuple[int, ...], max_rise: float = float("inf")) -> float:
        """Find the least true cost at one entry, and keep it. `max_rise`: it is enough to raise the bound by so much. Returns by how much
        the bound rose."""
        before = float(self.bound(view)[entry])
        limit = before + max_rise
        previous = self.settled.get((view, entry))
        if previous is not None and (not max_rise or previous.limit >= limit):
            return 0.0
        if previous is not None:  # a third look would cost more than to see all at the second
            limit = float("inf")
        self.num_settlings += 1
        best: SettledEntry | None = None
        # Most promising first: a variant whose bound is not below the best true cost cannot win, and is not looked at.
        for variant in sorted(self.variants, key=lambda v: float(self.by_variant[v, view][entry])):
            if best is None or self.by_variant[variant, view][entry] < best.cost:
                settled = self._settle_variant(variant, view, entry, min(best.cost, limit) if best else limit)
                if best is None or settled.cost < best.cost:
                    best = SettledEntry(settled.cost, min(settled.bound, best.bound if best else np.inf), settled.copy)
                else:
                    best = SettledEntry(best.cost, min(settled.bound, best.bound), best.copy)
        assert best is not None
        if previous is not None:  # it looked less far, but may have found as much
            cost, copy = min((best.cost, best.copy), (previous.cost, previous.copy), key=lambda settled: settled[0])
            best = SettledEntry(cost, max(best.bound, previous.bound), copy)
        closed = best.cost <= best.bound * (1 + TIE / 10)
        self.settled[view, entry] = best if closed else replace(best, limit=limit)
        self.bounds[view] = np.array(np.min([self.by_variant[v, view] for v in self.variants], axis=0))
        for (settled_view, settled_entry), settled_other in self.settled.items():
            if settled_view == view:
                # The table was recomputed from all variants, so the settled entries must be written into it once more.
                self.bounds[view][settled_entry] = max(settled_other.bound, float(self.bounds[view][settled_entry]))
        rise = best.bound - before
        return rise if rise > before * TIE / 10 else 0.0

    def _settle_variant(self, variant: str, view: View, entry: tuple[int, ...], enough: float) -> SettledEntry:
        """Return the least true cost of one variant at one entry. It may stop when its bound is at least `enough`."""
        totals: list[Floats] = []
        best: tuple[float, Copy] | None = None
        bound = -np.inf
        shares = self.shares.setdefault(variant, [EVEN_SHARES])[-1]
        for step in range(MAX_SHARES):
            # Each sum is a bound in every entry, so the new one raises the bound of all entries of the view, not only of this one.
            table = np.maximum(self.by_variant[variant, view], self._weighted_table(variant, shares, view))
            self.by_variant[variant, view] = table
            bound = float(table[entry])
            copy = self.best_copy(variant, shares, view, entry)
            cost = float(self.objective.priced_cost(copy.totals))
            if best is None or cost < best[0]:
                best = (cost, copy)
            # The weighted sum of the best copy is its true cost, or the bound is high enough for the caller: nothing is left to do.
            if best[0] <= bound * (1 + TIE / 10) or bound >= enough or self.objective.is_sum:
                return SettledEntry(best[0], min(bound, best[0]), best[1])
            totals.append(copy.totals)
            # If no other shares promise more for the copies known, the search by shares stops.
            next_shares = best_shares(self.objective, totals, shares)
            if next_shares == shares:
                break
            shares = next_shares
            if step + 1 < MAX_SHARES:
                self.shares[variant].append(shares)
        assert best is not None
        if not self.objective.exact:
            return SettledEntry(best[0], bound, best[1])
        return self._enumerate_gap(variant, shares, view, entry, best, bound, enough)

    def _enumerate_gap(
        self,
        variant: str,
        shares: Shares,
        view: View,
        entry: tuple[int, ...],
        best: tuple[float, Copy],
        bound: float,
        at_most: float,
    ) -> SettledEntry:
        """Close what no shares close: enumerate all assignments from the bound up to the best one known, or to `at_most`. What is left
        open when the work ran out stays so."""
        # The bound and the best copy stay valid without points; only the gap between them stays open.
        if self.points.remaining < 0:
            return SettledEntry(best[0], min(bound, best[0]), best[1])
        solver = self.solver(variant, shares)
        fixed = dict(view.fixed) | dict(zip(view.free, entry, strict=True))
        states, least = least_by_points(
            self.variants[variant],
            solver.elimination_order((), fixed),
            fixed,
            self.objective,
            shares,
            min(best[0], at_most),
            self.points,
        )
        if states is None:
            return SettledEntry(best[0], min(max(bound, least), best[0]), best[1])
        copy = self.copy_in_states(variant, states)
        cost = float(self.objective.priced_cost(copy.totals))
        # `least_by_points` saw everything below the limit, so what it found, or the incumbent, is the least.
        return SettledEntry(cost, cost, copy) if cost < best[0] else SettledEntry(best[0], best[0], best[1])

    # --- one variant at one choice of shares -----------------------------------------------------------

    def _weighted_table(self, variant: str, shares: Shares, view: View) -> Floats:
        return self.solver(variant, shares).eliminate_except(view.free, dict(view.fixed)).table

    def best_copy(self, variant: str, shares: Shares, view: View, entry: tuple[int, ...]) -> Copy:
        """Return the copy of least weighted cost at one entry, in one variant and at one choice of shares."""
        key = variant, shares, view, entry
        if key not in self.best_copies:
            solution = self.solver(variant, shares).eliminate_except(view.free, dict(view.fixed))
            fixed = dict(view.fixed) | dict(zip(view.free, entry, strict=True))
            single = {v: 0 for v in self.first_variant.boundary if v not in fixed}  # variables that have one state
            self.best_copies[key] = self.copy_in_states(variant, solution.assignment(single | fixed))
        return self.best_copies[key]

    def copy_in_states(self, variant: str, states: Mapping[str, int]) -> Copy:
        """Return the copy whose variables have these `states`, numbered as in `alive`, with its cost."""
        compiled = self.variants[variant]
        full = {v: int(compiled.alive[v][s]) for v, s in states.items()}
        return Copy(variant, full, sum_factors(compiled.net.factors, full))


def sum_factors(factors: Sequence[Factor], states: Mapping[str, int]) -> Floats:
    """[component]: the sum of a network's factors in the states `states`."""
    total = np.zeros(NUM_COMPONENTS)
    for f in factors:
        if not len(f.costs.components):  # what only forbids states
            continue
        where: tuple[Any, ...] = (slice(None), *(states[v] for v in f.vars))
        total[f.costs.components] += f.costs.rows[where]
    return total
