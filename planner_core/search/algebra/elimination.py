"""Exact minimisation over a cost network by eliminating one variable after the other (Bertele & Brioschi, 1972).

Eliminating a variable adds up the tables it stands in and keeps the minimum over it, with the argument at
which it is reached. What remains is one table over the variables that were kept, and the way back. The cost
is exponential only in the number of variables that meet in one table (the treewidth), which is small for
models: a block of a transformer never holds more than four.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner_core.core import PlannerError

Floats = NDArray[np.float64]
ZERO = np.zeros(1)
Table = tuple[tuple[str, ...], Floats]
Steps = list[tuple[str, list[Table]]]
"""Variables in the order of their elimination, and the tables that each stood in: its best state is found in their sum."""
MAX_TABLE = 70_000_000
"""Entries of the largest table that is built (half a gigabyte); beyond it elimination is refused."""

AT_ONCE = 1_000_000
"""Entries up to which the tables of a variable are added up for all its states together."""


class TooWide(PlannerError):
    """The network's treewidth makes elimination too large; `entries` is the table that would be needed."""

    def __init__(self, entries: float) -> None:
        super().__init__(
            f"planning this model exactly needs a table of {entries:.2g} numbers ({MAX_TABLE:.2g} are allowed): too many tensors "
            "are shared between its parts; use a mesh of one axis, for example --mesh 16"
        )
        self.entries = entries


@dataclass
class Elimination:
    """A solved network: `table` over `kept` variables, and the way back to the state of each eliminated one."""

    kept: tuple[str, ...]
    table: Floats
    steps: Steps = field(default_factory=list)

    def assignment(self, kept: Mapping[str, int]) -> dict[str, int]:
        """The best state of every variable, given those that were kept."""
        found = dict(kept)
        for name, tables in reversed(self.steps):
            costs = sum(
                (array[tuple(slice(None) if v == name else found[v] for v in names)] for names, array in tables),
                start=ZERO,
            )
            found[name] = int(costs.argmin())
        return found


def order(
    sizes: Mapping[str, int], scopes: Iterable[Sequence[str]], keep: Sequence[str], largest: float | None = None
) -> list[str]:
    """A greedy elimination order: next the variable whose table is smallest. Raises TooWide where one, or that over `keep`, has
    more entries than `largest` (MAX_TABLE)."""
    largest = MAX_TABLE if largest is None else largest
    if (entries := _entries(keep, sizes)) > largest:
        raise TooWide(entries)
    near: dict[str, set[str]] = {v: set() for v in sizes}
    for scope in scopes:
        for v in scope:
            near[v].update(scope)
    for v, others in near.items():
        others.discard(v)
    kept, found = set(keep), []
    weight = {v: _entries((v, *near[v]), sizes) for v in sizes if v not in kept}
    while weight:
        v = min(weight, key=lambda name: (weight[name], name))
        if weight.pop(v) > largest:
            raise TooWide(_entries((v, *near[v]), sizes))
        found.append(v)
        others = near.pop(v)
        for o in others:
            near[o] = (near[o] | others) - {o, v}
        for o in others:
            if o in weight:
                weight[o] = _entries((o, *near[o]), sizes)
    return found


def _entries(scope: Iterable[str], sizes: Mapping[str, int]) -> float:
    total = 1.0
    for v in scope:
        total *= sizes[v]
    return total


def eliminate(
    sizes: Mapping[str, int], tables: Iterable[Table], sequence: Sequence[str], keep: Sequence[str]
) -> Elimination:
    """Minimise over the variables in `sequence`; the result's table has one dim per name in `keep`, in that order."""
    steps, rest, _ = reduce(sizes, tables, sequence)
    return Elimination(tuple(keep), add(rest, tuple(keep), sizes), steps)


