"""The corners of the lower left hull of (cost, memory), each found by one search at a price of memory.

Take two known corners. The slope of the line through them is a price of memory. A search at this price finds a corner below
the line, or it shows that none exists (the dichotomic scheme of Cohon, 1978). Gaps are split in the order in which they were
found, so that a few corners are spread well.

Example: the corners (10 s, 9 GB) and (14 s, 5 GB) give the price (14 - 10) / (9 - 5) = 1 s per GB; both cost 19 at it. A plan
of (11 s, 6 GB) costs 17 and is a new corner. A plan of (12 s, 8 GB) costs 20: it lies above the line and is not a corner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
Point = tuple[float, float]
"""Cost in seconds, memory in bytes."""


def slope(a: Point, b: Point) -> float:
    """Cost per byte on the line from `a` to `b`, which costs more and holds less. 0 if `b` is not such a point."""
    saved, slower = a[1] - b[1], b[0] - a[0]
    return slower / saved if saved > 1 and slower > 0 else 0.0


def find_hull_corners(
    fast: T, small: T, at: Callable[[T], Point], below: Callable[[T, T], T | None], most: int, tie: float
) -> list[T]:
    """At most `most` corners by rising cost, from `fast` (the least cost) to `small` (the least memory).

    `at` gives the cost and the bytes of a corner. `below` searches for the best at the price of the line through two corners. `tie` is
    the relative difference below which two weighted sums count as equal.
    """
    if slope(at(fast), at(small)) == 0.0:
        return [fast]
    kept, gaps = [fast, small], deque([(fast, small)])
    while gaps and len(kept) < most:
        a, b = gaps.popleft()
        price = slope(at(a), at(b))
        found = below(a, b) if price else None
        if found is not None and weighted_sum(at(found), price) < weighted_sum(at(a), price) * (1 - tie):
            kept.append(found)
            gaps += [(a, found), (found, b)]
    return _falling_in_memory(sorted(kept, key=at), at)


def _falling_in_memory(points: list[T], at: Callable[[T], Point]) -> list[T]:
    """The points that hold less than all points before them, of points by rising cost. An end may be dominated, since it may tie
    with another point in cost or in memory."""
    corners: list[T] = []
    for point in points:
        if not corners or at(point)[1] < at(corners[-1])[1] - 1:
            corners.append(point)
    return corners


def lower_hull(points: Iterable[Point]) -> list[Point]:
    """The corners of the lower left hull of some points, by rising cost."""
    kept: list[Point] = []
    for point in _falling_in_memory(sorted(points), lambda p: p):
        while len(kept) > 1 and slope(kept[-2], kept[-1]) >= slope(kept[-1], point):
            kept.pop()
        kept.append(point)
    return kept


def weighted_sum(point: Point, price: float) -> float:
    """The cost and the memory of a point at a price per byte, in seconds."""
    return point[0] + price * point[1]
