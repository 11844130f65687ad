"""The time of one training step, in the form that the search minimises.

A step runs m micro-batches, then the optimizer. The model is a row of *units*: the copies of its repeated blocks, and the top
block around them. While one unit computes, the weights of the next unit are gathered, and the gradients of the unit before are
reduced. For one unit and one micro-batch, in forward (f) and backward (b), let

    A   seconds that the compute stream computes, or waits for a collective that its next operator needs
    B   seconds of weight traffic beside it: gathers at use, and in backward the scatters of gradients
    C   weight traffic beside one micro-batch of the step only: working copies made in the first forward, gradients
        reduced in the last backward
    S   seconds once a step that nothing hides: the optimizer, and the ends of the row of units

    T = sum over units of  (m-1) max(A + k B, B) + max(A + k (B + C), B + C)   for f and for b,   + S

k is the price of contention: a second of traffic beside compute slows the compute by k seconds.

Example: A = 10 ms, B = 4 ms, C = 0, k = 0.1, m = 2. Each micro-batch takes max(10.4, 4) = 10.4 ms. With B = 30 ms, traffic is
the larger side, and each takes max(13, 30) = 30 ms.

T is convex, and it never falls when a part grows. Every weighted mean of the two sides of a maximum is a lower bound on the
maximum, and it is a plain sum (`StepTime.linear`). The search is exact because of this.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# The arrays of the cost model, the search and the pipeline: seconds and bytes, numbers of states, what can be.
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Component(IntEnum):
    """The components of every cost, per GPU: seconds of one micro-batch or of one step, and bytes (see `CostVector`)."""

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
    """One number per component: the cost of a choice, or a price for each component.

    `forward`, `backward`: A above, in seconds per micro-batch. `*_traffic`: B. `*_once`: C. `step`: S. `communication`: seconds
    of all collectives of a step. `after_forward`, `after_backward`: bytes held when the forward or the backward pass ends.
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
        """Return the numbers as an array [component]."""
        return np.array([getattr(self, name) for name in _NAMES])


_NAMES = tuple(f.name for f in fields(CostVector))
# `CostVector.array` puts the fields at the indices of `Component`, so both have one order.
assert [name.upper() for name in _NAMES] == [c.name for c in Component]


def waited_seconds(seconds: Floats | float, behind_s: Floats | float, contention: float) -> Floats:
    """Return the seconds by which a collective delays the operator that sends it, if a kernel of `behind_s` runs meanwhile.

    What the kernel does not hide is waited for, and what it hides slows the kernel by `contention`. Example: 3 ms behind a kernel of 2 ms,
    k = 0.1: 1 + 0.2 ms.
    """
    return np.asarray(seconds - (1 - contention) * np.minimum(seconds, behind_s))


def chunk_waits(each_s: Floats | float, kernel_s: Floats | float, chunks: int, contention: float) -> Floats:
    """Return the seconds by which the collectives of a result delay forward, if a product makes it in `chunks` parts (ATP, section 3.4).

    The collective of a part (`each_s`) runs beside the product of the next part (`kernel_s`); nothing is beside the last one. Example:
    4 parts of 2 ms, each sent in 3 ms, k = 0.1: 3 · (1 + 0.2) + 3 = 6.6 ms, where one collective of 12 ms would delay by 12.
    """
    return np.asarray((chunks - 1) * waited_seconds(each_s, kernel_s, contention) + each_s)


class Shares(NamedTuple):
    """The weights of a weighted mean of each maximum: the share of the side A + k B; the side B has the rest.

    `forward` and `backward` are for the micro-batches without the traffic of once a step. `*_edge` are for the one that has it.
    """

    forward: float = 1.0
    forward_edge: float = 1.0
    backward: float = 1.0
    backward_edge: float = 1.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """The form T of the step's time, for m = `accumulate` micro-batches and k = `contention`."""

    accumulate: int
    contention: float

    def seconds(self, totals: Floats) -> Floats:
        """[...]: seconds T of one unit with `totals` [..., component]."""
        forward, backward, once = self.phases(totals)
        return np.asarray(forward + backward + once)

    def phases(self, totals: Floats) -> tuple[Floats, Floats, Floats]:
        """[...] each: the seconds T of all forward passes, of all backward passes, and of what is once a step."""
        parts = np.moveaxis(totals, -1, 0)
        c = Component
        forward = self._phase_seconds(parts[c.FORWARD], parts[c.FORWARD_TRAFFIC], parts[c.FORWARD_ONCE])
        backward = self._phase_seconds(parts[c.BACKWARD], parts[c.BACKWARD_TRAFFIC], parts[c.BACKWARD_ONCE])
        return forward, backward, parts[c.STEP]

    def _phase_seconds(self, compute: Floats, traffic: Floats, once: Floats) -> Floats:
        k, edge = self.contention, traffic + once
        steady = np.maximum(compute + k * traffic, traffic)
        return (self.accumulate - 1) * steady + np.maximum(compute + k * edge, edge)

    def linear(self, shares: Shares) -> CostVector:
        """Prices p with  sum of p · totals  ≤  T  for all totals. They are equal if each share is 1 or 0 for the larger side."""
        forward = self._prices(shares.forward, shares.forward_edge)
        backward = self._prices(shares.backward, shares.backward_edge)
        return CostVector(*forward, *backward, step=1.0)

    def _prices(self, steady: float, edge: float) -> tuple[float, float, float]:
        """Return the prices of A, B and C of one phase."""
        # A maximum of A + k B and B is at least share (A + k B) + (1 - share) B: A is priced at the share, B at share k + 1 - share.
        m, k = self.accumulate - 1, self.contention
        once = edge * k + 1 - edge
        return m * steady + edge, m * (steady * k + 1 - steady) + once, once