def reduce(
    sizes: Mapping[str, int], tables: Iterable[Table], sequence: Sequence[str], largest: float = float("inf")
) -> tuple[Steps, list[Table], list[str]]:
    """Minimise over the variables in `sequence`, up to the first that needs a table of more than `largest` entries: the steps,
    the tables that are left, and the variables of the sequence that are left."""
    pool: dict[str, list[Table]] = {}
    rank = {v: i for i, v in enumerate(sequence)}
    last: list[Table] = []

    def put(table: Table) -> None:
        first = min((v for v in table[0] if v in rank), key=lambda v: rank[v], default=None)
        (last if first is None else pool.setdefault(first, [])).append(table)

    for table in tables:
        put(table)
    steps: Steps = []
    for i, v in enumerate(sequence):
        mine = sorted(pool.get(v, []), key=lambda t: t[1].size)
        others = tuple(dict.fromkeys(o for scope, _ in mine for o in scope if o != v))
        if _entries((v, *others), sizes) > largest:
            return steps, [*last, *(t for left in pool.values() for t in left)], list(sequence[i:])
        pool.pop(v, None)
        steps.append((v, mine))
        put((others, _least(mine, v, others, sizes)))
    return steps, last, []


def lower_bound(sizes: Mapping[str, int], tables: Iterable[Table], sequence: Sequence[str], largest: float) -> float:
    """No assignment costs less, found without a table of more than `largest` entries (mini-buckets, Dechter & Rish 2003): where
    the tables of a variable together are larger, they are taken in parts, in each of which it may be in another state."""
    pool: dict[str, list[Table]] = {v: [] for v in sequence}
    rank = {v: i for i, v in enumerate(sequence)}
    total = 0.0
    todo = list(tables)
    for v in (*sequence, ""):
        for names, array in todo:
            if names:
                pool[min(names, key=lambda n: rank[n])].append((names, array))
            else:
                total += float(array)
        if v:
            todo = [(others, _least(part, v, others, sizes)) for part, others in _parts(v, pool.pop(v), sizes, largest)]
    return total


def _parts(
    v: str, tables: list[Table], sizes: Mapping[str, int], largest: float
) -> list[tuple[list[Table], tuple[str, ...]]]:
    """The tables in parts that fit, large ones first, each with its variables other than `v`."""
    parts: list[tuple[list[Table], set[str]]] = []
    for table in sorted(tables, key=lambda t: -t[1].size):
        for part, scope in parts:
            if _entries(scope | {*table[0]}, sizes) <= largest:
                part.append(table)
                scope.update(table[0])
                break
        else:
            parts.append(([table], {*table[0]}))
    return [(part, tuple(sorted(scope - {v}))) for part, scope in parts]


def _least(tables: Sequence[Table], v: str, others: tuple[str, ...], sizes: Mapping[str, int]) -> Floats:
    """The least sum of the tables over the states of `v`; state by state where all at once would be large."""
    if _entries((v, *others), sizes) <= AT_ONCE:
        return np.asarray(add(tables, (v, *others), sizes).min(axis=0))
    best = add(given(tables, {v: 0}), others, sizes)
    for s in range(1, sizes[v]):
        np.minimum(best, add(given(tables, {v: s}), others, sizes), out=best)
    return best


def given(tables: Sequence[Table], at: Mapping[str, int]) -> list[Table]:
    """The tables, some of whose variables have a state already. Further leading dims of an array stay as they are."""
    found = []
    for names, array in tables:
        lead = array.ndim - len(names)
        where = (*(slice(None),) * lead, *(at.get(v, slice(None)) for v in names))
        found.append((tuple(v for v in names if v not in at), array[where]))
    return found


def add(tables: Sequence[Table], scope: tuple[str, ...], sizes: Mapping[str, int]) -> Floats:
    """Sum of tables, broadcast to `scope`; small ones first, so that few sums are over all of it."""
    total = np.zeros([1] * len(scope))
    at = {v: i for i, v in enumerate(scope)}
    for names, array in sorted(tables, key=lambda t: t[1].size):
        places = [at[v] for v in names]
        shape = [1] * len(scope)
        for p, size in zip(places, array.shape, strict=True):
            shape[p] = size
        if len(names) > 1 and places != sorted(places):
            array = array.transpose(sorted(range(len(names)), key=places.__getitem__))
        total = total + array.reshape(shape)
    return total if total.shape == (full := tuple(sizes[v] for v in scope)) else np.broadcast_to(total, full).copy()


# --- chains ------------------------------------------------------------------------------------------
