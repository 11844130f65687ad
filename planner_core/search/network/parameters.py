"""What a weight costs as it lies: its memory, the optimizer's step, its traffic at use and once a step.

`elements` of a weight's three forms come from `TensorStates.shares`: working copy, accumulated gradient, stored parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner_core.core import ITEM_BYTES, P, R, Shard
from planner_core.cost import Component, CostModel
from planner_core.cost.communication import Moves, digit
from planner_core.cost.compute import accumulated_seconds, copied_seconds, optimizer_seconds
from planner_core.cost.memory import has_working_copy, weight_bytes
from planner_core.ops import Pair
from planner_core.search.network.factors import costs
from planner_core.search.network.states import Floats, Ints, TensorStates, joint_codes, joint_parts


@dataclass(frozen=True, slots=True)
class WeightMoves:
    """Redistributions of a weight in compute dtype, and of its gradient in the dtype that gradients are kept in."""

    weight: Moves
    gradient: Moves


def storage_cost(states: TensorStates, trained: bool, moves: WeightMoves, model: CostModel) -> Floats:
    """[component, state] of a weight that no use pays for: memory, the optimizer, and the traffic of once a step."""
    item, w = ITEM_BYTES[states.meta.dtype], model.workload
    each = weight_bytes(item, trained, w)
    elements = states.meta.num_bytes / item / states.shares  # [form, state]
    cost = costs(len(states))
    held = elements[2] * (each.stored + each.moments)
    gradients = elements[1] * each.gradient
    cost[Component.AFTER_BACKWARD] = held + gradients
    cost[Component.AFTER_FORWARD] = held + (gradients if w.accumulate > 1 else 0.0)
    if trained:
        cost[Component.STEP] = optimizer_seconds(elements[2], item, model)
        gather = moves.weight.cost[states.stored, states.forward]
        reduce = moves.gradient.cost[states.gradient, states.stored]
        cost[Component.FORWARD_ONCE] = gather
        cost[Component.BACKWARD_ONCE] = reduce
        cost[Component.COMMUNICATION] = gather + reduce
    return cost


def working_copy(states: TensorStates, trained: bool, gathered: Floats, model: CostModel) -> Floats:
    """[row, state] bytes of a working copy that stands beside the stored parameter: none where it is `gathered` at use."""
    item = ITEM_BYTES[states.meta.dtype]
    same = states.stored == states.forward
    own = np.array([has_working_copy(item, trained, model.workload, bool(s)) for s in (False, True)])
    size = np.where(own[same.astype(int)], states.local_bytes, 0.0)
    return np.where(gathered, 0.0, size[None, :])


@dataclass(frozen=True, slots=True)
class UseTraffic:
    """Seconds of one use of a weight, [row, state]: gathered before it, gathered again for backward, its gradient sent; and
    what compute spends beside (`cost.compute.weights`), forward and backward."""

    gather: Floats
    again: Floats
    scatter: Floats
    forward: Floats
    backward: Floats

    def __add__(self, other: UseTraffic) -> UseTraffic:
        return UseTraffic(
            self.gather + other.gather, self.again + other.again, self.scatter + other.scatter,
            self.forward + other.forward, self.backward + other.backward,
        )  # fmt: skip


def use_traffic(
    taken: list[Pair],
    states: TensorStates,
    moves: WeightMoves,
    index: Ints,
    trained: bool,
    again: bool,
    model: CostModel,
) -> UseTraffic:
    """Traffic of a weight used as `taken` [group row] in joint rows `index` [row, axis]; `again` where backward needs it."""
    base = 2 + len(states.meta.shape)
    whole = joint_codes([digit(R if used == P else used) for used, _ in taken], index, base)
    gather = moves.weight.cost[states.forward[None, :], whole[:, None]]
    stays = moves.weight.local[states.forward[None, :], whole[:, None]]
    scatter, item = np.zeros_like(gather), ITEM_BYTES[states.meta.dtype]
    forward = np.where(stays, 0.0, copied_seconds(_local(states, taken, 0, item, index, model), model)[:, None])
    backward = forward if again else np.zeros_like(forward)
    if trained:
        made = joint_codes([digit(g) for _, g in taken], index, base)
        scatter = moves.gradient.cost[made[:, None], states.gradient[None, :]]
        stays = moves.gradient.local[made[:, None], states.gradient[None, :]]
        gradient = _local(states, taken, 1, model.workload.kept_item(item), index, model)
        added, copied = accumulated_seconds(gradient, model), copied_seconds(gradient, model)
        backward = backward + np.where(stays, added[:, None], copied[:, None])
    return UseTraffic(gather, gather if again else np.zeros_like(gather), scatter, forward, backward)


def _local(states: TensorStates, taken: list[Pair], which: int, item: int, index: Ints, model: CostModel) -> Floats:
    """[joint row] bytes of a weight (0) or its gradient (1) as the rows take and make it."""
    parts = joint_parts(np.array([isinstance(pair[which], Shard) for pair in taken]), index, model.sizes)
    size: Floats = math.prod(states.meta.shape) * item / parts
    return size
