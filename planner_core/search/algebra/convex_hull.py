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
    # Bytes are sums of floats, so a difference of a byte or less is rounding, and its slope would mean nothing.
    saved, slower = a[1] - b[1], b[0] - a[0]
    return slower / saved if saved > 1 and slower > 0 else 0.0


def find_hull_corners(
    fastest: T,
    smallest: T,
    point_of: Callable[[T], Point],
    below: Callable[[T, T], T | None],
    max_corners: int,
    tie: float,
) -> list[T]:
    """Find at most `max_corners` corners, by rising cost, from `fastest` (the least cost) to `smallest` (the least memory).

    `point_of` returns the cost and the bytes of a corner. `below` searches for the best at the price of the line through two corners.
    `tie` is the relative difference below which two weighted sums count as equal.
    """
    if slope(point_of(fastest), point_of(smallest)) == 0.0:
        return [fastest]
    corners, gaps = [fastest, smallest], deque([(fastest, smallest)])
    while gaps and len(corners) < max_corners:
        a, b = gaps.popleft()
        # At this price a and b cost the same. A corner between them lies below their line, so its weighted sum is less; if none is, the gap
        # is closed. Example: a = (0 s, 4 GB) and b = (4 s, 0 GB) cost 4 at 1 s per GB; (1, 1) costs 2 and is a corner.
        price = slope(point_of(a), point_of(b))
        corner = below(a, b) if price else None
        if corner is not None and weighted_sum(point_of(corner), price) < weighted_sum(point_of(a), price) * (1 - tie):
            corners.append(corner)
            gaps += [(a, corner), (corner, b)]
    return _falling_in_memory(sorted(corners, key=point_of), point_of)


def _falling_in_memory(points: list[T], point_of: Callable[[T], Point]) -> list[T]:
    """Drop each point that does not hold less than all points before it. `points` are sorted by rising cost.

    An end of the hull may be dominated, since it may tie with another point in cost or in memory.
    """
    corners: list[T] = []
    for point in points:
        if not corners or point_of(point)[1] < point_of(corners[-1])[1] - 1:
            corners.append(point)
    return corners


def lower_hull(points: Iterable[Point]) -> list[Point]:
    """Return the corners of the lower left hull of some points, by rising cost."""
    corners: list[Point] = []
    for point in _falling_in_memory(sorted(points), lambda p: p):
        # On a convex hull each byte saved costs more than the one before. A corner where the price does not rise is above the line.
        while len(corners) > 1 and slope(corners[-2], corners[-1]) >= slope(corners[-1], point):
            corners.pop()
        corners.append(point)
    return corners


def weighted_sum(point: Point, price: float) -> float:
    """Return the cost and the memory of a point at a price per byte, in seconds."""
    return point[0] + price * point[1]
