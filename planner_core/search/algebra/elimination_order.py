"""The order in which the variables of a network are eliminated. It decides how large the tables become.

The best order is NP-hard to find. Greedy rules find good ones, and none is the best for every network (Koller & Friedman 2009, section
9.4.3). So where the first rule leads to large tables, others are tried, and then random variations of the last. The order of fewest
entries is kept. What stands in a chain goes first in all of these, so each try orders the few variables that tie chains together. It
costs some thousandths of a second, and a large elimination is done many times.

Example: a star of the variable c and the leaves x, y and z, each of 10 states. If c is first, its table has 10 * 10 * 10 * 10 entries.
If the leaves are first, each table has 100.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from heapq import heapify, heappop, heappush

from planner_core.core import PlannerError

MAX_TABLE = 70_000_000
"""Entries of the largest table that is built (half a gigabyte). Elimination that needs a larger one is refused."""
LARGE = 3_000_000
"""Entries of all tables of an order, from which on other orders are looked for: the time of some tries."""
TRIES, PAIRS = (8, 64), 20_000
"""Random variations that are tried, the least and the most: so many that they look at about PAIRS pairs of neighbours at first."""
VARIED = (1, 3)
"""Chance adds to the cost of a variable at most so many times that cost, in every other variation."""

Neighbours = Mapping[str, set[str]]
Rule = Callable[[str, Neighbours, Mapping[str, int]], float]
"""What it costs to eliminate a variable next, from its neighbours and the number of states of each. The least is taken."""


class TooWide(PlannerError):
    """Elimination would need a table that is too large; `num_entries` is its size."""

    def __init__(self, entries: float) -> None:
        super().__init__(
            f"planning this model exactly needs a table of {entries:.2g} numbers ({MAX_TABLE:.2g} are allowed): too many tensors "
            "are shared between its parts; use a mesh of one axis, for example --mesh 16"
        )
        self.entries = entries


def choose_elimination_order(
    sizes: Mapping[str, int], scopes: Iterable[Sequence[str]], keep: Sequence[str], largest: float | None = None
) -> list[str]:
    """An order in which all variables except `keep` are eliminated. `sizes` are their numbers of states, `scopes` the variables of
    each table.

    Raises TooWide if a table, or the table over `keep`, has more than `largest` entries (default: MAX_TABLE).
    """
    largest = MAX_TABLE if largest is None else largest
    if (kept := num_entries(keep, sizes)) > largest:
        raise TooWide(kept)
    network = tuple(sizes.items()), tuple(dict.fromkeys(tuple(scope) for scope in scopes)), tuple(keep)
    found = _smallest_table_order(*network)
    if found.total > LARGE or found.largest > largest:
        found = min(found, *_alternative_orders(*network), key=lambda o: (o.largest > largest, o.total))
    if found.largest > largest:
        raise TooWide(found.largest)
    return list(found.sequence)


def num_entries(scope: Iterable[str], sizes: Mapping[str, int]) -> float:
    """The number of entries of a table."""
    total = 1.0
    for v in scope:
        total *= sizes[v]
    return total


@dataclass(frozen=True, slots=True)
class _Order:
    """An order, and the entries of its tables: of all together, and of the largest."""

    sequence: tuple[str, ...]
    total: float
    largest: float

    def then(self, rest: _Order) -> _Order:
        """This order, and behind it the `rest`."""
        return _Order(self.sequence + rest.sequence, self.total + rest.total, max(self.largest, rest.largest))


Sizes = tuple[tuple[str, int], ...]
Scopes = tuple[tuple[str, ...], ...]


@lru_cache(maxsize=512)
def _smallest_table_order(sizes: Sizes, scopes: Scopes, keep: tuple[str, ...]) -> _Order:
    """The order by the first rule. Networks of one mesh often differ in their costs only, so it is remembered."""
    return _greedy(dict(sizes), scopes, keep, _table_size)


@lru_cache(maxsize=512)
def _alternative_orders(sizes: Sizes, scopes: Scopes, keep: tuple[str, ...]) -> tuple[_Order, ...]:
    """The orders by the other rules, and by variations of the last. All begin with the ends and the links of chains."""
    numbers = dict(sizes)
    head, near = _eliminate_chains(numbers, scopes, keep)
    left = {v: numbers[v] for v in near}
    pairs = [(v, o) for v, others in near.items() for o in others]
    tries = min(max(PAIRS // (1 + sum(len(others) ** 2 for others in near.values())), TRIES[0]), TRIES[1])
    fill = _weighted_fill(left)
    fills = fill, *(_with_noise(fill, seed) for seed in range(tries))
    found = (_greedy(left, pairs, keep, rule, far=True) for rule in fills)
    return tuple(head.then(rest) for rest in (_greedy(left, pairs, keep, _message_size), *found))


def _eliminate_chains(
    sizes: Mapping[str, int], scopes: Scopes, keep: tuple[str, ...]
) -> tuple[_Order, dict[str, set[str]]]:
    """An order of the ends and the links of chains (`_is_chain_link`), and the neighbours of all variables that are left.

    They go in rounds. Of two neighbours one goes in a round, so that equal links of a chain give equal tables (see `units.reduction`).
    """
    open_ = [[v for v in scope if sizes[v] > 1] for scope in scopes]  # one state ties nothing together
    near, kept = _neighbours(sizes, open_), set(keep)
    found, total, largest = [], 0.0, 0.0
    todo = {v for v in sizes if v not in kept}
    while todo:
        following: set[str] = set()
        for v in sorted(todo):
            others = near[v]
            if v in following or not _is_chain_link(v, near, sizes):
                continue
            table = num_entries((v, *others), sizes)
            total, largest = total + table, max(largest, table)
            found.append(v)
            for o in others:
                near[o] = (near[o] | others) - {o, v}
            del near[v]
            following.update(others - kept)
        todo = following
    return _Order(tuple(found), total, largest), near


def _is_chain_link(v: str, near: Neighbours, sizes: Mapping[str, int]) -> bool:
    """Whether a variable stands at one other or between two, and the table that remains without it is not larger than one that is
    there with it: the two others meet already, or the variable has as many states as one of them."""
    others = near[v]
    if len(others) < 2:
        return True
    a, *more = others
    return len(more) == 1 and (more[0] in near[a] or sizes[v] >= min(sizes[o] for o in others))


def _greedy(
    sizes: Mapping[str, int], scopes: Iterable[Sequence[str]], keep: Iterable[str], rule: Rule, far: bool = False
) -> _Order:
    """The order in which the next variable is always the one of least cost by a rule. `far`: a variable's cost also changes when two
    of its neighbours meet."""
    near, kept = _neighbours(sizes, scopes), set(keep)
    cost = {v: rule(v, near, sizes) for v in sizes if v not in kept}
    queue = [(c, v) for v, c in cost.items()]  # old costs stay, and are passed over
    heapify(queue)
    found, total, largest = [], 0.0, 0.0
    while cost:
        c, v = heappop(queue)
        if cost.get(v) != c:
            continue
        del cost[v]
        found.append(v)
        others = near.pop(v)
        table = num_entries((v, *others), sizes)
        total, largest = total + table, max(largest, table)
        for o in others:
            near[o] = (near[o] | others) - {o, v}
        changed = others.union(*(near[o] for o in others)) if far else others
        for o in changed:
            if o in cost:
                cost[o] = rule(o, near, sizes)
                heappush(queue, (cost[o], o))
    return _Order(tuple(found), total, largest)


def _neighbours(sizes: Mapping[str, int], scopes: Iterable[Sequence[str]]) -> dict[str, set[str]]:
    """The other variables with which each variable stands in a table."""
    near: dict[str, set[str]] = {v: set() for v in sizes}
    for scope in scopes:
        for v in scope:
            near[v].update(scope)
    for v, others in near.items():
        others.discard(v)
    return near


def _table_size(v: str, near: Neighbours, sizes: Mapping[str, int]) -> float:
    """The entries of the table that is formed."""
    return num_entries((v, *near[v]), sizes)


def _message_size(v: str, near: Neighbours, sizes: Mapping[str, int]) -> float:
    """The entries of the table that remains."""
    return num_entries(near[v], sizes)


def _weighted_fill(sizes: Mapping[str, int]) -> Rule:
    """The pairs of variables that did not meet before, each weighted with its bits; of equal ones the smallest table."""
    bits = {v: round(1000 * math.log2(n)) for v, n in sizes.items()}  # whole numbers add up to the same in any order

    def rule(v: str, near: Neighbours, sizes: Mapping[str, int]) -> float:
        others, twice = near[v], 0
        for a in others:
            apart = others - near[a]  # and `a` itself
            if len(apart) > 1:
                twice += bits[a] * (sum(map(bits.__getitem__, apart)) - bits[a])
        return twice / 2e6 + 1e-9 * _table_size(v, near, sizes)

    return rule


def _with_noise(rule: Rule, seed: int) -> Rule:
    """The rule, with a cost of each variable that is raised by chance."""
    chance = cache(lambda v: random.Random(f"{seed} {v}").random())
    return lambda v, near, sizes: rule(v, near, sizes) * (1 + VARIED[seed % 2] * chance(v))
