"""Find the weighted sum that bounds the step's time best, given some assignments.

Each assignment i of one unit gives a line over the share u: its weighted sum at u. A search at u finds a bound that is at most
the least of these lines. So the share to try next is the one at which the least line is highest (Kelley's method of cutting
planes). There are four shares in [0, 1]; they are moved one at a time.

    next u = argmax over u of  min over i of  (u · first side of i + (1 - u) · second side of i)

Example (docs/SEARCH.md, section 5): assignment p has the sides (10.4, 4), assignment q has (9.2, 12). Their lines cross where
10.4 u + 4 (1 - u) = 9.2 u + 12 (1 - u), so at u = 8 / 9.2 = 0.87. Both cost 9.57 there: a search at 0.87 may prove 9.57.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner_core.cost import Floats, Shares
from planner_core.search.algebra.distinct import sorted_distinct
from planner_core.search.objective import Objective

SWEEPS = 2
DIMS = len(Shares._fields)


def best_shares(objective: Objective, assignments: Sequence[Floats], start_shares: Shares) -> Shares:
    """Return the shares at which the cheapest assignment of `assignments` (totals [component] each) costs most, moved one share at
    a time."""
    shares = np.array(start_shares)
    totals = np.stack(assignments)  # [assignment, component]
    for _ in range(SWEEPS):
        for dim in range(DIMS):
            low, high = (totals @ objective.weights(_move_share(shares, dim, end)) for end in (0.0, 1.0))
            shares[dim] = _highest_point(low, high, shares[dim])
    return Shares(*map(float, shares))


def _move_share(shares: Floats, dim: int, value: float) -> Shares:
    moved = shares.copy()
    moved[dim] = value
    return Shares(*map(float, moved))


def _highest_point(low: Floats, high: Floats, current: float) -> float:
    """Return the point of [0, 1] at which the least line is highest; `current` if it is nowhere higher than there.

    Line i is `low[i]` at 0 and `high[i]` at 1. The highest point is at an end or where two lines cross.
    """
    slope = high - low
    with np.errstate(divide="ignore", invalid="ignore"):
        cross = (low[None, :] - low[:, None]) / (slope[:, None] - slope[None, :])
    # The least of lines is concave, so its highest point is where two lines cross or at an end. So these are all tried.
    points = sorted_distinct(
        np.concatenate([[current, 0.0, 1.0], cross[np.isfinite(cross) & (cross > 0) & (cross < 1)]])
    )
    lowest_line = (low[None, :] + points[:, None] * slope[None, :]).min(axis=1)  # [point]
    best = lowest_line.max()
    return (
        current
        if lowest_line[np.searchsorted(points, current)] >= best - 1e-12 * abs(best)
        else float(points[lowest_line.argmax()])
    )
