"""Memory of one GPU, walked along forward, backward and optimizer step.

What stays: weights, gradients, optimizer states. What grows in forward and shrinks in backward: activations that
autograd keeps. On top of both the tensors in flight: an op's operands and results, gradients on their way.
The peak is the highest point of the walk. The input batch, the allocator's fragmentation and the workspaces of
kernels and of NCCL are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner_core.core import ITEM_BYTES, Block, BlockPlan, Graph, R, Shard, local_shape
from planner_core.cost.memory.backward import Backward, Gradient
from planner_core.cost.memory.forward import CallMemory, Layout, Moment
from planner_core.cost.memory.storages import Key, Storages
from planner_core.cost.memory.terms import has_working_copy, weight_bytes
from planner_core.cost.model import CostModel


def walk(blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel) -> dict[str, int]:
    """What fills the GPU at the peak of a step in the steady state (second step on), in bytes: params, grads, optimizer,
    activations, buffers (everything in flight), which add up to peak. Gradients are those there at that moment: none
    where the peak stands at the end of forward."""
    state = {label: _state(_block(label, graph), bp, model) for label, bp in blocks.items()}
    params = sum(s.params * len(blocks[b].prefixes) for b, s in state.items())
    states = sum(s.states * len(blocks[b].prefixes) for b, s in state.items())
    forward, backward, step = moments(blocks, graph, model)
    peak = _highest([*forward, *backward, step])
    return {
        "params": params, "grads": peak.grads, "optimizer": states, "activations": peak.kept, "buffers": peak.flying,
        "peak": params + states + peak.total,
    }  # fmt: skip


def moments(
    blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel
) -> tuple[list[Moment], list[Moment], Moment]:
    """The moments of the last micro-batch's forward and backward, and that of the optimizer's step."""
    state = {label: _state(_block(label, graph), bp, model) for label, bp in blocks.items()}
    grads = sum(s.grads * len(blocks[b].prefixes) for b, s in state.items())
    top = layouts(blocks, graph, model)[""]
    back = Backward(top, {v: Gradient(0) for v in top.results})
    forward, backward = list(top.forward()), list(back.run())
    if model.workload.accumulate > 1:  # the sums of the micro-batches before stand
        forward = [moment + Moment(0, grads, 0) for moment in forward]
        backward = list(_accumulating(backward, grads, max(s.largest_gradient for s in state.values())))
    return forward, backward, Moment(0, grads, 2 * max(s.largest_param for s in state.values()))


def _accumulating(backward: Sequence[Moment], grads: int, largest: int) -> Iterator[Moment]:
    """Backward of a later micro-batch: all gradients stand, and one that is made is added to what stands; it holds `largest`
    bytes at most."""
    before = 0
    for moment in backward:
        yield Moment(moment.kept, grads, moment.flying + min(largest, max(0, moment.grads - before)))
        before = moment.grads


def layouts(blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel) -> dict[str, Layout]:
    """The storages of every block in running order, by label of the plan; the top block's, "", knows what its calls do."""
    inner = {label: Layout(Storages(_block(label, graph), bp, model)) for label, bp in blocks.items() if label}
    calls = {}
    for label, layout in inner.items():
        calls.update(dict.fromkeys(blocks[label].prefixes, _call(layout)))
    return {**inner, "": Layout(Storages(graph.top, blocks[""], model), calls)}


def _highest(moments: Iterable[Moment]) -> Moment:
    return max(moments, key=lambda m: m.total)


def _block(label: str, graph: Graph) -> Block:
    return graph.blocks[label.partition("#")[0]] if label else graph.top


def _call(layout: Layout) -> CallMemory:
    """One copy of a repeated block, as its caller sees it."""
    s = layout.storages
    block = s.block
    position: dict[Key | None, int] = {("in", v): k for k, v in reversed(list(enumerate(block.inputs)))}
    at = {v: s.at.get(v, ("in", v)) for v in block.outputs}
    results = tuple(-1 - position[k] if k in position else s.own(k) for k in (at[v] for v in block.outputs))
    given = arriving(layout)
    back = Backward(layout, dict(given))
    forward, backward = _highest(layout.forward()), _highest(back.run())
    kept = sum(map(layout.kept_bytes, range(len(block.items))))
    keeps = tuple(k for k, v in enumerate(block.inputs) if ("in", v) in layout.first)
    kept_results = tuple(k for k, v in enumerate(block.outputs) if at[v] in layout.first and results[k] >= 0)
    if s.plan.recompute == "full":  # keeps its operands alone, and runs forward again before backward
        again = forward + Moment(0, 0, sum(g.num_bytes for g in given.values()))
        kept, kept_results, backward = 0, (), _highest([again, backward])
        keeps = tuple(k for k, v in enumerate(block.inputs) if block.values[v].kind == "activation")
    gradients = {position["in", v]: g.num_bytes for v, g in back.by_value.items() if ("in", v) in position}
    return CallMemory(kept, keeps, results, kept_results, forward, backward, gradients, back.weight_bytes)


def arriving(layout: Layout) -> dict[int, Gradient]:
    """The gradients of a called block's results, as its caller brings them."""
    s = layout.storages
    made = {
        v: e.dst.gradient for op in s.block.ops for v, e in zip(op.outputs, s.plan.sites[op.name].outputs, strict=True)
    }
    return {v: Gradient(s.bytes_of(v, made[v])) for v in layout.results if v in made and s.block.values[v].grad}


@dataclass
class _State:
    """Bytes that one copy of a block holds all the time, and its gradients."""

    params: int = 0
    grads: int = 0
    states: int = 0
    largest_param: int = 0
    largest_gradient: int = 0


def _state(block: Block, bp: BlockPlan, model: CostModel) -> _State:
    """The weights of one copy, by the terms of `terms`."""
    found = _State()
    gathered = _gathered_weights(block, bp)
    for value in block.values:
        param = bp.params.get(value.name) if value.kind == "parameter" else None
        if param is None:
            continue
        item = ITEM_BYTES[value.meta.dtype]
        each = weight_bytes(item, value.grad, model.workload)
        stored, working, gradient = (
            math.prod(local_shape(value.meta.shape, placed, model.sizes))
            for placed in (param.stored, param.working, tuple(p if isinstance(p, Shard) else R for p in param.gradient))
        )
        found.params += stored * each.stored
        same = param.stored == param.working
        if has_working_copy(item, value.grad, model.workload, same) and value.name not in gathered:
            found.params += working * each.working
        found.grads += gradient * each.gradient
        found.largest_gradient = max(found.largest_gradient, gradient * each.gradient)
        found.states += stored * each.moments
        found.largest_param = max(found.largest_param, stored * each.stored if value.grad else 0)
    return found


def _gathered_weights(block: Block, bp: BlockPlan) -> set[str]:
    """Weights whose working copy is made for each use and freed."""
    return {
        block.values[v].name
        for op in block.ops
        for v, edge in zip(op.inputs, bp.sites[op.name].inputs, strict=True)
        if block.values[v].kind == "parameter" and any(step.collective for step in edge.forward)
    }
