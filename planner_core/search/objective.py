"""What a search minimises: the step's time or its communication, with memory at a price.

The step's time is not a sum but a sum of maxima (`cost.step_time`). For any `Shares` the weighted sum of the components is
a lower bound on it; the search works with such sums, and with the true value of every assignment that it finds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner_core.cost import Component, Shares, StepTime
from planner_core.search.network.states import Floats

OBJECTIVES = ("time", "communication")
TIE = 1e-6
"""Relative difference below which two costs are one."""
EVEN = Shares()
_SCALES = {"time": (1.0, 1e-7, 1e-22), "communication": (1e-7, 1.0, 1e-22), "memory": (1e-9, 1e-12, 0.0)}
"""By kind of objective: the weight of the step's time, of all communication, and of a byte at the end of forward. The
smaller ones only break ties: of plans that take equally long the one that sends less is chosen, then the smaller one."""


@dataclass(frozen=True, slots=True)
class Objective:
    """`kind` of OBJECTIVES (or "memory"), and the price of a byte held when the forward and the backward pass end.

    With `fixed` shares the step's time is replaced by its weighted sum there: a relaxation that is a plain sum; with `top`
    only that of the top block. Without
    `exact` a gap that no shares close is left open, which is quick and keeps its bound.
    """

    kind: str
    step_time: StepTime
    after_forward: float = 0.0
    after_backward: float = 0.0
    fixed: Shares | None = None
    top: Shares | None = None
    exact: bool = True

    def priced(self, after_forward: float, after_backward: float) -> Objective:
        """The same objective at other prices of memory."""
        return replace(self, after_forward=after_forward, after_backward=after_backward)

    @property
    def is_sum(self) -> bool:
        """Whether the step's time only breaks ties, so that its maxima do not matter."""
        return self.kind != "time" or self.fixed is not None

    def weights(self, shares: Shares = EVEN) -> Floats:
        """[component] prices whose weighted sum is at most `priced_cost`, whatever the totals."""
        time, communication, memory = _SCALES[self.kind]
        total = self.step_time.linear(self.fixed or shares).array() * time
        total[Component.COMMUNICATION] += communication
        total[Component.AFTER_FORWARD] = self.after_forward + memory
        total[Component.AFTER_BACKWARD] = self.after_backward
        return total

    def seconds(self, totals: Floats) -> Floats:
        """What is minimised, of one unit's `totals` [..., component], without the prices of memory."""
        time, communication, _ = _SCALES[self.kind]
        if self.fixed is not None:
            return np.asarray(totals @ self.priced(0.0, 0.0).weights())
        return np.asarray(time * self.step_time.seconds(totals) + communication * totals[..., Component.COMMUNICATION])

    def priced_cost(self, totals: Floats) -> Floats:
        """`seconds`, and memory at its prices, of one unit's `totals` [..., component]."""
        forward = totals[..., Component.AFTER_FORWARD] * (self.after_forward + _SCALES[self.kind][2])
        return np.asarray(self.seconds(totals) + forward + totals[..., Component.AFTER_BACKWARD] * self.after_backward)


def least_memory_objective(step_time: StepTime, share: float) -> Objective:
    """The least memory, `share` of it at the end of the forward pass, and hardly any time."""
    return Objective("memory", step_time, share, 1 - share)
