"""An axis of a chart: where values stand on it, and its round values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """Places values along an axis: `low` at pixel `start`, `high` at pixel `end`, by their logarithms where `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = True

    def __call__(self, value: float) -> float:
        """Return where a value stands, in pixels."""
        low, high, at_value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        # If all values are one, the scale has no length, and the value stands at its start.
        return self.start + (at_value - low) / ((high - low) or 1) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round values on the scale: with logarithms powers of ten, and twice and five times each where they alone are fewer than
        three."""
        if not self.log:
            rough = (self.high - self.low) / 4 or 1.0
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(k * power for k in (1, 2, 5, 10) if k * power >= rough)
            return [k * step for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        powers = range(math.floor(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
        low, high = self.low * (1 - 1e-9), self.high * (1 + 1e-9)
        values: list[float] = []
        for factors in ((1,), (1, 2, 5)):
            values = [f * 10.0**k for k in powers for f in factors if low <= f * 10.0**k <= high]
            if len(values) > 2:
                break
        return values


def axis_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis around values: from zero, unless they fill less than half of it then."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.06 * (high - low or high or 1.0)
    return (low - margin if low > 0.5 * high else 0.0), high + margin
