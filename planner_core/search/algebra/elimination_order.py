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
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import combinations

from planner_core.core import PlannerError, Sentence, named

MAX_TABLE = 70_000_000
"""Entries of the largest table that is built (half a gigabyte). Elimination that needs a larger one is refused."""
LARGE = 3_000_000
"""Entries of all tables of an order above which other orders are tried: about the time of some tries."""
TRIES, PAIRS = (8, 64), 20_000
"""The least and the largest number of random variations: the number that looks at about PAIRS pairs of neighbours at first."""
HOPELESS = 1_000
"""The largest table of all rules' orders, as a multiple of what is allowed, from which on no variations are tried: they find tables some
times smaller."""
VARIED = (1, 3)
"""The noise on the cost of a variable, as the largest multiple of that cost; the variations take the two values in turn."""

Neighbours = dict[str, set[str]]


class TooWide(PlannerError):
    """Elimination would need a table that is too large; `entries` is its size."""

    def __init__(self, entries: float) -> None:
        super().__init__(
            Sentence(
                f"planning this model exactly needs a table of {entries:.2g} numbers ({MAX_TABLE:.2g} are allowed): too many tensors ",
                "are shared between its parts; use a mesh of one axis, for example ",
                named("mesh", 16),
            )
        )
        self.entries = entries


def choose_elimination_order(
    sizes: Mapping[str, int], scopes: Iterable[Sequence[str]], keep: Sequence[str], largest: float | None = None
) -> list[str]:
    """Return an order in which all variables except `keep` are eliminated. `sizes` are their numbers of states, `scopes` the variables of
    each table.

    Raises TooWide if a table, or the table over `keep`, has more than `largest` entries (default: MAX_TABLE).
    """
    largest = MAX_TABLE if largest is None else largest
    if (kept_entries := num_entries(keep, sizes)) > largest:
        raise TooWide(kept_entries)
    network = tuple(sizes.items()), tuple(dict.fromkeys(tuple(scope) for scope in scopes)), tuple(keep)
    # The cheap rule is enough for most networks. Other orders are tried only where the tables take longer than the tries.
    best = _smallest_table_order(*network)
    if best.total > LARGE or best.largest > largest:
        # An order that fits wins over one that does not, whatever its total: the work grows with the total, but the largest must fit.
        def rank(order: _Order) -> tuple[bool, float]:
            return order.largest > largest, order.total

        best = min(best, *_orders_by_rules(*network), key=rank)
        if best.largest <= HOPELESS * largest:
            best = min(best, *_varied_orders(*network), key=rank)
    if best.largest > largest:
        raise TooWide(best.largest)
    return list(best.sequence)


def num_entries(scope: Iterable[str], sizes: Mapping[str, int]) -> float:
    """Return the number of entries of a table."""
    total = 1.0
    for v in scope:
        total *= sizes[v]
    return total


def order_entries(sizes: Mapping[str, int], scopes: Iterable[Sequence[str]], sequence: Iterable[str]) -> float:
    """Return the entries of all tables that are formed where the variables are eliminated in this `sequence`."""
    neighbours, total = _neighbours(sizes, scopes), 0.0
    for v in sequence:
        others = neighbours.pop(v)
        total += num_entries((v, *others), sizes)
        for o in others:
            neighbours[o] = (neighbours[o] | others) - {o, v}
    return total


@dataclass(frozen=True, slots=True)
class _Order:
    """An order, and the entries of its tables: of all together, and of the largest."""

    sequence: tuple[str, ...]
    total: float
    largest: float

    def followed_by(self, rest: _Order) -> _Order:
        """This order, followed by the `rest`."""
        return _Order(self.sequence + rest.sequence, self.total + rest.total, max(self.largest, rest.largest))


Sizes = tuple[tuple[str, int], ...]
Scopes = tuple[tuple[str, ...], ...]


@lru_cache(maxsize=512)
def _smallest_table_order(sizes: Sizes, scopes: Scopes, keep: tuple[str, ...]) -> _Order:
    """Return the order by the first rule. Networks of one mesh often differ in their costs only, so it is remembered."""
    graph = _Graph(dict(sizes), _neighbours(dict(sizes), scopes))
    return _greedy(graph, keep, graph.table_entries)


