"""What a calibrated hardware file says of its fits: whose measurements, the residual before and after, and the timings themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from planner_core.cost import Floats
from planner_core.planning.pricing.calibration.fitting import Residual

MAX_TIMINGS = 300
"""Timings of one fit that a file keeps; of more, as many are taken at equal distances."""


class FittedTime(NamedTuple):
    """A timing in seconds: as it was measured, and as it is predicted by the constants before the fit and after it."""

    measured: float
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Fit:
    """One fit of a group of constants (collectives, products or step) to the measurements of a source."""

    group: str
    source: str
    before: Residual
    after: Residual
    timings: tuple[FittedTime, ...]

    @staticmethod
    def from_times(group: str, source: str, measured: Floats, before: Floats, after: Floats) -> Fit:
        """Return the fit to seconds [timing], as measured, and as predicted before and after."""
        rows = np.stack([measured, before, after], axis=1)
        sample = rows[np.linspace(0, len(rows) - 1, min(len(rows), MAX_TIMINGS)).astype(int)]
        timings = tuple(FittedTime(*row) for row in sample.tolist())
        return Fit(group, source, Residual.from_times(before, measured), Residual.from_times(after, measured), timings)

    def to_json(self) -> dict[str, Any]:
        """Plain data, as a hardware file keeps it."""
        timings = [[float(f"{x:.4g}") for x in timing] for timing in self.timings]
        return {
            "source": self.source,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "timings": timings,
        }


def read_fits(gpu: Mapping[str, Any]) -> tuple[Fit, ...]:
    """Return the fits in a GPU's data, which may come from anywhere: an entry that does not have the form of a fit is left out."""
    sources = gpu.get("sources")
    fits = []
    for group, entry in sources.items() if isinstance(sources, dict) else ():
        try:
            rows = [FittedTime(*map(float, row)) for row in entry["timings"][:MAX_TIMINGS]]
            fit = Fit(
                str(group)[:40],
                str(entry["source"])[:80],
                _read_residual(entry["before"]),
                _read_residual(entry["after"]),
                tuple(rows),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        if all(math.isfinite(x) and x > 0 for row in rows for x in row):
            fits.append(fit)
    return tuple(fits)


def _read_residual(data: Mapping[str, Any]) -> Residual:
    return Residual(int(data["rows"]), float(data["median"]), float(data["nine_in_ten"]))
