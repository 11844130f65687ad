"""What a search minimises: the step's time or its communication, plus memory at a price.

The step's time is a sum of maxima and not a plain sum (`cost.step_time`). A weighted mean of the two sides of each maximum
is a plain sum, and it is a lower bound on the step's time. `Shares` name the weights. The search works with such sums. It
computes the true value of every assignment that it finds.

Example: one unit, one micro-batch, no contention, forward compute A = 10 ms and weight traffic B = 4 ms. The forward pass
takes max(10, 4) = 10 ms. At the share 1 the weighted sum is 10, at the share 0.5 it is 7, at the share 0 it is 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner_core.cost import Component, Floats, Shares, StepTime

TIE = 1e-6
"""Relative difference below which two costs count as equal."""
OBJECTIVES = ("time", "communication")
EVEN_SHARES = Shares()
_WEIGHTS = {"time": (1.0, 1e-7, 1e-22), "communication": (1e-7, 1.0, 1e-22), "memory": (1e-9, 1e-12, 0.0)}
"""By kind of objective: the weight of the step's time, of all communication, and of a byte at the end of forward. The small
weights only break ties: of two plans that take equally long, the one that sends less is chosen, then the smaller one."""


@dataclass(frozen=True, slots=True)
class Objective:
    """`kind` of OBJECTIVES (or "memory"), and two prices in seconds per byte: of memory when the forward pass ends, and when
    the backward pass ends.

    `fixed_shares`: the step's time is replaced by its weighted sum at these shares, which is a relaxation. `top_shares`: the same, for the
    top block alone. `exact`: close the gap that no shares close. False leaves that gap open; its bound still holds.
    """

    kind: str
    step_time: StepTime
    after_forward: float = 0.0
    after_backward: float = 0.0
    fixed_shares: Shares | None = None
    top_shares: Shares | None = None
    exact: bool = True

    def with_prices(self, after_forward: float, after_backward: float) -> Objective:
        """Return the same objective at other prices of memory."""
        return replace(self, after_forward=after_forward, after_backward=after_backward)

    @property
    def is_sum(self) -> bool:
        """Whether the objective is a plain sum: then the maxima of the step's time do not matter."""
        return self.kind != "time" or self.fixed_shares is not None

    def weights(self, shares: Shares = EVEN_SHARES) -> Floats:
        """[component] prices at `shares`: for every unit, `totals @ weights` is at most `priced_cost(totals)`."""
        time, communication, memory = _WEIGHTS[self.kind]
        total = self.step_time.linear(self.fixed_shares or shares).array() * time
        total[Component.COMMUNICATION] += communication
        total[Component.AFTER_FORWARD] = self.after_forward + memory
        total[Component.AFTER_BACKWARD] = self.after_backward
        return total

    def seconds(self, totals: Floats) -> Floats:
        """Return the objective's value of one unit with `totals` [..., component], without memory at its prices."""
        time, communication, _ = _WEIGHTS[self.kind]
        if self.fixed_shares is not None:
            return np.asarray(totals @ self.with_prices(0.0, 0.0).weights())
        return np.asarray(time * self.step_time.seconds(totals) + communication * totals[..., Component.COMMUNICATION])

    def priced_cost(self, totals: Floats) -> Floats:
        """`seconds` plus memory at its prices, of one unit with `totals` [..., component]."""
        forward = totals[..., Component.AFTER_FORWARD] * (self.after_forward + _WEIGHTS[self.kind][2])
        return np.asarray(self.seconds(totals) + forward + totals[..., Component.AFTER_BACKWARD] * self.after_backward)


def objective_value(kind: str, step_time_s: float, communication_s: float) -> float:
    """Return the objective's value of a plan, as the search compares it."""
    time, communication, _ = _WEIGHTS[kind]
    return time * step_time_s + communication * communication_s


def least_memory_objective(step_time: StepTime, share: float) -> Objective:
    """Minimise `share` · (memory after forward) + (1 - `share`) · (memory after backward). Time only breaks ties."""
    return Objective("memory", step_time, share, 1 - share)
