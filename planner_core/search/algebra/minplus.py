"""Products and powers in the (min, +) semiring, with the way back.

It is the product of matrices with min for + and + for ×:  (a ⊗ b)[i, j] = min over k of a[i, k] + b[k, j].

Example: one copy of a block costs [[3, 3], [4, 2]] between the states before and after it. Two copies cost [[6, 5], [6, 4]].
Entry (0, 1) is min(3 + 3, 3 + 2) = 5, and its middle state is 1. The first dim of all arrays, s, is a batch of such matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner_core.cost import Floats, Ints


@dataclass(frozen=True, slots=True)
class MinPlusPower:
    """A (min, +) product: `cost` [s, i, j], and the state between its two factors, `middle` [s, i, j]. A leaf has no factors."""

    cost: Floats
    left: MinPlusPower | None = None
    right: MinPlusPower | None = None
    middle: Ints | None = None

    def cheapest_path(
        self, s: int, i: int, j: int, paths: dict[tuple[int, int, int], list[int]] | None = None
    ) -> list[int]:
        """Return the states between the links of the cheapest chain from `i` to `j`: one fewer than there are links. `paths`: the paths of
        factors, by identity and ends. Most chains are squares of squares, so few are worked out."""
        if self.left is None or self.right is None or self.middle is None:
            return []
        paths = {} if paths is None else paths
        key = id(self), i, j
        if key not in paths:
            k = int(self.middle[s, i, j])
            paths[key] = [*self.left.cheapest_path(s, i, k, paths), k, *self.right.cheapest_path(s, k, j, paths)]
        return paths[key]


def min_plus_product(a: MinPlusPower, b: MinPlusPower) -> MinPlusPower:
    """Return the product `a` ⊗ `b`: cost[s, i, j] = min over k of a[s, i, k] + b[s, k, j]."""
    if a.cost.shape[0] == 1:  # [i, j, k] at once, k innermost
        through = a.cost[0][:, None, :] + np.ascontiguousarray(b.cost[0].T)[None, :, :]
        middle = through.argmin(axis=2)
        return MinPlusPower(np.take_along_axis(through, middle[..., None], 2)[None, ..., 0], a, b, middle[None])
    # A batch goes k by k, so that no array [s, i, k, j] is formed: 50 matrices of 100 states would be 50 million sums.
    best = np.full((*a.cost.shape[:2], b.cost.shape[2]), np.inf)
    middle = np.zeros(best.shape, dtype=np.int64)
    for k in range(a.cost.shape[2]):
        step = a.cost[:, :, k, None] + b.cost[:, None, k, :]
        better = step < best
        np.copyto(best, step, where=better)
        np.copyto(middle, k, where=better)
    return MinPlusPower(best, a, b, middle)


def min_plus_power(link: MinPlusPower, count: int) -> MinPlusPower:
    """Return the product of `count` equal links, by repeated squaring: 5 links are (4 links) ⊗ (1 link)."""
    result: MinPlusPower | None = None
    square = link
    while True:
        if count & 1:
            result = square if result is None else min_plus_product(result, square)
        count >>= 1
        if not count:
            assert result is not None
            return result
        square = min_plus_product(square, square)
