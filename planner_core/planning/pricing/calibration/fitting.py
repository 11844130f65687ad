"""Fit the constants of a formula to timings: least squares of ln(predicted / measured), plus a price for leaving known values.

    minimise  sum over timings of (ln(predicted / measured) / SLACK)²  +  sum over constants of (ln(new / known) / WIDTH)²

The method takes Gauss-Newton steps in the logarithms of the constants. Each step is halved until the sum does not grow. A
constant on which no timing depends stays at its known value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from planner_core.cost import Floats

Predict = Callable[[Mapping[str, float]], Floats]
"""Predicts the seconds of every timing from the constants."""
MAX_STEPS, MAX_HALVINGS, DELTA = 25, 8, 1e-4
WIDTH = 1.0
"""To move a constant by a factor e costs as much as one timing that is off by SLACK."""
SLACK = 0.1


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual |ln(predicted / measured)| over `rows` timings: its median, and the size within which nine in ten are."""

    rows: int
    median: float
    nine_in_ten: float

    @staticmethod
    def from_times(predicted: Floats, measured: Floats) -> Residual:
        """Return the residual of predicted against measured seconds."""
        size = np.abs(np.log(predicted / measured))
        return Residual(len(size), float(np.median(size)), float(np.quantile(size, 0.9)))

    def to_json(self) -> dict[str, float]:
        """Plain data, as a hardware file keeps it."""
        return {"rows": self.rows, "median": round(self.median, 4), "nine_in_ten": round(self.nine_in_ten, 4)}


def fit_constants(
    start: Mapping[str, float], most: Mapping[str, float], predict: Predict, measured: Floats
) -> dict[str, float]:
    """Return the constants that fit best. The method begins at `start`; each constant is at most `most`."""
    names = list(start)
    first = np.log([start[n] for n in names])
    ceiling = np.log([most.get(n, np.inf) for n in names])

    def residuals(point: Floats) -> Floats:
        predicted = predict(dict(zip(names, np.exp(point).tolist(), strict=True)))
        # The sum of the head times SLACK squared, which has its minimum at the same place.
        return np.concatenate([np.log(predicted / measured), SLACK * (point - first) / WIDTH])

    point, now = first, residuals(first)
    for _ in range(MAX_STEPS):
        # Slopes by differences, since `predict` may be any function of the constants.
        moved = [np.minimum(point + DELTA * unit, ceiling + DELTA) for unit in np.eye(len(names))]
        slopes = np.stack([(residuals(trial) - now) / DELTA for trial in moved], axis=1)
        step = np.asarray(np.linalg.lstsq(slopes, -now, rcond=None)[0], dtype=np.float64)
        better = _line_search(point, step, ceiling, now, residuals)
        if better is None:
            break
        gain = float(now @ now - better[1] @ better[1])
        point, now = better
        if gain < 1e-9 * float(now @ now):
            break
    return dict(zip(names, np.exp(point).tolist(), strict=True))


def _line_search(
    point: Floats, step: Floats, ceiling: Floats, now: Floats, residuals: Callable[[Floats], Floats]
) -> tuple[Floats, Floats] | None:
    """Return the longest of the halved steps that reduces the sum of squares, and the residuals there; None if none does."""
    for k in range(MAX_HALVINGS):
        trial = np.minimum(point + step / 2**k, ceiling)
        values = residuals(trial)
        if np.isfinite(values).all() and float(values @ values) < float(now @ now):
            return trial, values
    return None
