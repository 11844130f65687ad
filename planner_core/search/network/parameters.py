"""What each state of a weight costs: memory, the optimizer's step, traffic at each use, and traffic once a step.

A weight has three forms: the working copy, the accumulated gradient and the stored parameter. `TensorStates.shares` says
into how many parts each form is split.

Example: a weight of 1000 elements in bf16 on an axis of 4 devices, trained with fp32 states. In ZeRO-1 each device holds a
whole working copy (2000 bytes), a whole gradient (4000 bytes) and a quarter of the stored parameter and its two moments
(250 elements of 12 bytes). The gradient is reduce-scattered once a step and the working copy is gathered once a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner_core.core import ITEM_BYTES, P, R, Shard
from planner_core.cost import Bools, Component, CostModel, Floats, Ints
from planner_core.cost.communication import Redistributions, placement_code
from planner_core.cost.compute import (
    copied_seconds,
    divided_seconds,
    kept_gradient_seconds,
    optimizer_seconds,
    weight_handout_seconds,
)
from planner_core.cost.memory import has_working_copy, weight_bytes
from planner_core.ops import Pair
from planner_core.search.network.factors import zero_costs
from planner_core.search.network.states import TensorStates, joint_any, joint_codes, joint_parts


@dataclass(frozen=True, slots=True)
class WeightMoves:
    """Redistributions of a weight in compute dtype, and of its gradient in the dtype in which gradients are kept."""

    weight: Redistributions
    gradient: Redistributions


def storage_cost(states: TensorStates, trained: bool, moves: WeightMoves, model: CostModel) -> Floats:
    """[component, state]: the cost of a weight without its uses: memory, the optimizer, and its traffic once a step.

    Once a step the working copy is made from the stored form (gather), and the gradient is brought to the stored form
    (reduce). Either is free where the two forms have the same placements.
    """
    item, w = ITEM_BYTES[states.meta.dtype], model.workload
    item_bytes = weight_bytes(item, trained, w)
    elements = states.meta.num_bytes / item / states.shares  # [form, state]
    cost = zero_costs(len(states))
    state_bytes = elements[2] * (item_bytes.stored + item_bytes.moments)
    # Gradients that do not stay are reduced during backward, each as soon as it is there.
    sums = elements[1] * np.where(_is_summed(states, model), item_bytes.gradient, item_bytes.updated)
    cost[Component.AFTER_BACKWARD] = state_bytes + (sums if model.holds_gradients else elements[2] * item_bytes.updated)
    cost[Component.AFTER_FORWARD] = state_bytes + (sums if model.holds_gradients else 0.0)
    if trained:
        cost[Component.STEP] = optimizer_seconds(elements[2], item, model)
        cost[Component.STEP] += weight_handout_seconds(states.shares[2] / states.shares[0], model)
        # In the example of ZeRO-1 stored is S(0) and forward is R: an all-gather. In ZeRO-3 both are S(0), and this is free.
        gather = moves.weight.cost[states.stored, states.forward]
        # gradients that are summed late come whole to every rank, which keeps its part
        reduce = moves.gradient.cost[states.gradient, states.forward if model.late_sums else states.stored]
        cost[Component.FORWARD_ONCE] = gather
        cost[Component.BACKWARD_ONCE] = reduce
        cost[Component.COMMUNICATION] = gather + reduce
    return cost


def _is_summed(states: TensorStates, model: CostModel) -> Bools:
    """[state]: whether a weight's gradient is brought to the stored form once a step, so that until then it stands as a sum."""
    several = [axis for axis, size in enumerate(model.sizes) if size > 1]
    differs: Bools = np.array([state[1] != state[2] for state in states.axis_states], dtype=bool)
    return np.asarray(differs[states.index[:, several]].any(axis=1))


def working_copy_bytes(states: TensorStates, trained: bool, gathered: Floats, model: CostModel) -> Floats:
    """[row, state]: bytes of a working copy in addition to the stored parameter, where the weight is `gathered` [row, state] at
    each use, or not."""
    item = ITEM_BYTES[states.meta.dtype]
    # In one placement the stored parameter may itself be the working copy. In ZeRO-1 it is a part, so the whole copy is extra.
    is_stored_so = (states.stored == states.forward).astype(int)
    has_copy = np.array(
        [[has_working_copy(item, trained, model.workload, s, g) for g in (False, True)] for s in (False, True)]
    )
    return np.where(has_copy[is_stored_so[None, :], gathered.astype(int)], states.local_bytes[None, :], 0.0)


@dataclass(frozen=True, slots=True)
class UseTraffic:
    """Seconds of one use of a weight, each [row, state].

    `gather`: gather before the use. `gather_for_backward`: gather again for backward. `scatter`: reduce the gradient. `forward` and
    `backward`: seconds of the compute stream for the copies and sums of these (`cost.compute.weights`).
    """

    gather: Floats
    gather_for_backward: Floats
    scatter: Floats
    forward: Floats
    backward: Floats

    def __add__(self, other: UseTraffic) -> UseTraffic:
        return UseTraffic(
            self.gather + other.gather,
            self.gather_for_backward + other.gather_for_backward,
            self.scatter + other.scatter,
            self.forward + other.forward,
            self.backward + other.backward,
        )


