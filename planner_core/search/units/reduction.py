"""Eliminate the inside of a block in all its variants at once.

The variants of a block have the same variables and tables, and the same order of elimination; only the numbers differ. So which
tables are added for which variable is worked out once for a block (`Recipe`), and every array has a leading dim [variant].

Example: a block has the tables [x, w] and [w, y], and is kept or recomputed. Its recipe has one step: add table 0 and table 1
over (w, x, y), and keep the minimum over w as table 2. The sum has the shape [2, w, x, y], and table 2 has [2, x, y].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner_core.search.algebra.elimination import Elimination, Floats, Steps, Table, eliminate
from planner_core.search.network.folded import Compiled

SMALL = 1_000_000
"""Entries of the largest table that is made for all states of shared tensors together. What would need a larger one is solved for
each such state by itself."""


@dataclass(frozen=True, slots=True)
class Part:
    """A table of a sum: its number, and the order and the shape [variant, ...] in which it is added."""

    table: int
    order: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One variable is eliminated: the minimum over its states of the sum of `parts`."""

    variable: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the inside of a block is eliminated, whatever its costs.

    `scopes` has the variables of each table: first those of the block's factors, then the result of each step that has parts.
    `rest` are the tables that are left at the end, and `left` the variables of the block's sequence that are left.
    """

    scopes: list[tuple[str, ...]]
    steps: list[Step]
    rest: list[int]
    left: list[str]


def recipe(compiled: Compiled, wanted: Sequence[tuple[str, ...]]) -> Recipe:
    """The recipe of a network with tables over the variables `wanted` [table]. It stops before the first variable that needs a table
    of more than SMALL entries. The network keeps it."""
    if (key := tuple(wanted)) not in compiled.recipes:
        compiled.recipes[key] = _recipe(compiled, [*wanted])
    found: Recipe = compiled.recipes[key]
    return found


def _recipe(compiled: Compiled, scopes: list[tuple[str, ...]]) -> Recipe:
    sizes = compiled.sizes
    rank = {v: i for i, v in enumerate(compiled.sequence)}
    entries = [math.prod(sizes[v] for v in scope) for scope in scopes]
    pool: dict[str, list[int]] = {v: [] for v in compiled.sequence}
    last: list[int] = []

    def put(table: int) -> None:
        first = min((v for v in scopes[table] if v in rank), key=rank.__getitem__, default=None)
        (last if first is None else pool[first]).append(table)

    for table in range(len(scopes)):
        put(table)
    steps: list[Step] = []
    for i, v in enumerate(compiled.sequence):
        mine = sorted(pool[v], key=entries.__getitem__)
        others = tuple(dict.fromkeys(o for table in mine for o in scopes[table] if o != v))
        size = math.prod(sizes[o] for o in others)
        if size * sizes[v] > SMALL:
            return Recipe(
                scopes, steps, [*last, *(t for tables in pool.values() for t in tables)], compiled.sequence[i:]
            )
        del pool[v]
        steps.append(Step(v, tuple(_part(table, scopes[table], (v, *others), sizes) for table in mine)))
        if mine:
            scopes.append(others)
            entries.append(size)
            put(len(scopes) - 1)
    return Recipe(scopes, steps, last, [])


def _part(table: int, scope: tuple[str, ...], wanted: tuple[str, ...], sizes: Mapping[str, int]) -> Part:
    places = [wanted.index(v) for v in scope]
    order = sorted(range(len(scope)), key=places.__getitem__)
    shape = tuple(sizes[v] if v in scope else 1 for v in wanted)
    return Part(table, (0, *(1 + k for k in order)), (-1, *shape))


class Reduced:
    """Tables [variant, ...] of networks of one form, after what the recipe says was eliminated."""

    def __init__(self, recipe: Recipe, tables: list[Floats]) -> None:
        self.recipe, self.tables = recipe, tables
        for step in recipe.steps:
            if step.parts:
                total, *more = (tables[p.table].transpose(p.order).reshape(p.shape) for p in step.parts)
                for array in more:
                    total = total + array
                tables.append(total.min(axis=1))


def reduced(variants: Sequence[Compiled], weights: Floats) -> Reduced:
    """The `variants` of a block after their inside was eliminated, with costs that are weighted with `weights` [component]."""
    first = variants[0]
    sizes = first.sizes
    flat = np.stack([weights @ c.costs + c.barrier for c in variants])
    tables: list[Floats] = []
    scopes = [tuple(v for v in f.vars if sizes[v] != 1) for f in first.factors]
    at = 0
    for f, scope in zip(first.factors, scopes, strict=True):
        tables.append(flat[:, at : at + f.allowed.size].reshape(-1, *(sizes[v] for v in scope)))
        at += f.allowed.size
    return Reduced(recipe(first, scopes), tables)


def solved(compiled: Compiled, tables: Sequence[Table]) -> Elimination:
    """The `tables` of a network without a boundary, after all of its variables were eliminated."""
    names = [scope for scope, _ in tables]
    inside = Inside(Reduced(recipe(compiled, names), [array[None] for _, array in tables]), 0)
    found = eliminate(compiled.sizes, inside.rest, inside.left, ())
    found.before = inside
    return found


class Inside:
    """Variant number `k` of a reduced block: the `rest` of its tables, and the steps back to the variables that were eliminated."""

    def __init__(self, reduced: Reduced, k: int) -> None:
        self._reduced, self._k = reduced, k
        self.rest: list[Table] = [self._table(t) for t in reduced.recipe.rest]
        self.left = reduced.recipe.left

    def _table(self, number: int) -> Table:
        return self._reduced.recipe.scopes[number], self._reduced.tables[number][self._k]

    @cached_property
    def steps(self) -> Steps:
        """Each variable in the order of elimination, with the tables in which it stood."""
        return [(s.variable, [self._table(p.table) for p in s.parts]) for s in self._reduced.recipe.steps]
