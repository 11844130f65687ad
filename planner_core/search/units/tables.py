"""The factors of a cost network as the plain tables on which elimination works."""

from __future__ import annotations

from collections.abc import Sequence

from planner_core.cost import Floats
from planner_core.search.algebra.elimination import Table
from planner_core.search.network.factors import Factor


def weighted_tables(factors: Sequence[Factor], weights: Floats) -> list[Table]:
    """Tables of one number per entry: the components weighted with `weights` [component]; infinite if an entry is impossible."""
    return [drop_fixed_variables(f.vars, f.costs.weighted(weights) + f.barrier) for f in factors]


def sum_tables(factors: Sequence[Factor], sums: Floats) -> list[Table]:
    """Tables [sum, entry of their variables]: several weighted sums of the components, with weights `sums` [sum, component]."""
    return [drop_fixed_variables(f.vars, f.costs.weighted(sums)) for f in factors]


def drop_fixed_variables(names: tuple[str, ...], array: Floats) -> Table:
    """Return the table without the variables that have one state. There may be more of these than numpy allows dims. Leading dims that
    name no variable stay."""
    num_leading = array.ndim - len(names)
    single = [i for i in range(len(names)) if array.shape[num_leading + i] == 1]
    return tuple(v for i, v in enumerate(names) if i not in single), array.squeeze(
        axis=tuple(num_leading + i for i in single)
    )
