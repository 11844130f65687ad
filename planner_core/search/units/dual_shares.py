"""Which weighted sum bounds the step's time best, given assignments that were found.

Of one unit, each assignment k gives a line: the weighted sum of its components at shares u. The least line at u is what a
search at u can reach at most among these assignments; the shares at which that is highest are the ones to try next
(Kelley's cutting planes, in four dims of [0, 1], one dim at a time).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner_core.cost import Shares
from planner_core.search.network.states import Floats
from planner_core.search.objective import Objective

SWEEPS = 2
DIMS = len(Shares._fields)


def best_shares(objective: Objective, found: Sequence[Floats], start: Shares) -> Shares:
    """Shares in whose weighted sum the cheapest of `found` (totals [component] each) is as dear as one dim at a time can make it."""
    at = np.array(start)
    totals = np.stack(found)  # [assignment, component]
    for _ in range(SWEEPS):
        for dim in range(DIMS):
            low, high = (totals @ objective.weights(_with(at, dim, end)) for end in (0.0, 1.0))
            at[dim] = _highest(low, high, at[dim])
    return Shares(*map(float, at))


def _with(at: Floats, dim: int, value: float) -> Shares:
    moved = at.copy()
    moved[dim] = value
    return Shares(*map(float, moved))


def _highest(low: Floats, high: Floats, now: float) -> float:
    """Where in [0, 1] the least of the lines from `low` to `high` [line] is highest; `now` if it is nowhere higher."""
    slope = high - low
    with np.errstate(divide="ignore", invalid="ignore"):
        cross = (low[None, :] - low[:, None]) / (slope[:, None] - slope[None, :])
    points = np.unique(np.concatenate([[now, 0.0, 1.0], cross[np.isfinite(cross) & (cross > 0) & (cross < 1)]]))
    least = (low[None, :] + points[:, None] * slope[None, :]).min(axis=1)  # [point]
    best = least.max()
    return now if least[np.searchsorted(points, now)] >= best - 1e-12 * abs(best) else float(points[least.argmax()])
