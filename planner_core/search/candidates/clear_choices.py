"""Remove the variables of a two-sum network whose choice is the same at every price.

A variable can be eliminated at once for every price if, with each choice of its neighbours, one of its states is the least in both
sums. Most operators are such: what an operator sends depends on how it runs, and what is kept for backward on its tensors.

Example: the states p and q of a variable take (1 s, 4 GB) and (2 s, 4 GB) next to one state of its neighbour, and (3 s, 2 GB) and (1 s,
2 GB) next to the other. Its choice is clear: p next to the first, q next to the second. With (1 s, 5 GB) for p it would not be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from planner_core.search.algebra.elimination import Table, add_tables

MAX_TABLE_ENTRIES = 20_000
"""Entries of the largest table that is formed to look at a choice."""
MAX_NEIGHBOURS = 3
"""The most neighbours that a removed variable has: with more, the new table may be larger than the tables that it replaces."""


def without_clear_choices(
    tables: Sequence[Table], sizes: Mapping[str, int], keep: Sequence[str], changed: Iterable[str]
) -> list[Table]:
    """Tables [sum, entry of their variables] that have the same sums, over fewer variables: all in `keep`, and those whose choice is
    not clear. Entries that cannot be are infinite in the first sum and 0 in the second. Only variables that have `changed` tables, and
    those that meet the tables that remain, are looked at."""
    table_by_number = dict(enumerate(tables))
    tables_of: dict[str, set[int]] = {v: set() for v in sizes}
    for i, (names, _) in table_by_number.items():
        for v in names:
            tables_of[v].add(i)
    pending = dict.fromkeys(v for v in changed if v not in keep)
    next_number = len(table_by_number)
    while pending:
        v = next(iter(pending))
        del pending[v]
        combined = _clear_choice(v, [table_by_number[i] for i in sorted(tables_of[v])], sizes)
        if combined is None:
            continue
        for i in tables_of.pop(v):
            for other in table_by_number.pop(i)[0]:
                if other != v:
                    tables_of[other].remove(i)
        table_by_number[next_number] = combined
        for other in combined[0]:
            tables_of[other].add(next_number)
            if other not in keep:
                pending[other] = None  # its choice may be clear now
        next_number += 1
    return [*table_by_number.values()]


def _clear_choice(v: str, tables: Sequence[Table], sizes: Mapping[str, int]) -> Table | None:
    """Return the sum of the tables around a variable, at the state that is the least in both sums; None if that is not clear."""
    others = tuple(dict.fromkeys(o for names, _ in tables for o in names if o != v))
    scope = (v, *others)
    if len(others) > MAX_NEIGHBOURS or math.prod(sizes[o] for o in scope) > MAX_TABLE_ENTRIES:
        return None
    first, second = add_tables([(("sum", *names), t) for names, t in tables], ("sum", *scope), {**sizes, "sum": 2})
    least, possible = first.min(axis=0), np.isfinite(first)
    bytes_ = np.where(possible, second, np.inf)
    at_least = np.where(first == least, bytes_, np.inf).min(axis=0)
    any_possible = possible.any(axis=0)
    # (1 s, 5 GB) and (2 s, 4 GB): the state of least seconds is not that of least bytes, so the price decides between them.
    if (bytes_.min(axis=0) < at_least)[any_possible].any():
        return None
    return others, np.stack([least, np.where(any_possible, at_least, 0.0)])