def use_traffic(
    consumed: list[Pair],
    states: TensorStates,
    moves: WeightMoves,
    index: Ints,
    trained: bool,
    needed_in_backward: bool,
    model: CostModel,
) -> UseTraffic:
    """Return seconds of traffic of a weight that an operator takes as `consumed` [group row], in the joint rows `index` [row, axis].

    `needed_in_backward`: backward uses the weight too, so it is gathered a second time.
    """
    base = 2 + len(states.meta.shape)
    # An operator that takes the weight as Partial reads a Replicate working copy (`compatible_weight`), so R is gathered.
    at_use = joint_codes([placement_code(R if used == P else used) for used, _ in consumed], index, base)
    gather = moves.weight.cost[states.forward[None, :], at_use[:, None]]
    is_local = moves.weight.local[states.forward[None, :], at_use[:, None]]
    scatter, item = np.zeros_like(gather), ITEM_BYTES[states.meta.dtype]
    forward = np.where(
        is_local, 0.0, copied_seconds(_local_bytes(states, consumed, 0, item, index, model), model)[:, None]
    )
    backward = forward if needed_in_backward else np.zeros_like(forward)
    if trained:
        produced = joint_codes([placement_code(g) for _, g in consumed], index, base)
        scatter = moves.gradient.cost[produced[:, None], states.gradient[None, :]]
        is_local = moves.gradient.local[produced[:, None], states.gradient[None, :]]
        summed, updated = model.workload.gradient_item(item), model.workload.updated_item(item)
        gradient = _local_bytes(states, consumed, 1, summed, index, model)[:, None]
        several = [axis for axis, size in enumerate(model.sizes) if size > 1]
        is_term: Bools = np.array([state[1] == P for state in states.axis_states], dtype=bool)
        is_sent_later: Bools = np.asarray(is_term[states.index[:, several]].any(axis=1))
        # What is not sent at all is added to the gradient that the optimizer takes.
        stands = gradient * np.where(is_sent_later, 1.0, updated / summed)[None, :]
        copied = np.where(is_sent_later[None, :] | (updated > item), stands, 0.0)
        backward = backward + np.where(
            is_local, kept_gradient_seconds(stands, copied, model), copied_seconds(gradient, model)
        )
        # Made whole, and summed later over an axis of several ranks.
        divides = np.array([[g == R] for _, g in consumed], dtype=bool) & is_term
        is_divided = joint_any(divides, index[:, several], states.index[:, several])
        rows, columns = np.nonzero(is_divided)
        is_divided[rows, columns] = moves.gradient.divides(produced[rows], states.gradient[columns], several)
        backward = backward + np.where(is_divided, divided_seconds(gradient, model), 0.0)
    return UseTraffic(gather, gather if needed_in_backward else np.zeros_like(gather), scatter, forward, backward)


def traffic_cost(
    traffic: UseTraffic, allowed: Bools, before_first: bool, after_last: bool, repeats: int, micro_batches: int
) -> Floats:
    """[component, row, state]: the cost of weight traffic at use. It overlaps with compute, but compute waits for it at the two ends:
    where the use is `before_first` or `after_last` of the units."""
    cost, c = zero_costs(*allowed.shape), Component
    gather, gather_for_backward, scatter = np.where(
        allowed, (traffic.gather, traffic.gather_for_backward, traffic.scatter), 0.0
    )
    cost[c.FORWARD], cost[c.BACKWARD] = np.where(allowed, (traffic.forward, traffic.backward), 0.0)
    cost[c.FORWARD if before_first else c.FORWARD_TRAFFIC] += gather
    cost[c.BACKWARD if before_first or after_last else c.BACKWARD_TRAFFIC] += gather_for_backward
    cost[c.BACKWARD if before_first else c.BACKWARD_TRAFFIC] += scatter
    cost[c.COMMUNICATION] = (gather + gather_for_backward + scatter) * micro_batches
    if repeats > 1:  # nothing hides the first copy's gather and the last copy's reduction
        # All copies have one table, so each bears its part: 32 copies bear 1/32 of the two ends each.
        cost[c.STEP] = (gather + scatter) / repeats
    return cost


def _local_bytes(
    states: TensorStates, consumed: list[Pair], form: int, item: int, index: Ints, model: CostModel
) -> Floats:
    """[joint row]: local bytes of a weight as the operator takes it (`form` 0), or of the gradient that it makes (1)."""
    parts = joint_parts(np.array([isinstance(pair[form], Shard) for pair in consumed]), index, model.sizes)
    size: Floats = math.prod(states.meta.shape) * item / parts
    return size
