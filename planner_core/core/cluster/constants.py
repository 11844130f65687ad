"""Constants of a training step that belong to no GPU: `assets/timing.json`, each with what it is and its source."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache

from planner_core.core.files import ASSETS


@dataclass(frozen=True, slots=True)
class Timing:
    """See the file for each constant's meaning and source."""

    contention: float
    straggler: float
    step_s: float
    optimizer: float
    sharded_copy: float
    accumulate: float
    fused_eager: float
    usable_memory: float


@cache
def timing() -> Timing:
    """The constants that come with the project."""
    data = json.loads((ASSETS / "timing.json").read_text(encoding="utf-8"))
    return Timing(**{f.name: float(data[f.name]["value"]) for f in fields(Timing)})
