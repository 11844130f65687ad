"""A limit on memory as a price of memory: the bound that the best price gives, and what is left to look at."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MemoryPrice:
    """The choices of one block with memory at a price, in ms per GiB: the best price's bound, the best choice that fits (its time and
    memory), and how many choices lie below the line through both."""

    price: float
    bound_ms: float
    best_ms: float
    best_gib: float
    left: int
    room_gib: float


def price_memory(ms: Floats, gib: Floats, room: float) -> MemoryPrice:
    """Return the price at which the bound `min(ms + price * gib) - price * room` is highest. It is the slope of the lower hull at
    `room`."""
    order = np.lexsort((ms, gib))
    hull: list[int] = []
    for i in map(int, order):
        if hull and ms[i] >= ms[hull[-1]]:
            continue  # sends no less and keeps more
        while len(hull) > 1 and _is_above_hull(ms, gib, hull[-2], hull[-1], i):
            hull.pop()
        hull.append(i)
    slopes = [(ms[a] - ms[b]) / (gib[b] - gib[a]) for a, b in itertools.pairwise(hull)]
    bounds = [float((ms + p * gib).min() - p * room) for p in (0.0, *slopes)]
    k = int(np.argmax(bounds))
    price = float((0.0, *slopes)[k])
    at = int(np.where(gib <= room, ms, np.inf).argmin())
    best = float(ms[at])
    below = int(((ms + price * gib) < best + price * room - 1e-9).sum())
    return MemoryPrice(price, bounds[k], best, float(gib[at]), below, room)


def _is_above_hull(ms: Floats, gib: Floats, a: int, b: int, c: int) -> bool:
    """Return whether b lies above the line from a to c."""
    return bool((ms[b] - ms[a]) * (gib[c] - gib[a]) >= (ms[c] - ms[a]) * (gib[b] - gib[a]))
