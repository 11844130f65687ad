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

from planner_core.search.algebra.elimination import Floats, Steps, Table
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


def recipe(compiled: Compiled) -> Recipe:
    """The recipe of a block. It stops before the first variable that needs a table of more than SMALL entries."""
    sizes = compiled.sizes
    rank = {v: i for i, v in enumerate(compiled.sequence)}
    scopes = [tuple(v for v in f.vars if sizes[v] != 1) for f in compiled.factors]
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
    """The `variants` of a block after their inside was eliminated, with costs that are weighted with `weights` [component]."""

    def __init__(self, variants: Sequence[Compiled], weights: Floats) -> None:
        first = variants[0]
        if not first.recipes:
            first.recipes.append(recipe(first))
        self.recipe: Recipe = first.recipes[0]
        flat = np.stack([weights @ c.costs + c.barrier for c in variants])
        self.tables: list[Floats] = []
        at = 0
        for f, scope in zip(first.factors, self.recipe.scopes, strict=False):
            sizes = tuple(n for n in f.allowed.shape if n != 1)
            assert len(sizes) == len(scope)
            self.tables.append(flat[:, at : at + f.allowed.size].reshape(-1, *sizes))
            at += f.allowed.size
        for step in self.recipe.steps:
            if step.parts:
                total, *more = (self.tables[p.table].transpose(p.order).reshape(p.shape) for p in step.parts)
                for array in more:
                    total = total + array
                self.tables.append(total.min(axis=1))


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
