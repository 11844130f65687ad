"""The time of one training step, in the form that the search minimises and the simulation of the schedule confirms.

A step runs m micro-batches, then the optimizer. The model is a row of *units*: the copies of its repeated blocks, and the
block around them. While one unit computes, the weights of the next are gathered and the gradients of the one before are
reduced. Of one unit and one micro-batch, in forward (f) and backward (b):

    A   seconds that the compute stream computes, or waits for a collective that its next operator needs
    B   seconds of weight traffic beside it: gathers at use, and in backward the scatters of gradients
    C   weight traffic beside one micro-batch of the step only: working copies made in the first forward, gradients
        reduced in the last backward
    S   seconds once a step that nothing hides: the optimizer, and the ends of the row of units

    T = sum over units of  (m-1) max(A + k B, B) + max(A + k (B + C), B + C)   for f and for b,   + S

k is the price of contention: a second of traffic beside compute slows the compute by k seconds.

Example: A = 10 ms, B = 4 ms, C = 0, k = 0.1, m = 2: each micro-batch takes max(10.4, 4) = 10.4 ms. With B = 30 ms the
traffic binds: 30 ms. T is convex and never falls when a part grows; every weighted mean of the two sides of a maximum is a
lower bound on it, and a plain sum (`linear`), which is what makes the search exact.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Component(IntEnum):
    """Components of every cost, per GPU: seconds of one micro-batch or of one step, and bytes."""

    FORWARD = 0
    FORWARD_TRAFFIC = 1
    FORWARD_ONCE = 2
    BACKWARD = 3
    BACKWARD_TRAFFIC = 4
    BACKWARD_ONCE = 5
    STEP = 6
    COMMUNICATION = 7
    AFTER_FORWARD = 8
    AFTER_BACKWARD = 9


NUM_COMPONENTS = len(Component)


@dataclass(frozen=True, slots=True)
class CostVector:
    """One number per component: what a choice costs, or the price of a unit of each component.

    `forward`, `backward`: A above, seconds a micro-batch. `*_traffic`: B. `*_once`: C. `step`: S. `communication`: seconds of
    all collectives of a step. `after_forward`, `after_backward`: bytes held when the forward or backward pass ends.
    """

    forward: float = 0.0
    forward_traffic: float = 0.0
    forward_once: float = 0.0
    backward: float = 0.0
    backward_traffic: float = 0.0
    backward_once: float = 0.0
    step: float = 0.0
    communication: float = 0.0
    after_forward: float = 0.0
    after_backward: float = 0.0

    def array(self) -> Floats:
        """[component]."""
        return np.array(astuple(self))


assert [f.name.upper() for f in fields(CostVector)] == [c.name for c in Component]


class Shares(NamedTuple):
    """How much of each maximum of the step's time is priced as compute (1) or as traffic (0): in all but one micro-batch of
    a step, and in the one that bears the traffic of once a step."""

    forward: float = 1.0
    forward_edge: float = 1.0
    backward: float = 1.0
    backward_edge: float = 1.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """The form T of the step's time for `accumulate` micro-batches at a price `contention`."""

    accumulate: int
    contention: float

    def seconds(self, totals: Floats) -> Floats:
        """T of one unit whose components are `totals` [..., component]."""
        parts = np.moveaxis(totals, -1, 0)
        c = Component
        forward = self._phase(parts[c.FORWARD], parts[c.FORWARD_TRAFFIC], parts[c.FORWARD_ONCE])
        backward = self._phase(parts[c.BACKWARD], parts[c.BACKWARD_TRAFFIC], parts[c.BACKWARD_ONCE])
        return np.asarray(forward + backward + parts[c.STEP])

    def _phase(self, compute: Floats, traffic: Floats, once: Floats) -> Floats:
        k, edge = self.contention, traffic + once
        steady = np.maximum(compute + k * traffic, traffic)
        return (self.accumulate - 1) * steady + np.maximum(compute + k * edge, edge)

    def linear(self, shares: Shares) -> CostVector:
        """Prices whose weighted sum is at most T, whatever the totals; equal to it where the shares name the larger sides."""
        forward = self._prices(shares.forward, shares.forward_edge)
        backward = self._prices(shares.backward, shares.backward_edge)
        return CostVector(*forward, *backward, step=1.0)

    def _prices(self, steady: float, edge: float) -> tuple[float, float, float]:
        """Prices of A, B and C of one phase."""
        m, k = self.accumulate - 1, self.contention
        once = edge * k + 1 - edge
        return m * steady + edge, m * (steady * k + 1 - steady) + once, once
