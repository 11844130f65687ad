"""Corners of the lower left hull of (cost, memory), each found by one search at a price of memory.

The price of the line between two known corners finds a third below it, or shows that there is none (the dichotomic scheme of
Cohon, 1978). Wide gaps are split first, so that few corners are spread well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Point = tuple[float, float]
"""Cost in seconds, memory in bytes."""


def slope(a: Point, b: Point) -> float:
    """Cost per byte on the line from `a` to a point that costs more and holds less; 0 where `b` is no such point."""
    saved, slower = a[1] - b[1], b[0] - a[0]
    return slower / saved if saved > 1 and slower > 0 else 0.0


def hull(
    fast: T, small: T, at: Callable[[T], Point], priced: Callable[[float], T | None], most: int, tie: float
) -> list[T]:
    """Corners between the one of least cost and the one of least memory, by rising cost: these two and at most `most` in all.

    `at` gives cost and bytes of a corner, `priced` what is best at a price per byte; `tie` is the relative difference below
    which two weighted sums are one.
    """
    if slope(at(fast), at(small)) == 0.0:
        return [fast]
    kept, gaps = [fast, small], deque([(fast, small)])
    while gaps and len(kept) < most:
        a, b = gaps.popleft()
        price = slope(at(a), at(b))
        found = priced(price) if price else None
        if found is not None and _weighed(at(found), price) < _weighed(at(a), price) * (1 - tie):
            kept.append(found)
            gaps += [(a, found), (found, b)]
    return _unbeaten(sorted(kept, key=at), at)


def _unbeaten(points: list[T], at: Callable[[T], Point]) -> list[T]:
    """Of points by rising cost those that hold less than all before them: the ends may be beaten by what ties with them in one."""
    corners: list[T] = []
    for point in points:
        if not corners or at(point)[1] < at(corners[-1])[1] - 1:
            corners.append(point)
    return corners


def _weighed(point: Point, price: float) -> float:
    return point[0] + price * point[1]
