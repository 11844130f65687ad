"""Which states of a network's variables can be in its best assignment, without the large tables that elimination would form.

A network's tables may be changed, as long as their sum stays what it is for every assignment. So a number for each state of a variable can
be taken from one table over the variable and given to another. The sum of the tables' least entries is a lower bound at any time; it
rises if a variable's least costs through each of its states (*min-marginals*) are made equal in all of its tables. This is max-sum
diffusion (Kovalevsky and Koval, 1975; Werner, 2007):

    bound          = sum over tables t of  min t
    through v = s  ≥ bound + sum over tables t of v of  (min of t with v = s) - min t        with all else at its least

A state through which every assignment costs more than a known one is in no best assignment (*reduced-cost fixing*). It goes, which
raises the bound of the others. What is left has few states, so its tables are small, and elimination finds the same optimum in them.

A table of many entries is replaced by tables over its pairs of variables whose sum is nowhere above it (`_narrow_tables`): the bound is
lower then, and a round costs little. Where the states of its variables become few, the table itself takes their place.

Example: the tables [a, b] = ((0, 4), (6, 3)) and [b] = (5, 0). The bound is 0 + 0, and a = 0, b = 1 costs 4. The min-marginals of b are
(0, 3) and (5, 0). Both become their mean, (2.5, 1.5): the tables are then ((2.5, 2.5), (8.5, 1.5)) and (2.5, 1.5), and the bound is
1.5 + 1.5. Through b = 0 the least is 2.5 + 2.5, which is above 4: b = 0 goes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from planner_core.cost import Floats, Ints
from planner_core.search.algebra.elimination import Elimination, Steps, Table, eliminate, fix_variables
from planner_core.search.algebra.elimination_order import choose_elimination_order
from planner_core.search.algebra.least_sum import least_over

Scope = tuple[str, ...]
MAX_ROUNDS = 8
"""Rounds in which states are removed."""
MAX_SWEEPS, CHECKED_SWEEPS = 24, 4
"""Times in a round that min-marginals are made equal, and after how many of them the bound is looked at."""
MIN_RISE = 0.05
"""The share of the gap by which the bound must rise between two looks, or the sweeps end."""
MAX_PLAIN_ENTRIES = 20_000
"""Entries of a table above which its pairs of variables take its place."""
MAX_COPIED_ENTRIES = 5_000_000
"""Entries of a table above which it is not copied (40 MB)."""
MAX_WORK = 1e9
"""Entries that may be looked at to replace a table by its pairs of variables."""
SLACK = 1e-9
"""What rounding may add to a sum, as a share of it."""


def eliminate_possible(sizes: Mapping[str, int], tables: Sequence[Table], kinds: Sequence[int]) -> Elimination:
    """Eliminate all variables of the tables, after the states that are not in the best assignment were removed. The table of the result is
    infinite if no assignment is possible. Tables of one of the `kinds` [table] are equal."""
    alive = possible_states(tables, kinds)
    if not all(map(len, alive.values())):
        return Elimination((), np.asarray(np.inf))
    decided = {v: 0 for v, states in alive.items() if len(states) == 1}
    remaining_tables = fix_variables(
        [(names, _select(table, [alive[v] for v in names])) for names, table in tables], decided
    )
    open_sizes = {v: len(states) for v, states in alive.items() if v not in decided}
    sequence = choose_elimination_order(open_sizes, [names for names, _ in remaining_tables], (), math.inf)
    solution = eliminate(open_sizes, remaining_tables, sequence, ())
    # The way back is in the numbers of all states. So it has one table for each variable, which allows the best state alone.
    best = {v: int(alive[v][s]) for v, s in (decided | solution.assignment({})).items()}
    steps: Steps = [(v, [((v,), np.where(np.arange(sizes[v]) == s, 0.0, np.inf))]) for v, s in best.items()]
    return Elimination((), solution.table, steps)


def least_cost_bound(tables: Sequence[Table], kinds: Sequence[int]) -> float:
    """Return a lower bound on the cost of every assignment. Tables of one of the `kinds` [table] are equal."""
    network = _Network(_coarse_tables(tables, kinds, _all_states(tables)))
    for _ in range(CHECKED_SWEEPS):
        network.equalise_min_marginals()
    return network.bound


def possible_states(tables: Sequence[Table], kinds: Sequence[int]) -> dict[str, Ints]:
    """Return for each variable the states that may be in the best assignment of a network; none, if no assignment is possible. Tables of
    one of the `kinds` [table] are equal."""
    alive, best = _all_states(tables), np.inf
    for _ in range(MAX_ROUNDS):
        network = _Network(_coarse_tables(tables, kinds, alive))
        best, sweeps, bound = min(best, _cost_of(network, tables, alive)), 0, network.bound
        while sweeps < MAX_SWEEPS:
            for _ in range(CHECKED_SWEEPS):
                network.equalise_min_marginals()
            sweeps, before, bound = sweeps + CHECKED_SWEEPS, bound, network.bound
            best = min(best, _cost_of(network, tables, alive))
            if bound >= best or (best < np.inf and bound - before < MIN_RISE * (best - bound)):
                break
        possible = network.states_within(best + SLACK * max(abs(best), abs(bound)) if best < np.inf else best)
        num_gone = sum(len(a) - len(possible[v]) for v, a in alive.items())
        alive = {v: a[possible[v]] for v, a in alive.items()}
        if not num_gone or all(len(a) < 2 for a in alive.values()):
            break
    return alive


def _all_states(tables: Sequence[Table]) -> dict[str, Ints]:
    """Return the numbers of all states of each variable."""
    return {v: np.arange(n) for names, table in tables for v, n in zip(names, table.shape, strict=True)}


def _cost_of(network: _Network, tables: Sequence[Table], alive: Mapping[str, Ints]) -> float:
    """Return what a good assignment of a network costs in the `tables`."""
    states = {v: int(alive[v][s]) for v, s in network.good_assignment().items()}
    return sum(float(table[tuple(states[v] for v in names)]) for names, table in tables)


def _coarse_tables(tables: Sequence[Table], kinds: Sequence[int], alive: Mapping[str, Ints]) -> list[Table]:
    """Return tables of few entries whose sum is not above that of the `tables`, of the states `alive`."""
    coarse: list[Table] = []
    parts: dict[tuple[object, ...], list[tuple[tuple[int, ...], Floats]]] = {}
    for (names, table), kind in zip(tables, kinds, strict=True):
        if len(names) < 3 or math.prod(len(alive[v]) for v in names) <= MAX_PLAIN_ENTRIES:
            coarse.append((names, _select(table, [alive[v] for v in names])))
            continue
        key = kind, *(alive[v].tobytes() for v in names)
        if key not in parts:
            parts[key] = _narrow_tables(_select(table, [alive[v] for v in names]))
        coarse += [(tuple(names[d] for d in dims), part) for dims, part in parts[key]]
    return coarse


def _select(table: Floats, states: Sequence[Ints]) -> Floats:
    if all(len(s) == n for s, n in zip(states, table.shape, strict=True)):
        return table
    return np.ascontiguousarray(table[np.ix_(*states)])


def _narrow_tables(table: Floats) -> list[tuple[tuple[int, ...], Floats]]:
    """Return a table for each pair of dims, such that their sum is nowhere above `table`: the least over all other dims of what is left of
    it. Each pair takes its share of that first, and then what the others left. Of a very large table, which is not copied, each takes an
    equal share of its least; if its pairs are many, each single dim does."""
    narrow = list(combinations(range(table.ndim), 2 if projection_work(table) <= MAX_WORK else 1))

    def least(of: Floats, dims: tuple[int, ...]) -> Floats:
        return least_over(of, [d for d in range(of.ndim) if d not in dims])

    if table.size > MAX_COPIED_ENTRIES:
        return [(dims, least(table, dims) / len(narrow)) for dims in narrow]
    shares_of_pairs: list[Floats] = [np.zeros([table.shape[d] for d in dims]) for dims in narrow]
    rest = table.copy()
    for is_last in (False, True):
        for k, dims in enumerate(narrow):
            part = least(rest, dims) if is_last else least(rest, dims) / (len(narrow) - k)
            shares_of_pairs[k] += part
            shape = [n if d in dims else 1 for d, n in enumerate(table.shape)]
            rest -= np.where(np.isfinite(part), part, 0.0).reshape(shape)
    return list(zip(narrow, shares_of_pairs, strict=True))


def projection_work(table: Floats) -> float:
    """Return about how many entries are looked at to replace a table by tables over its pairs of dims."""
    return 2.0 * table.size * table.ndim**2


class _Network:
    """Tables whose sum stays that of the given ones, for every assignment."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = _absorb_smaller(tables)
        self.separators = _find_separators([names for names, _ in self.tables])

    @property
    def bound(self) -> float:
        """A value that no assignment costs less than."""
        return sum(float(table.min()) for _, table in self.tables)

    def equalise_min_marginals(self) -> None:
        """Make the min-marginals of each separator equal in its tables."""
        for separator, members in self.separators:
            marginals = [_min_marginal(self.tables[k], separator) for k in members]
            mean = sum(marginals[1:], marginals[0]) / len(members)
            for k, marginal in zip(members, marginals, strict=True):
                names, table = self.tables[k]
                # Where the mean is infinite nothing through the entry is possible, and the table says so from now on.
                with np.errstate(invalid="ignore"):
                    change = np.where(np.isfinite(mean), mean - marginal, np.inf)
                shape = [n if v in separator else 1 for v, n in zip(names, table.shape, strict=True)]
                self.tables[k] = names, table + change.reshape(shape)

    def states_within(self, limit: float) -> dict[str, Ints]:
        """Return the states of each variable through which an assignment may cost no more than `limit`."""
        bound = self.bound
        if not np.isfinite(bound):
            return {v: np.arange(0) for names, _ in self.tables for v in names}
        excess: dict[str, Floats] = {}
        for names, table in self.tables:
            least = table.min()
            for v in names:
                excess[v] = excess.get(v, 0.0) + (_min_marginal((names, table), (v,)) - least)
        return {v: np.flatnonzero(np.isfinite(e) & (bound + e <= limit)) for v, e in excess.items()}

    def good_assignment(self) -> dict[str, int]:
        """Return an assignment that is mostly good: variable by variable, what costs least given the states before it."""
        tables, states = [*self.tables], dict[str, int]()
        tables_of: dict[str, list[int]] = {v: [] for names, _ in tables for v in names}
        for k, (names, _) in enumerate(tables):
            for v in names:
                tables_of[v].append(k)
        best: dict[str, int] = {}
        lead: dict[str, float] = {}
        changed = set(tables_of)
        while len(states) < len(tables_of):
            for v in changed:
                marginals = [_min_marginal(tables[k], (v,)) for k in tables_of[v]]
                least = sum(marginals[1:], marginals[0])
                best[v], lead[v] = int(least.argmin()), _lead_of_best(least)
            # The variable whose second best state is furthest from the best: it is the least in doubt.
            v = max(lead, key=lambda name: (lead[name], name))
            del lead[v]
            states[v] = best[v]
            for k in tables_of[v]:
                (tables[k],) = fix_variables([tables[k]], {v: states[v]})
            changed = {o for k in tables_of[v] for o in tables[k][0]}
        return states