@lru_cache(maxsize=512)
def _orders_by_rules(sizes: Sizes, scopes: Scopes, keep: tuple[str, ...]) -> tuple[_Order, ...]:
    """Return the orders by the other rules. They begin with the ends and the links of chains."""
    head, neighbours = _eliminate_chains(dict(sizes), scopes, keep)
    with_fill = _GraphWithFill.of(dict(sizes), neighbours)
    by_fill = _greedy(with_fill, keep, with_fill.weighted_fill)
    graph = _Graph(dict(sizes), neighbours)
    by_message = _greedy(graph, keep, graph.message_entries)
    return head.followed_by(by_message), head.followed_by(by_fill)


@lru_cache(maxsize=512)
def _varied_orders(sizes: Sizes, scopes: Scopes, keep: tuple[str, ...]) -> tuple[_Order, ...]:
    """Return the orders by variations of the last rule."""
    head, neighbours = _eliminate_chains(dict(sizes), scopes, keep)
    graph = _GraphWithFill.of(dict(sizes), neighbours)
    tries = min(max(PAIRS // (1 + sum(len(others) ** 2 for others in neighbours.values())), TRIES[0]), TRIES[1])
    return tuple(head.followed_by(_order_with_noise(graph.copy(), keep, seed)) for seed in range(tries))


def _order_with_noise(graph: _GraphWithFill, keep: tuple[str, ...], seed: int) -> _Order:
    """Return the order by the last rule, with a cost of each variable that is raised by noise."""
    most = VARIED[seed % 2]
    return _greedy(graph, keep, lambda v: graph.weighted_fill(v) * (1 + most * _repeatable_noise(seed, v)))


@lru_cache(maxsize=65_536)
def _repeatable_noise(seed: int, v: str) -> float:
    """Return a number below 1 that follows from the seed and the name alone, so that every run and every machine finds the same order."""
    return random.Random(f"{seed} {v}").random()


def _eliminate_chains(sizes: Mapping[str, int], scopes: Scopes, keep: tuple[str, ...]) -> tuple[_Order, Neighbours]:
    """Return an order of the ends and the links of chains (`_is_chain_link`), and the neighbours of all variables that are left.

    They go in rounds. Of two neighbours one goes in a round, so that equal links of a chain give equal tables (see `units.reduction`).
    """
    open_ = [[v for v in scope if sizes[v] > 1] for scope in scopes]  # one state ties nothing together
    neighbours, kept_variables = _neighbours(sizes, open_), set(keep)
    sequence, total, largest = [], 0.0, 0.0
    pending = {v for v in sizes if v not in kept_variables}
    while pending:
        next_pending: set[str] = set()
        for v in sorted(pending):
            others = neighbours[v]
            # A neighbour that went in this round put v into the next one. In the chain a-b-c-d, a goes, b must wait, and c may go.
            if v in next_pending or not _is_chain_link(v, neighbours, sizes):
                continue
            table = num_entries((v, *others), sizes)
            total, largest = total + table, max(largest, table)
            sequence.append(v)
            for o in others:
                neighbours[o] = (neighbours[o] | others) - {o, v}
            del neighbours[v]
            next_pending.update(others - kept_variables)
        pending = next_pending
    return _Order(tuple(sequence), total, largest), neighbours


def _is_chain_link(v: str, neighbours: Neighbours, sizes: Mapping[str, int]) -> bool:
    """Return whether a variable stands at one other or between two, and the table that remains without it is not larger than one that
    exists with it: the two others meet already, or the variable has as many states as one of them."""
    others = neighbours[v]
    if len(others) < 2:
        return True
    a, *more = others
    return len(more) == 1 and (more[0] in neighbours[a] or sizes[v] >= min(sizes[o] for o in others))


class _Graph:
    """The variables that are left, with the number of states of each and those with which it stands in a table."""

    def __init__(self, sizes: Mapping[str, int], neighbours: Neighbours) -> None:
        self.sizes, self.neighbours = sizes, neighbours

    def table_entries(self, v: str) -> float:
        """Return the entries of the table that is formed where a variable goes."""
        return num_entries((v, *self.neighbours[v]), self.sizes)

    def message_entries(self, v: str) -> float:
        """Return the entries of the table that remains."""
        return num_entries(self.neighbours[v], self.sizes)

    def eliminate(self, v: str) -> set[str]:
        """Take a variable out, and make its neighbours meet. Returns those whose neighbours changed."""
        others = self.neighbours.pop(v)
        for o in others:
            self.neighbours[o] = (self.neighbours[o] | others) - {o, v}
        return others


class _GraphWithFill(_Graph):
    """A graph that knows of each variable the pairs of its neighbours that do not meet (`fill`), each weighted with its bits.

    Example: c meets x, y and z, of 2, 3 and 4 bits, and x meets y. The pairs (x, z) and (y, z) are missing, so the fill of c is
    2 * 4 + 3 * 4 = 20. As x and z meet it falls to 12, and nothing else of c is counted again.
    """

    def __init__(self, sizes: Mapping[str, int], neighbours: Neighbours, bits: Mapping[str, int], fill: dict[str, int]):
        super().__init__(sizes, neighbours)
        self.bits, self.fill = bits, fill

    @classmethod
    def of(cls, sizes: Mapping[str, int], neighbours: Neighbours) -> _GraphWithFill:
        """Return a graph with its fill. It has neighbours of its own."""
        # Whole numbers (of thousandths of a bit) add up to the same in any order.
        graph = cls(sizes, neighbours, {v: round(1000 * math.log2(sizes[v])) for v in neighbours}, {}).copy()
        for v, others in neighbours.items():
            missing = (graph.bits[a] * (graph.bits_of(others - neighbours[a]) - graph.bits[a]) for a in others)
            graph.fill[v] = sum(missing) // 2  # each pair was counted from both ends
        return graph

    def copy(self) -> _GraphWithFill:
        """Return a graph that can be changed without this one."""
        neighbours = {v: set(others) for v, others in self.neighbours.items()}
        return _GraphWithFill(self.sizes, neighbours, self.bits, dict(self.fill))

    def bits_of(self, variables: Iterable[str]) -> int:
        """Return the bits of all these variables."""
        return sum(map(self.bits.__getitem__, variables))

    def weighted_fill(self, v: str) -> float:
        """Return the fill, in bits squared; of equal ones the smallest table has the least."""
        return self.fill[v] / 1e6 + 1e-9 * self.table_entries(v)

    def eliminate(self, v: str) -> set[str]:
        """Take a variable out, and make its neighbours meet. Returns those whose neighbours or whose fill changed."""
        others = self.neighbours.pop(v)
        for o in others:
            self.neighbours[o].discard(v)
            self.fill[o] -= self.bits[v] * self.bits_of(self.neighbours[o] - others)
        changed = set(others)
        for a, b in combinations(others, 2):
            if b not in self.neighbours[a]:
                changed |= self._connect(a, b)
        return changed

    def _connect(self, a: str, b: str) -> set[str]:
        """Make two variables meet. Returns the neighbours that both have."""
        of_a, of_b, bits = self.neighbours[a], self.neighbours[b], self.bits
        common = of_a & of_b
        for v in common:
            self.fill[v] -= bits[a] * bits[b]
        self.fill[a] += bits[b] * self.bits_of(of_a - of_b)
        self.fill[b] += bits[a] * self.bits_of(of_b - of_a)
        of_a.add(b)
        of_b.add(a)
        return common


def _greedy(graph: _Graph, keep: Iterable[str], cost_of: Callable[[str], float]) -> _Order:
    """Return the order in which the next variable is always the one of least cost. No variable of the graph is left but `keep`."""
    kept = set(keep)
    cost = {v: cost_of(v) for v in graph.neighbours if v not in kept}
    queue = [(c, v) for v, c in cost.items()]  # old costs stay, and are passed over
    heapify(queue)
    sequence, total, largest = [], 0.0, 0.0
    while cost:
        c, v = heappop(queue)
        # A cost that changed was pushed again. So an old entry, or one of a variable that is gone, differs from `cost` and is passed over.
        if cost.get(v) != c:
            continue
        del cost[v]
        sequence.append(v)
        table = graph.table_entries(v)
        total, largest = total + table, max(largest, table)
        for o in graph.eliminate(v):
            if o in cost:
                cost[o] = cost_of(o)
                heappush(queue, (cost[o], o))
    return _Order(tuple(sequence), total, largest)


def _neighbours(sizes: Mapping[str, int], scopes: Iterable[Sequence[str]]) -> dict[str, set[str]]:
    """Return the other variables with which each variable stands in a table."""
    neighbours: dict[str, set[str]] = {v: set() for v in sizes}
    for scope in scopes:
        for v in scope:
            neighbours[v].update(scope)
    for v, others in neighbours.items():
        others.discard(v)
    return neighbours
