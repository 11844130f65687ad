"""The words on the first page where the plan that was asked for does not fit: which plans were looked at, and what the smallest needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner_core.core import Plan
from planner_core.planning import Result


@dataclass(frozen=True, slots=True)
class Shortage:
    """What does not fit, as a headline; the subject that needs `least_bytes`, and sentences that follow what it needs."""

    head: str
    smallest: str
    least_bytes: float
    more: str

    @classmethod
    def of(cls, result: Result, plans: Iterable[Plan], tool: str, *, searching: bool) -> Shortage:
        """Say which plans do not fit: those that were searched, which need not be all of the table.

        Rows of other tools and the visitor's own setup may fit where no plan of the request's tool does. `plans`: the rows. `tool`: the
        title of the tool whose plans alone are searched; empty where all are. `searching`: stages are still being looked at.
        """
        fitting = any(p.fits for p in (*result.plans, *plans))
        # The other rows are of other spaces: one that fits says nothing of what was asked for.
        least = min(p.cost.memory_bytes["peak"] for p in ((result.best,) if tool or fitting else result.plans))
        kind = " of one pipeline stage" * searching + f" found for {tool}" * bool(tool)
        if not kind and fitting:
            kind = " searched for"
        more = " Plans with pipeline stages are still being looked at." if searching else ""
        if fitting:
            more += " Rows of the table that fit are of another tool or method, or your own setup."
        return cls(f"No plan{kind} fits the memory", f"The smallest plan{kind}", least, more)