def _absorb_smaller(tables: Sequence[Table]) -> list[Table]:
    """Return the tables with their variables in one order, each added to the first that has all of its variables, where there is one."""
    merged: list[Table] = []
    having: dict[str, set[int]] = {}
    for names, table in sorted(tables, key=lambda t: -len(t[0])):
        order = sorted(range(len(names)), key=names.__getitem__)
        ordered = tuple(names[k] for k in order)
        if (k := min(_tables_with(names, having, len(merged)), default=None)) is not None:
            larger, total = merged[k]
            shape = [n if v in names else 1 for v, n in zip(larger, total.shape, strict=True)]
            merged[k] = larger, total + table.transpose(order).reshape(shape)
        else:
            for v in names:
                having.setdefault(v, set()).add(len(merged))
            merged.append((ordered, table.transpose(order)))
    return merged


def _find_separators(scopes: Sequence[Scope]) -> list[tuple[Scope, list[int]]]:
    """Return what tables share: each variable that stands in several of them, and each set of variables that two have in common; with
    the numbers of the tables that have it. The largest come last."""
    shared: set[Scope] = {(v,) for scope in scopes for v in scope}
    having: dict[str, set[int]] = {}
    for k, scope in enumerate(scopes):
        neighbours = set[int]().union(*(having.get(v, ()) for v in scope))
        shared.update(tuple(v for v in scope if v in scopes[j]) for j in neighbours)
        for v in scope:
            having.setdefault(v, set()).add(k)
    ordered = sorted(shared, key=lambda s: (len(s), s))
    members = [(s, sorted(_tables_with(s, having, len(scopes)))) for s in ordered]
    return [(s, numbers) for s, numbers in members if len(numbers) > 1]


def _tables_with(names: Scope, having: Mapping[str, set[int]], count: int) -> set[int]:
    """Return which of `count` tables have all variables of a scope. `having`: the tables of each variable."""
    return set.intersection(*(having.get(v, set()) for v in names)) if names else set(range(count))


def _min_marginal(table: Table, scope: Scope) -> Floats:
    """[scope]: the least of a table through each state of some of its variables, in the order in which the table has them."""
    names, array = table
    return least_over(array, [k for k, v in enumerate(names) if v not in scope])


def _lead_of_best(marginal: Floats) -> float:
    """Return by how much the second best state is worse than the best."""
    if len(marginal) < 2:
        return np.inf
    best, second = np.partition(marginal, 1)[:2]
    return float(second - best) if np.isfinite(second) else np.inf
