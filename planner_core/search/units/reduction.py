"""Eliminate the inside of a block in all its variants at once.

The variants of a block have the same variables and tables, and the same order of elimination; only the numbers differ. So which
tables are added for which variable is worked out once for a block (`Recipe`), and every array has a leading dim [row]. Variants whose
tables are equal share a row.

Example: a block has the tables [x, w] and [w, y], and is kept or recomputed. Its recipe has one step: add table 0 and table 1
over (w, x, y), and keep the minimum over w as table 2. If only table 0 differs between the two, table 0 has the shape [2, x, w] and
table 1 has [1, w, y]. The sum has the shape [2, w, x, y], and table 2 has [2, x, y].

Where a block repeats itself, so does its elimination. Tables that are equal under all weights are one array, and steps that add
equal arrays in the same order are computed once.

Example: a chain of four equal links [a, b], [b, c], [c, d], [d, e]. Eliminating b and d adds the same arrays twice. The two results
are one array [a, c] = [c, e], and the elimination of c is the second sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner_core.cost import Floats
from planner_core.search.algebra.elimination import Elimination, Steps, Table, eliminate, order_largest_last
from planner_core.search.algebra.elimination_order import order_entries
from planner_core.search.algebra.least_sum import least_sum
from planner_core.search.algebra.reduced_costs import eliminate_possible, projection_work
from planner_core.search.network.folded import CompiledNetwork

MAX_JOINT_ENTRIES = 1_000_000
"""Entries of the largest table over all states of shared tensors together. A variable that needs a larger one is eliminated for
each such state separately."""

MAX_UNPRUNED_ENTRIES = 10_000_000
"""Entries of all tables of an elimination above which states are removed before it, if that looks at fewer."""


@dataclass(frozen=True, slots=True)
class Addend:
    """A table of a sum: the number of its array, the `rows` of the array that are added (all of them, if None), and the order and the
    shape [row, ...] in which they are."""

    array: int
    rows: tuple[int, ...] | None
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, arrays: Sequence[Floats]) -> Floats:
        """Return the table from the `arrays` of a block."""
        array = arrays[self.array] if self.rows is None else arrays[self.array][[*self.rows]]
        return array.transpose(self.order).reshape(self.shape)


@dataclass(slots=True)
class Recipe:
    """The order of operations that eliminates the inside of a block. It does not depend on the costs.

    `scopes` has the variables of each table, and `arrays` the number of its array: first those of the block's factors, then the
    result of each step that has tables. `rows` [array, variant] is the row of the array in which the variant's table stands: variants
    whose tables are equal have one row. `sums` are the distinct sums: the minimum of each over its first variable is a further array.
    `steps` has each variable with the tables that contained it. `remaining_tables` are the tables at the end, and `remaining` the
    variables of the block's sequence that are not eliminated.
    """

    scopes: list[tuple[str, ...]]
    arrays: list[int]
    rows: list[tuple[int, ...]]
    sums: list[tuple[Addend, ...]]
    steps: list[tuple[str, list[int]]]
    remaining_tables: list[int]
    remaining: list[str]


def elimination_recipe(
    compiled: CompiledNetwork, scopes: Sequence[tuple[str, ...]], kinds: Sequence[int], rows: Sequence[tuple[int, ...]]
) -> Recipe:
    """Return the recipe of a network with tables over the variables `scopes` [table]. Tables of equal `kinds` [table] are equal; each
    kind has its `rows` [kind, variant]. What needs a table of more than MAX_JOINT_ENTRIES entries is left. The network keeps it."""
    if (key := (tuple(scopes), tuple(kinds), tuple(rows))) not in compiled.recipes:
        compiled.recipes[key] = _make_recipe(compiled, Recipe([*scopes], [*kinds], [*rows], [], [], [], []))
    recipe: Recipe = compiled.recipes[key]
    return recipe


def _make_recipe(compiled: CompiledNetwork, recipe: Recipe) -> Recipe:
    """Complete a `recipe` that has the scopes and arrays of the factors alone, and return it."""
    sizes, scopes = compiled.sizes, recipe.scopes
    rank = {v: i for i, v in enumerate(compiled.sequence)}
    entries = [math.prod(sizes[v] for v in scope) for scope in scopes]
    tables_of: dict[str, list[int]] = {v: [] for v in compiled.sequence}
    sum_numbers: dict[tuple[Addend, ...], int] = {}
    first_sum = 1 + max(recipe.arrays, default=-1)

    def put(table: int) -> None:
        first = min((v for v in scopes[table] if v in rank), key=rank.__getitem__, default=None)
        (recipe.remaining_tables if first is None else tables_of[first]).append(table)

    for table in range(len(scopes)):
        put(table)
    postponed: set[str] = set()
    for v in compiled.sequence:
        # The order decides whether two sums are equal (`sum_numbers`), and small tables first keep few sums at full size.
        tables_of_variable = sorted(tables_of[v], key=entries.__getitem__)
        others = order_largest_last((o for table in tables_of_variable for o in scopes[table] if o != v), sizes)
        size = math.prod(sizes[o] for o in others)
        if v in postponed or size * sizes[v] > MAX_JOINT_ENTRIES:
            postponed.update(others, (v,))  # without it, its neighbours would meet in larger tables
            continue
        del tables_of[v]
        recipe.steps.append((v, tables_of_variable))
        if tables_of_variable:
            rows, rows_of_tables = _join_rows([recipe.rows[recipe.arrays[table]] for table in tables_of_variable])
            parts = tuple(
                _make_term(recipe.arrays[table], rows_of_table, scopes[table], (v, *others), sizes)
                for table, rows_of_table in zip(tables_of_variable, rows_of_tables, strict=True)
            )
            scopes.append(others)
            entries.append(size)
            if parts not in sum_numbers:
                sum_numbers[parts] = len(sum_numbers)
                recipe.rows.append(rows)
            recipe.arrays.append(first_sum + sum_numbers[parts])
            put(len(scopes) - 1)
    recipe.sums, recipe.remaining = [*sum_numbers], [v for v in compiled.sequence if v in tables_of]
    # Postponed variables are eliminated later, for each state of the shared tensors, where their tables are smaller.
    recipe.remaining_tables += [table for v in recipe.remaining for table in tables_of[v]]
    return recipe


def _join_rows(
    rows_of_tables: Sequence[tuple[int, ...]],
) -> tuple[tuple[int, ...], list[tuple[int, ...] | None]]:
    """Return the rows [variant] of a sum of tables with these rows [table, variant], and which rows of each table are added in its rows;
    None if they are those of the table.

    Example: a block is kept, recomputed in part, or recomputed, and two tables have the rows (0, 0, 1) and (0, 1, 1). Their sum has the
    rows (0, 1, 2): the rows 0, 0, 1 of the first table and 0, 1, 1 of the second.
    """
    numbers: dict[tuple[int, ...], int] = {}
    rows = tuple(numbers.setdefault(joint, len(numbers)) for joint in zip(*rows_of_tables, strict=True))
    added = [tuple(joint[k] for joint in numbers) for k in range(len(rows_of_tables))]
    # One row is broadcast, so it is not repeated.
    return rows, [
        None if max(of) == 0 or a == tuple(range(max(of) + 1)) else a
        for of, a in zip(rows_of_tables, added, strict=True)
    ]


def _make_term(
    array: int,
    rows: tuple[int, ...] | None,
    scope: tuple[str, ...],
    target_scope: tuple[str, ...],
    sizes: Mapping[str, int],
) -> Addend:
    positions = [target_scope.index(v) for v in scope]
    order = sorted(range(len(scope)), key=positions.__getitem__)
    shape = tuple(sizes[v] if v in scope else 1 for v in target_scope)
    return Addend(array, rows, (0, *(1 + k for k in order)), (-1, *shape))


class ReducedBlock:
    """Arrays [row, ...] of networks of one form, after the eliminations of a recipe."""

    def __init__(self, recipe: Recipe, arrays: list[Floats]) -> None:
        self.recipe, self.arrays = recipe, arrays
        for parts in recipe.sums:
            arrays.append(least_sum([part.of(arrays) for part in parts]))


@dataclass(frozen=True, slots=True)
class InsideTables:
    """The tables inside a block in some of its variants: for each array the numbers of its rows in the block's pool and its shape
    [row, ...], and the recipe that eliminates them. They do not depend on the costs."""

    arrays: list[tuple[tuple[int, ...], tuple[int, ...]]]
    recipe: Recipe

    @staticmethod
    def of(variants: Sequence[CompiledNetwork]) -> InsideTables:
        """Return the tables of the `variants` of a block. Its network keeps them."""
        first = variants[0]
        if (key := tuple(c.kinds for c in variants)) not in first.recipes:
            first.recipes[key] = _collect_tables(first, [*zip(*key, strict=True)])
        tables: InsideTables = first.recipes[key]
        return tables


def _collect_tables(first: CompiledNetwork, kinds_of: Sequence[tuple[int, ...]]) -> InsideTables:
    """Return the tables of a block whose factors are the tables `kinds_of` [factor, variant] of its pool."""
    numbers: dict[tuple[int, ...], int] = {}
    kinds: list[int] = []
    scopes: list[tuple[str, ...]] = []
    arrays: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    rows: list[tuple[int, ...]] = []
    # Factors are equal if they are equal in each variant.
    for f, kind in zip(first.factors, kinds_of, strict=True):
        scopes.append(tuple(v for v in f.vars if first.sizes[v] != 1))
        kinds.append(numbers.setdefault(kind, len(numbers)))
        if kinds[-1] == len(arrays):
            row_numbers: dict[int, int] = {}
            rows.append(tuple(row_numbers.setdefault(number, len(row_numbers)) for number in kind))
            arrays.append(((*row_numbers,), (-1, *(first.sizes[v] for v in scopes[-1]))))
    return InsideTables(arrays, elimination_recipe(first, scopes, kinds, rows))


def eliminate_inside(variants: Sequence[CompiledNetwork], weights: Floats) -> ReducedBlock:
    """Return the `variants` of a block after their inside was eliminated, with costs that are weighted with `weights` [component]."""
    inside, pool = InsideTables.of(variants), variants[0].pool
    return ReducedBlock(
        inside.recipe, [pool.weighted(numbers, weights).reshape(shape) for numbers, shape in inside.arrays]
    )


def eliminate_all(compiled: CompiledNetwork, tables: Sequence[Table]) -> Elimination:
    """Return the `tables` of a network without a boundary, after all of its variables were eliminated."""
    names = [scope for scope, _ in tables]
    numbers: dict[int, int] = {}
    # Equal links share one array object, so identity finds them without comparing numbers. The caller holds them, so no id is reused.
    kinds = [numbers.setdefault(id(array), len(numbers)) for _, array in tables]
    arrays = list({id(array): array[None] for _, array in tables}.values())
    recipe = elimination_recipe(compiled, names, kinds, [(0,)] * len(arrays))
    reduced = ReducedVariant(ReducedBlock(recipe, arrays), 0)
    tables, sizes = reduced.remaining_tables, compiled.sizes
    kinds = [recipe.arrays[t] for t in recipe.remaining_tables]
    total = order_entries(sizes, [scope for scope, _ in tables], reduced.remaining)
    work = sum(projection_work(array) for array in {k: t for k, (_, t) in zip(kinds, tables, strict=True)}.values())
    if total <= max(MAX_UNPRUNED_ENTRIES, work):
        solution = eliminate(sizes, tables, reduced.remaining, ())
    else:
        solution = eliminate_possible(sizes, tables, kinds)
    solution.previous = reduced
    return solution


class ReducedVariant:
    """Variant number `k` of a reduced block: its `remaining_tables`, and the steps back to the eliminated variables."""

    def __init__(self, reduced: ReducedBlock, k: int) -> None:
        self._reduced, self._k = reduced, k
        self.remaining_tables: list[Table] = [self._table(t) for t in reduced.recipe.remaining_tables]
        self.remaining = reduced.recipe.remaining

    def _table(self, number: int) -> Table:
        recipe = self._reduced.recipe
        array = recipe.arrays[number]
        return recipe.scopes[number], self._reduced.arrays[array][recipe.rows[array][self._k]]

    @cached_property
    def steps(self) -> Steps:
        """Each variable in the order of elimination, with the tables in which it stood."""
        return [(variable, [self._table(t) for t in tables]) for variable, tables in self._reduced.recipe.steps]
