"""A unit's network without the states that are in no assignment within a limit.

Each weighted sum of the sides of the maxima bounds the true cost. So a state is dropped if, at some shares, the least weighted cost of
an assignment through it exceeds the limit. Between a bound and a limit that lie a few per cent apart, few states of a variable are
left, and the tables of what is enumerated are small.

Example: a limit of 10, and a variable with three states, through which the least weighted costs are (9, 12, 9.5) at some shares and
(8, 9, 11) at others. Only the first state is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner_core.cost import Floats, Ints, Shares
from planner_core.search.algebra.bucket_tree import SUM_NUMBER, BucketTree, WeightedBounds, add_outside_cost
from planner_core.search.algebra.elimination import Table
from planner_core.search.network.factors import Factor
from planner_core.search.network.folded import CompiledNetwork
from planner_core.search.objective import Objective
from planner_core.search.units.tables import drop_fixed_variables, weighted_tables

ROUNDS = 3
"""Times that states are dropped at several shares."""
MAX_SHARE_LEFT = 0.9
"""Another round is worth its time if the last one left at most this share of the states."""


@dataclass(frozen=True, slots=True)
class PrunedUnit:
    """The states of each variable that are left (`alive`), and the tables over them. A variable with one state is in no table."""

    alive: Mapping[str, Ints]
    factors: Sequence[Factor]
    other_tables: Sequence[Table]
    sequence: Sequence[str]
    keep: tuple[str, ...] = ()

    @staticmethod
    def from_network(
        compiled: CompiledNetwork,
        sequence: Sequence[str],
        fixed: Mapping[str, int],
        others: Sequence[Table] = (),
        keep: tuple[str, ...] = (),
    ) -> PrunedUnit:
        """Return the whole network with the variables in `fixed` fixed. Those in `keep` have all of their states. `others` are tables of
        seconds of other units."""
        alive = {v: np.array([fixed[v]]) if v in fixed else np.arange(n) for v, n in compiled.sizes.items()}
        return PrunedUnit(alive, compiled.factors, others, sequence, keep).select({v: alive[v] for v in fixed})

    @property
    def sizes(self) -> dict[str, int]:
        """Number of states of each variable that is in a table."""
        return {v: len(self.alive[v]) for v in (*self.sequence, *self.keep)}

    @property
    def num_states(self) -> int:
        """Number of states of all variables that are eliminated."""
        return sum(len(self.alive[v]) for v in self.sequence)

    def full_states(self, states: Mapping[str, int]) -> dict[str, int]:
        """Return the states of all variables, in the numbering of the whole network. `states` are those of an assignment of the part,
        in its own numbering: it leaves out variables with one state."""
        return {v: int(a[states.get(v, 0)]) for v, a in self.alive.items()}

    @property
    def is_empty(self) -> bool:
        """Whether some variable has no state left: no assignment is within the limit."""
        return not all(len(states) for states in self.alive.values())

    def select(self, selected: Mapping[str, Ints]) -> PrunedUnit:
        """Return the part with the states `selected` of some variables; they are numbered as in its tables."""
        selection = {v: selected.get(v, np.arange(len(self.alive[v]))) for v in self.alive}
        alive = {v: a if len(selection[v]) == len(a) else a[selection[v]] for v, a in self.alive.items()}
        return PrunedUnit(
            alive,
            [_select_states(f, selection) if any(v in selected for v in f.vars) else f for f in self.factors],
            [
                drop_fixed_variables(n, a[np.ix_(*(selection[v] for v in n))]) if n else (n, a)
                for n, a in self.other_tables
            ],
            [v for v in self.sequence if len(alive[v]) > 1],
            self.keep,
        )

    def bucket_tree(self, objective: Objective, shares: Shares, outside_cost: Floats | None = None) -> BucketTree:
        """Return the part as a plain sum, weighed: its maxima are weighted at `shares`. `outside_cost`: the least cost of all
        outside of it."""
        tables = [*weighted_tables(self.factors, objective.weights(shares)), *self.other_tables]
        tree = BucketTree(self.sizes, tables, self.sequence, self.keep)
        tree.compute_margins(None if outside_cost is None else add_outside_cost(tree.root, outside_cost))
        return tree

    def weighted_bounds(self, sums: WeightedSums, outside_cost: Floats | None) -> WeightedBounds:
        """Return the part as several plain sums. Raises TablesTooLarge."""
        tables = []
        for f in self.factors:
            names, table = drop_fixed_variables(f.vars, f.costs.weighted(sums.weights) + f.barrier)
            tables.append(((*names, SUM_NUMBER), np.moveaxis(table, 0, -1)))
        for names, table in self.other_tables:
            tables.append(((*names, SUM_NUMBER), np.repeat(table[..., None], len(sums.weights), axis=-1)))
        return WeightedBounds(self.sizes, tables, self.sequence, sums.prices, self.keep, outside_cost)

    def keep_within(self, margins: Sequence[Floats], limit: float) -> PrunedUnit:
        """Return the part without states that are not within the limit. `margins` [variable of the sequence]: the least weighted
        costs through each entry of its bucket [others..., state, sum]."""
        selected = {}
        for v, margin in zip(self.sequence, margins, strict=True):
            # A state must be within the limit under every sum, each at its own best: one sum above the limit proves it useless.
            is_within = (margin.reshape(-1, len(self.alive[v]), margin.shape[-1]).min(axis=0) <= limit).all(axis=1)
            if not is_within.all():
                selected[v] = np.flatnonzero(is_within)
        return self.select(selected) if selected else self


@dataclass(frozen=True, slots=True)
class WeightedSums:
    """Weighted sums that bound the true cost, each at other shares: the weights of the components, and the prices of the rows of a
    point."""

    weights: Floats
    """[sum, component]"""
    prices: Floats
    """[row, sum]"""

    @staticmethod
    def from_shares(objective: Objective, shares: Sequence[Shares], prices: Sequence[Floats]) -> WeightedSums:
        """Return the sums at several `shares`, with the prices [row] of each."""
        return WeightedSums(np.stack([objective.weights(s) for s in shares]), np.stack(prices, axis=1))


def _select_states(f: Factor, pick: Mapping[str, Ints]) -> Factor:
    where: tuple[Any, ...] = np.ix_(*(pick[v] for v in f.vars))
    return Factor(f.vars, f.costs[where], f.allowed[where])


def prune_by_limit(
    unit: PrunedUnit, tree: BucketTree, sums: WeightedSums, limit: float, outside_cost: Floats | None = None
) -> tuple[PrunedUnit, WeightedBounds | None]:
    """Return the part without states that are in no assignment within the limit, and its bounds at several shares, if any state is left.
    `tree` is the part weighed at one of them; `outside_cost` is the least cost of all outside of it. Raises TablesTooLarge."""
    # `num_states` is the count before: the tuple on the right is made first. It is compared with what is left to judge the round.
    unit, num_states = unit.keep_within([m[..., None] for m in tree.margins[:-1]], limit), unit.num_states
    bounds = None if unit.is_empty else unit.weighted_bounds(sums, outside_cost)
    for _ in range(ROUNDS):
        if bounds is None or unit.num_states > MAX_SHARE_LEFT * num_states:
            break
        num_states, pruned = unit.num_states, unit.keep_within(bounds.margins[:-1], limit)
        if pruned is unit:
            break
        unit, bounds = pruned, None if pruned.is_empty else pruned.weighted_bounds(sums, outside_cost)
    return unit, bounds
