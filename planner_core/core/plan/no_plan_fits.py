"""The error of a search in which no plan fits the memory. It holds the plan that comes nearest."""

from __future__ import annotations

from collections.abc import Callable

from planner_core.core.errors import PlannerError, Term
from planner_core.core.plan.plan import Plan


class NoPlanFits(PlannerError):
    """No plan fits the memory. `needed_bytes` is the least memory per GPU that any plan needs; it is infinite if no plan can run.

    `bound`: a search among plans below some value may miss one. No plan that fits has an objective below this bound. `describe_memory`:
    gives the largest parts of the memory of the plan that needs least, in words. `nearest`: that plan, if it is known.
    """

    exit_status = 3

    def __init__(
        self,
        *message: str | Term,
        needed_bytes: float = float("inf"),
        bound: float = float("inf"),
        describe_memory: Callable[[], str] | None = None,
        nearest: Plan | None = None,
    ) -> None:
        super().__init__(*message)
        self.nearest = nearest
        # What fills the memory is a function, since searches raise and catch this error many times and few ask for it.
        self.needed_bytes, self.bound, self.describe_memory = needed_bytes, bound, describe_memory

    def with_memory(self) -> NoPlanFits:
        """Return the error with what fills the memory in its message. That takes a walk through every layer, so a search that tries another
        plan after this one does without."""
        if self.describe_memory is None:
            return self
        return self.with_more(self.describe_memory())

    def with_more(self, text: str) -> NoPlanFits:
        """Return the error with more text behind its message."""
        return NoPlanFits(
            self.sentence, "; ", text, needed_bytes=self.needed_bytes, bound=self.bound, nearest=self.nearest
        )
