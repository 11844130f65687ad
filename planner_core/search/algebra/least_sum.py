"""The minimum over one variable of a sum of tables, without forming what is impossible.

Which strategies of an operator go with which state of a tensor is a sparse table: of a hundred pairs ten are possible. If such a table
[v, t] is among those that are added to eliminate v, only its possible pairs are formed, state of t by state of t. Without one, the
states of v are added up one after the other, so that what is formed stays in the cache of the processor.

Example: v has 47 states and t has 26, of which a state of t goes with five of v. Next to a table [v, a, b, c] of 9 000 entries for each
state of v, the whole sum has 11 million entries, and its possible pairs have one million.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from planner_core.cost import Bools, Floats

MAX_ROW_ENTRIES = 100_000
"""Entries of a sum for each state of v from which on it is divided."""
MAX_SPARSE_SHARE = 0.5
"""The share of possible pairs from which on a table is used as a dense one."""
MIN_SPARSE_ENTRIES = 20_000
"""Entries of a sum from which on it is worth to look for a sparse table."""
MIN_ENTRIES_BY_STATE = 4_000
"""Entries of a sum for each state of v from which on the states are added up one after the other."""
MIN_ENTRIES_BY_PAIR = 400
"""Entries for each pair from which on pairs are taken by the states of t, one after the other."""


def least_sum(tables: Sequence[Floats]) -> Floats:
    """[row, others...]: the minimum over the second dim of the sum of `tables` [row, v, others...].

    Dims of size 1 are broadcast, but all tables have all states of v. They are added in the given order.
    """
    shape = np.broadcast_shapes(*(t.shape for t in tables))
    if math.prod(shape[1:]) >= MIN_SPARSE_ENTRIES and (pairs := _sparsest_table(tables, shape)) is not None:
        return _sparse_least(tables, shape, *pairs)
    return _dense_least(tables, shape)


def least_over(table: Floats, dims: Sequence[int]) -> Floats:
    """Return the minimum of a table over some of its dims."""
    by_stride = sorted(range(table.ndim), key=lambda dim: -table.strides[dim])
    if set(dims) != set(by_stride[table.ndim - len(dims) :]):
        # The outermost in memory first: that is taken row by row, and several dims at once number by number. Of 36^4 numbers over dims
        # 1 and 3 it takes 1.4 ms, and 7 at once.
        for dim in by_stride:
            if dim in dims:
                table = table.min(axis=dim, keepdims=True)
        return table.squeeze(tuple(dims))
    return np.asarray(table.min(axis=tuple(dims)))


def _dense_least(tables: Sequence[Floats], shape: tuple[int, ...]) -> Floats:
    """Return the minimum, from all sums, some at a time. `shape` is that of the whole sum."""
    row = math.prod(shape[2:])
    if row > MAX_ROW_ENTRIES and len(shape) > 3:
        inner = (*shape[:2], *shape[3:])
        parts = ([t[:, :, k if t.shape[2] > 1 else 0] for t in tables] for k in range(shape[2]))
        return np.stack([_dense_least(part, inner) for part in parts], axis=1)
    if row < MIN_ENTRIES_BY_STATE or len(tables) == 1:
        return np.asarray(np.minimum.reduce(_add_in_order(tables), axis=1))
    best = np.full((shape[0], *shape[2:]), np.inf)
    buffer = np.empty_like(best)  # the sums of one state of v, which stay in the cache
    for state in range(shape[1]):
        # Tables come small first, so only the last addition has the full size.
        *small, large = (t[:, state] for t in tables)
        np.add(_add_in_order(small), large, out=buffer)
        np.minimum(best, buffer, out=best)
    return best


def _add_in_order(tables: Sequence[Floats]) -> Floats:
    total, *more = tables
    for table in more:
        # In the order of dims that the sum has: numpy would take that of transposed tables, and the minimum then takes twice as long.
        total = np.add(total, table, order="C")
    return total


def _sparsest_table(tables: Sequence[Floats], shape: tuple[int, ...]) -> tuple[int, Bools] | None:
    """Return the dim t and the possible pairs [t, v] of the table over v and one other dim that has the fewest of them; None if
    none has few. All variants have the same."""
    best: tuple[int, Bools] | None = None
    least = MAX_SPARSE_SHARE
    for table in tables:
        # Pairs are [t, v], so only a table over v and one other variable can give them.
        wide = [d for d in range(2, len(shape)) if table.shape[d] > 1]
        if len(wide) == 1:
            possible = np.isfinite(table[0]).reshape(shape[1], -1)
            if (share := float(possible.mean())) < least:
                best, least = (wide[0], possible.T), share
    return best


def _sparse_least(tables: Sequence[Floats], shape: tuple[int, ...], dim: int, possible: Bools) -> Floats:
    """Return the minimum, from the sums of the `possible` pairs [t, v]. The states of t are those of the dim `dim`."""
    others, v = np.nonzero(possible)
    starts = np.searchsorted(others, np.arange(len(possible) + 1))
    rest_dims = [d for d in range(2, len(shape)) if d != dim]
    reordered = [t.transpose(0, 1, dim, *rest_dims) for t in tables]  # [variant, v, t, rest...]

    def pair_sums(part: slice) -> Floats:
        return _add_in_order([t[:, v[part], others[part] if t.shape[2] > 1 else 0] for t in reordered])

    rest = [shape[d] for d in rest_dims]
    # `reduceat` returns the element at the start for an empty range, not infinity. So every state of t must have a pair.
    if math.prod(rest) < MIN_ENTRIES_BY_PAIR and (np.diff(starts) > 0).all():
        least = np.minimum.reduceat(pair_sums(slice(None)), starts[:-1], axis=1)
    else:
        least = np.full((shape[0], len(possible), *rest), np.inf)
        for state, (first, end) in enumerate(pairwise(starts.tolist())):
            if first < end:
                least[:, state] = pair_sums(slice(first, end)).min(axis=1)
    return np.ascontiguousarray(np.moveaxis(least, 1, dim - 1))
