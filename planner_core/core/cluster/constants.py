"""Constants of a training step that do not belong to a GPU. `assets/timing.json` has each with its meaning and source."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache

from planner_core.core.files import ASSETS


@dataclass(frozen=True, slots=True)
class Timing:
    """The constants of `assets/timing.json`, which has the meaning and the source of each."""

    contention: float
    straggler: float
    sharded_copy: float
    accumulate: float
    rank_call_s: float
    usable_memory: float


@cache
def load_timing() -> Timing:
    """Return the constants that come with the project."""
    # By the fields, so that a constant without a reader in the file is ignored and a missing one fails at once.
    data = json.loads((ASSETS / "timing.json").read_text(encoding="utf-8"))
    return Timing(**{f.name: float(data[f.name]["value"]) for f in fields(Timing)})
