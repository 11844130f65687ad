"""What a parameter costs as it is stored: its memory, its gathers and scatters, the summing of its gradient."""

from __future__ import annotations

import numpy as np

from planner_core.core import ITEM_BYTES, Op, P, R
from planner_core.cost import CostModel
from planner_core.cost.communication import collective_times, digit
from planner_core.ops import Pair
from planner_core.search.network.states import Floats, Ints, TensorStates, joint_codes


def weight_traffic(
    op: Op, taken: list[Pair], states: TensorStates, table: Floats, index: Ints, grad: bool, again: bool
) -> Floats:
    """Seconds to gather a stored weight for use (`again` for backward: the op keeps it, or runs twice) and to scatter its gradient."""
    base = 2 + len(states.meta.shape)
    whole = joint_codes([digit(R if c == P else c) for c, _ in taken], index, base)
    gather = table[states.forward[None, :], whole[:, None]]
    seconds = gather * (2 if again else 1)
    if grad:
        gradient = joint_codes([digit(g) for _, g in taken], index, base)
        seconds = seconds + table[gradient[:, None], states.gradient[None, :]]
    return seconds


def parameter_memory(states: TensorStates, grad: bool, model: CostModel) -> tuple[Floats, Floats]:
    """Bytes of a parameter per storage state: with its optimizer states, and with its gradient too."""
    item = ITEM_BYTES[states.meta.dtype]
    elements = states.local_bytes / item
    kept = elements * (item + (model.workload.state_bytes(item) if grad else 0))
    return kept, kept + (elements * item if grad else 0.0)


def gradient_sum(states: TensorStates, grad: bool, model: CostModel) -> Floats:
    """Seconds of summing a kept parameter's gradient over the axes on which it is Partial."""
    seconds = np.zeros(len(states))
    if not grad:
        return seconds
    partial = np.array([p == (R, P) for p in states.pairs])
    for axis, link in enumerate(model.links):
        seconds += np.where(
            partial[states.index[:, axis]], collective_times("all_reduce", states.local_bytes, link), 0.0
        )
    return seconds
