"""The memory of the weights on one GPU all through a step: stored parameters, working copies, accumulated gradients, moments; and that
of the model's buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner_core.core import (
    ITEM_BYTES,
    Block,
    BlockPlan,
    Graph,
    Placements,
    R,
    Shard,
    Value,
    data_axes_of,
    largest_local_shape,
)
from planner_core.cost.memory.terms import has_working_copy, weight_bytes
from planner_core.cost.model import CostModel
from planner_core.cost.resolved_ops import block_of


@dataclass(frozen=True, slots=True)
class WeightForm:
    """One form of a weight: its placements, and its bytes on one GPU."""

    placements: Placements
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WeightForms:
    """The forms of one copy of a weight, with the terms of `terms`; `value` is its number in the block. `gradient` is the sum of what
    backward has made so far, `reduced` what is left of it for the optimizer when it was summed over ranks.

    A form that takes no memory has 0 bytes: a working copy that is the stored parameter itself, or that is gathered from it at each use.
    A weight that is not trained has `stored` only.
    """

    value: int
    stored: WeightForm
    working: WeightForm
    gradient: WeightForm
    reduced: WeightForm
    moments: WeightForm


@dataclass(frozen=True, slots=True)
class StandingMemory:
    """Bytes of all weights on one GPU: stored and working copies (`params`, with the buffers), gradients before and after they are reduced,
    moments; the bytes of the largest stored weight that is trained; and `inputs`, those that are gathered."""

    params: int
    grads: int
    reduced: int
    moments: int
    largest_param: int
    inputs: int = 0


def standing_memory(blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel) -> StandingMemory:
    """Return the bytes of all weights: sums over all copies of all blocks."""
    params, grads, reduced, moments, largest_param = graph.buffer_bytes, 0, 0, 0, 0
    for label, bp in blocks.items():
        block = block_of(graph, label)
        for w in weight_forms(block, bp, model):
            params += (w.stored.num_bytes + w.working.num_bytes) * len(bp.prefixes)
            grads += w.gradient.num_bytes * len(bp.prefixes)
            reduced += w.reduced.num_bytes * len(bp.prefixes)
            moments += w.moments.num_bytes * len(bp.prefixes)
            # The optimizer holds its own tensors for one weight at a time, so the largest one decides (`num_update_tensors`).
            if block.values[w.value].grad:
                largest_param = max(largest_param, w.stored.num_bytes)
    return StandingMemory(params, grads, reduced, moments, largest_param, gathered_inputs(blocks, graph, model))


def gathered_inputs(blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel) -> int:
    """Return the bytes of the inputs of real numbers (images) of which ranks bring their own samples, and an operator takes all: a run
    gathers them. A rank's own samples are not counted, nor are whole numbers, which are few."""
    top, sites = graph.top, blocks[""].sites
    given = {n for n, v in enumerate(top.values) if _is_real_input(v)}
    read = [
        (v, edge.dst.forward)
        for op in top.ops
        if not given.isdisjoint(op.inputs)
        for v, edge in zip(op.inputs, sites[op.name].inputs, strict=True)
        if v in given
    ]
    # Every reader takes the samples that its rank brings: nothing is gathered, and the mesh need not be looked at.
    if all(p == Shard(0) for _, placed in read for p in placed):
        return 0
    results = [s.outputs[0].src.forward for b in blocks.values() for s in b.sites.values() if s.outputs]
    # Ranks bring their own samples over the axes on which the plan shards samples. Over the others every rank has them all.
    axes = data_axes_of([[p.dim if isinstance(p, Shard) else None for p in one] for one in results], model.sizes)
    whole = {v for v, placed in read if any(model.sizes[a] > 1 and placed[a] != Shard(0) for a in axes)}
    return sum(math.prod(top.values[v].meta.shape) * ITEM_BYTES[top.values[v].meta.dtype] for v in whole)


def _is_real_input(value: Value) -> bool:
    named = value.kind == "constant" and value.name
    return bool(named) and "float" in value.meta.dtype and bool(value.meta.shape)


def param_bytes(block: Block, bp: BlockPlan, model: CostModel) -> dict[str, int]:
    """By name: bytes on one GPU of each weight of one copy of a block, with its working copy where one is kept."""
    return {
        block.values[w.value].name: w.stored.num_bytes + w.working.num_bytes for w in weight_forms(block, bp, model)
    }


def weight_forms(block: Block, bp: BlockPlan, model: CostModel) -> Iterator[WeightForms]:
    """Yield the forms of every weight of one copy of a block."""
    gathered = _gathered_weights(block, bp)
    for number, value in enumerate(block.values):
        param = bp.params.get(value.name) if value.kind == "parameter" else None
        if param is None:
            continue
        item, shape = ITEM_BYTES[value.meta.dtype], value.meta.shape
        each = weight_bytes(item, value.grad, model.workload)
        same = param.stored == param.working
        copied = has_working_copy(item, value.grad, model.workload, same, value.name in gathered)
        # A gradient whose terms are not summed over an axis yet (Partial) is a whole tensor on each rank of the axis.
        local = tuple(p if isinstance(p, Shard) else R for p in param.gradient)
        is_sum = any(n > 1 and p != q for p, q, n in zip(param.gradient, param.stored, model.sizes, strict=True))
        # In the order of the fields. What is left of a gradient lies as the stored weight does, since the optimizer updates that.
        yield WeightForms(
            number,
            *(
                WeightForm(placed, math.prod(largest_local_shape(shape, placed, model.sizes)) * per_element)
                for placed, per_element in (
                    (param.stored, each.stored),
                    (param.working, each.working if copied else 0),
                    (local, each.gradient if is_sum else each.updated),
                    (param.stored, each.updated),
                    (param.stored, each.moments),
                )
            ),
        )


def _gathered_weights(block: Block, bp: BlockPlan) -> set[str]:
    """Return the weights that are gathered at each use."""
    return {
        block.values[v].name
        for op in block.ops
        for v, edge in zip(op.inputs, bp.sites[op.name].inputs, strict=True)
        if block.values[v].kind == "parameter" and any(step.collective for step in edge.forward)
    }
