"""Eliminate the inside of a block in all its variants at once.

The variants of a block have the same variables and tables, and the same order of elimination; only the numbers differ. So which
tables are added for which variable is worked out once for a block (`Recipe`), and every array has a leading dim [variant].

Example: a block has the tables [x, w] and [w, y], and is kept or recomputed. Its recipe has one step: add table 0 and table 1
over (w, x, y), and keep the minimum over w as table 2. The sum has the shape [2, w, x, y], and table 2 has [2, x, y].

Where a block repeats itself, so does its elimination. Tables that are equal, whatever the weights, are one array; and steps that add
equal arrays in one way are made once.

Example: a chain of four equal links [a, b], [b, c], [c, d], [d, e]. Eliminating b and d adds the same arrays twice. The two results
are one array [a, c] = [c, e], and the elimination of c is the second sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner_core.search.algebra.elimination import Elimination, Floats, Steps, Table, eliminate, order_largest_last
from planner_core.search.algebra.least_sum import least_sum
from planner_core.search.network.folded import CompiledNetwork

MAX_JOINT_ENTRIES = 1_000_000
"""Entries of the largest table that is made for all states of shared tensors together. What would need a larger one is solved for
each such state by itself."""


@dataclass(frozen=True, slots=True)
class Term:
    """A table of a sum: the number of its array, and the order and the shape [variant, ...] in which it is added."""

    array: int
    order: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(slots=True)
class Recipe:
    """How the inside of a block is eliminated, whatever its costs.

    `scopes` has the variables of each table, and `arrays` the number of its array: first those of the block's factors, then the
    result of each step that has tables. `sums` are the distinct sums: the minimum of each over its first variable is a further array.
    `steps` has each variable with the tables that contained it. `remaining_tables` are the tables at the end, and `remaining` the
    variables of the block's sequence that are not eliminated.
    """

    scopes: list[tuple[str, ...]]
    arrays: list[int]
    sums: list[tuple[Term, ...]]
    steps: list[tuple[str, list[int]]]
    remaining_tables: list[int]
    remaining: list[str]


def elimination_recipe(compiled: CompiledNetwork, wanted: Sequence[tuple[str, ...]], kinds: Sequence[int]) -> Recipe:
    """The recipe of a network with tables over the variables `wanted` [table]. Tables of one of the `kinds` [table] are equal. What
    needs a table of more than SMALL entries is left. The network keeps it."""
    if (key := (tuple(wanted), tuple(kinds))) not in compiled.recipes:
        compiled.recipes[key] = _make_recipe(compiled, Recipe([*wanted], [*kinds], [], [], [], []))
    found: Recipe = compiled.recipes[key]
    return found


def _make_recipe(compiled: CompiledNetwork, made: Recipe) -> Recipe:
    """The recipe, which is `made` from one that has the scopes and arrays of the factors alone."""
    sizes, scopes = compiled.sizes, made.scopes
    rank = {v: i for i, v in enumerate(compiled.sequence)}
    entries = [math.prod(sizes[v] for v in scope) for scope in scopes]
    pool: dict[str, list[int]] = {v: [] for v in compiled.sequence}
    known: dict[tuple[Term, ...], int] = {}
    first_sum = 1 + max(made.arrays, default=-1)

    def put(table: int) -> None:
        first = min((v for v in scopes[table] if v in rank), key=rank.__getitem__, default=None)
        (made.remaining_tables if first is None else pool[first]).append(table)

    for table in range(len(scopes)):
        put(table)
    late: set[str] = set()
    for v in compiled.sequence:
        mine = sorted(pool[v], key=entries.__getitem__)
        others = order_largest_last((o for table in mine for o in scopes[table] if o != v), sizes)
        size = math.prod(sizes[o] for o in others)
        if v in late or size * sizes[v] > MAX_JOINT_ENTRIES:
            late.update(others, (v,))  # without it, its neighbours would meet in larger tables
            continue
        del pool[v]
        made.steps.append((v, mine))
        if mine:
            parts = tuple(_make_term(made.arrays[table], scopes[table], (v, *others), sizes) for table in mine)
            scopes.append(others)
            entries.append(size)
            made.arrays.append(first_sum + known.setdefault(parts, len(known)))
            put(len(scopes) - 1)
    made.sums, made.remaining = [*known], [v for v in compiled.sequence if v in pool]
    made.remaining_tables += [table for v in made.remaining for table in pool[v]]
    return made


def _make_term(array: int, scope: tuple[str, ...], wanted: tuple[str, ...], sizes: Mapping[str, int]) -> Term:
    places = [wanted.index(v) for v in scope]
    order = sorted(range(len(scope)), key=places.__getitem__)
    shape = tuple(sizes[v] if v in scope else 1 for v in wanted)
    return Term(array, (0, *(1 + k for k in order)), (-1, *shape))


class ReducedBlock:
    """Arrays [variant, ...] of networks of one form, after what the recipe says was eliminated."""

    def __init__(self, recipe: Recipe, arrays: list[Floats]) -> None:
        self.recipe, self.arrays = recipe, arrays
        for parts in recipe.sums:
            arrays.append(least_sum([arrays[p.array].transpose(p.order).reshape(p.shape) for p in parts]))


def eliminate_inside(variants: Sequence[CompiledNetwork], weights: Floats) -> ReducedBlock:
    """The `variants` of a block after their inside was eliminated, with costs that are weighted with `weights` [component]."""
    first, apart = variants[0], [c.distinct for c in variants]
    sizes = first.sizes
    flat = [weights @ d.costs + d.barrier for d in apart]
    known: dict[tuple[int, ...], int] = {}
    kinds: list[int] = []
    scopes: list[tuple[str, ...]] = []
    arrays: list[Floats] = []
    # Factors are equal if they are equal in each variant.
    for f, kind in zip(first.factors, zip(*(d.kinds for d in apart), strict=True), strict=True):
        scopes.append(tuple(v for v in f.vars if sizes[v] != 1))
        kinds.append(known.setdefault(kind, len(known)))
        if kinds[-1] == len(arrays):
            starts = [d.starts[k] for d, k in zip(apart, kind, strict=True)]
            mine = [table[at : at + f.allowed.size] for table, at in zip(flat, starts, strict=True)]
            together = np.stack(mine) if len(mine) > 1 else mine[0]
            arrays.append(together.reshape(-1, *(sizes[v] for v in scopes[-1])))
    return ReducedBlock(elimination_recipe(first, scopes, kinds), arrays)


def eliminate_all(compiled: CompiledNetwork, tables: Sequence[Table]) -> Elimination:
    """The `tables` of a network without a boundary, after all of its variables were eliminated."""
    names = [scope for scope, _ in tables]
    each = elimination_recipe(compiled, names, range(len(names)))
    inside = ReducedVariant(ReducedBlock(each, [array[None] for _, array in tables]), 0)
    found = eliminate(compiled.sizes, inside.remaining_tables, inside.remaining, ())
    found.previous = inside
    return found


class ReducedVariant:
    """Variant number `k` of a reduced block: its `remaining_tables`, and the steps back to the eliminated variables."""

    def __init__(self, reduced: ReducedBlock, k: int) -> None:
        self._reduced, self._k = reduced, k
        self.remaining_tables: list[Table] = [self._table(t) for t in reduced.recipe.remaining_tables]
        self.remaining = reduced.recipe.remaining

    def _table(self, number: int) -> Table:
        made = self._reduced.recipe
        return made.scopes[number], self._reduced.arrays[made.arrays[number]][self._k]

    @cached_property
    def steps(self) -> Steps:
        """Each variable in the order of elimination, with the tables in which it stood."""
        return [(variable, [self._table(t) for t in tables]) for variable, tables in self._reduced.recipe.steps]
