"""How far a search within a budget of memory goes: one value that all its parts are given.

Two things are limited, and they have two names: a *budget* is bytes per GPU, and an *allowance* is a number of points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from planner_core.search.algebra.pareto_points import PointAllowance


def never_stop() -> bool:
    """Let a search run to its end."""
    return False


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """When a search ends before its answer is proven, and the guess with which it begins.

    Attributes:
        abandon_above: Give up as soon as the bound is above this value, in seconds.
        stop: Is called between solutions. If it returns True, the search stops with its incumbent.
        prove: If False, the gap that prices of memory leave stays open.
        bound_only: The caller needs a bound only: its gap stays open, and no better incumbents are searched.
        prices: Prices of memory that bounded a similar problem well, in seconds per byte at the end of forward and at the end of
            backward. If they bound this one above `abandon_above`, that is all.
        points: The points that may be formed to close gaps; what is formed is taken from it. None: each search has an allowance of its
            own.
        max_open_gap: If the incumbent is at most this share above the bound, only a gap that closes at once is closed. Of a bound only: it
            is high enough if no prices can raise it by more than half of this share, and none above `abandon_above`.
        of_sums: The bound may be that of assignments whose sum of memory is within the budget, which a walk of another may be too. To
            lower it to the walk takes a network of its own.
    """

    abandon_above: float = math.inf
    stop: Callable[[], bool] = never_stop
    prove: bool = True
    bound_only: bool = False
    prices: tuple[float, float] = (0.0, 0.0)
    points: PointAllowance | None = None
    max_open_gap: float = 0.0
    of_sums: bool = False


TO_THE_END = SearchLimits()
"""Nothing ends the search before its answer is proven, but the points that one search may form."""
UNPROVEN = SearchLimits(prove=False)
"""What prices of memory find, without an enumeration."""
