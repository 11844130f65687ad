"""Exact minimisation over a cost network by eliminating one variable after the other (Bertele & Brioschi, 1972).

To eliminate a variable, add up the tables in which it stands, and keep the minimum over its states. What remains is one table
over the variables that were kept. The way back looks up for each variable the state at which the minimum was reached:

    new[others] = min over v of  sum of the tables in which v stands [others, v]

The work is exponential only in the number of variables that meet in one table (the treewidth plus one). For models it is
small: in a block of a transformer at most four variables meet.

Example: the tables [x, w] = ((0, 1), (2, 0)) and [w, y] = ((1, 3), (2, 0)). Eliminating w gives [x, y] = ((1, 1), (2, 0)).
Entry (0, 1) is min(0 + 3, 1 + 0) = 1, reached at w = 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from planner_core.cost import Floats
from planner_core.search.algebra.least_sum import least_sum

ZERO = np.zeros(1)
Table = tuple[tuple[str, ...], Floats]
Steps = list[tuple[str, list[Table]]]
"""Each variable in the order of elimination, with the tables in which it stood. The minimum of their sum gives its state."""


class HasSteps(Protocol):
    """The steps of an elimination; they may be put together only when an assignment asks for them."""

    @property
    def steps(self) -> Steps:
        """Each variable in the order of elimination, with the tables in which it stood."""


@dataclass
class Elimination:
    """A solved network: its `table` over the variables of `scope`, and the steps back to the state of each eliminated variable. `previous`
    has the steps of an earlier elimination, from whose tables this one began."""

    scope: tuple[str, ...]
    table: Floats
    steps: Steps = field(default_factory=list)
    previous: HasSteps | None = None

    def assignment(self, scope_states: Mapping[str, int]) -> dict[str, int]:
        """Return the best state of every variable, given the states of the variables of `scope`."""
        states = dict(scope_states)
        # Backwards: the tables of a variable name only kept variables and those eliminated after it, so all their states are known.
        # With w eliminated at [x, w, y], x and y are known when w is looked up. Sums are formed again here, so no argmin table is stored.
        for name, tables in reversed([*(self.previous.steps if self.previous else ()), *self.steps]):
            total = ZERO
            for names, array in tables:
                total = total + array[tuple([slice(None) if v == name else states[v] for v in names])]
            # A variable in no table costs nothing in any state, so the first state will do.
            states[name] = int(total.argmin()) if tables else 0
        return states


def eliminate(
    sizes: Mapping[str, int], tables: Iterable[Table], sequence: Sequence[str], keep: Sequence[str]
) -> Elimination:
    """Minimise over the variables in `sequence`. The result's table has one dim per name in `keep`, in that order."""
    pool: dict[str, list[Table]] = {}
    rank = {v: i for i, v in enumerate(sequence)}
    remaining: list[Table] = []

    def add_table(table: Table) -> None:
        first = min((v for v in table[0] if v in rank), key=lambda v: rank[v], default=None)
        (remaining if first is None else pool.setdefault(first, [])).append(table)

    # A table waits at its first variable in the order. So each table is added exactly once, and a message always goes to a later variable.
    for table in tables:
        add_table(table)
    steps: Steps = []
    for v in sequence:
        # Small tables go first, so that few sums have the full size.
        tables_of_v = sorted(pool.pop(v, []), key=lambda t: t[1].size)
        others = order_largest_last((o for scope, _ in tables_of_v for o in scope if o != v), sizes)
        steps.append((v, tables_of_v))
        add_table((others, _minimum_over(tables_of_v, v, others)))
    return Elimination(tuple(keep), add_tables(remaining, tuple(keep), sizes), steps)


def order_largest_last(names: Iterable[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the variables, each once, the one of most states last: numpy adds tables fastest along a long last dim."""
    return tuple(sorted(dict.fromkeys(names), key=sizes.__getitem__))


def _minimum_over(tables: Sequence[Table], v: str, others: tuple[str, ...]) -> Floats:
    """[others]: the minimum over the states of `v` of the sum of the tables."""
    scope = (v, *others)
    if not tables:
        return np.zeros(())
    return np.asarray(least_sum([_broadcast(table, scope)[None] for table in tables])[0])


def fix_variables(tables: Sequence[Table], states: Mapping[str, int]) -> list[Table]:
    """Return the tables with the variables in `states` fixed at a state. Leading dims of an array that name no variable stay."""
    fixed = []
    for names, array in tables:
        num_leading = array.ndim - len(names)
        index = (*(slice(None),) * num_leading, *(states.get(v, slice(None)) for v in names))
        fixed.append((tuple(v for v in names if v not in states), array[index]))
    return fixed


def add_tables(tables: Sequence[Table], scope: tuple[str, ...], sizes: Mapping[str, int]) -> Floats:
    """Return the sum of the tables, broadcast to `scope`. Small tables go first, so that few sums have the full size."""
    total = np.zeros([1] * len(scope))
    for table in sorted(tables, key=lambda t: t[1].size):
        total = total + _broadcast(table, scope)
    return total if total.shape == (full := tuple(sizes[v] for v in scope)) else np.broadcast_to(total, full).copy()


def _broadcast(table: Table, scope: tuple[str, ...]) -> Floats:
    """Return the table with a dim for each variable of `scope`, of size 1 where it does not have the variable."""
    names, array = table
    positions = [scope.index(v) for v in names]
    shape = [1] * len(scope)
    for p, size in zip(positions, array.shape, strict=True):
        shape[p] = size
    if len(names) > 1 and positions != sorted(positions):
        array = array.transpose(sorted(range(len(names)), key=positions.__getitem__))
    return array.reshape(shape)
