"""Places names at points without overlap. Each takes the nearest free place, with a leader line if that is further away."""

from __future__ import annotations

from collections.abc import Sequence

from explorer.graph.layered import text_width

HEIGHT = 16.0
NAME_OFFSET = 15.0
"""Pixels from a point to its name."""
STEPS = tuple(sign * 18 * k for k in range(8) for sign in (-1, 1))[1:]

Rect = tuple[float, float, float, float]


def place_names(
    points: Sequence[tuple[float, float]], names: Sequence[str], width: float, height: float, drawn: Sequence[Rect] = ()
) -> list[tuple[float, float]]:
    """Return the offset in pixels (right, down) from each point to the left middle of its name.

    `width` and `height` are those of the plot, `drawn` the rectangles that are taken already.
    """
    occupied: list[Rect] = [(x - 8, y - 8, x + 8, y + 8) for x, y in points]
    occupied += drawn
    offsets: list[tuple[float, float]] = [(NAME_OFFSET, 0.0)] * len(points)
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        x, y = points[i]
        length = text_width(names[i], 12.5)
        options = [(dx, float(dy)) for dy in STEPS for dx in (NAME_OFFSET, -NAME_OFFSET - length)]
        free = [o for o in options if 0 <= x + o[0] <= width - length and HEIGHT / 2 <= y + o[1] <= height - HEIGHT / 2]
        # Its own mark may touch it. Marks come first in `occupied`, in the order of the points.
        others = occupied[:i] + occupied[i + 1 :]
        # 100 for each pixel that is covered: any free place is better, then the nearest one, then the right side.
        best = min(
            free or options,
            key=lambda o: _covered_area(_name_box(x, y, o, length), others) * 100 + abs(o[1]) + (o[0] < 0),
        )
        offsets[i] = best
        occupied.append(_name_box(x, y, best, length))
    return offsets


def _name_box(x: float, y: float, offset: tuple[float, float], long: float) -> Rect:
    left, middle = x + offset[0], y + offset[1]
    return left, middle - HEIGHT / 2, left + long, middle + HEIGHT / 2


def _covered_area(box: Rect, others: Sequence[Rect]) -> float:
    total = 0.0
    for o in others:
        total += max(0.0, min(box[2], o[2]) - max(box[0], o[0])) * max(0.0, min(box[3], o[3]) - max(box[1], o[1]))
    return total
