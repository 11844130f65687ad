"""Memory of one GPU, walked along forward, backward and optimizer step.

What stays: weights, gradients, optimizer states. What grows in forward and shrinks in backward: activations that
autograd keeps. On top of both the tensors in flight: an op's operands and results, gradients on their way.
The peak is the highest point of the walk. Not counted: the input batch, the allocator's fragmentation, the workspaces of
kernels and of NCCL, and what the run holds for its overlap, the weights of the next block gathered ahead and the bucket of
gradients that is being reduced (`verify` measures these apart, as `in_flight`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from planner_core.core import BlockPlan, Graph
from planner_core.cost.memory.backward import Backward, Gradient
from planner_core.cost.memory.forward import CallMemory, Layout, Moment
from planner_core.cost.memory.standing import Standing, standing
from planner_core.cost.memory.storages import Key, Storages
from planner_core.cost.model import CostModel
from planner_core.cost.resolved_ops import block_of


@dataclass(frozen=True, slots=True)
class Walk:
    """The moments of the last micro-batch's forward and backward and of the optimizer's step, on top of the parameters and
    optimizer states that stand all the time; `layouts` by label of the plan's blocks."""

    state: Standing
    layouts: Mapping[str, Layout]
    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    step: Moment

    @property
    def peak(self) -> Moment:
        """The first of the highest."""
        return highest((*self.forward, *self.backward, self.step))

    def memory_bytes(self) -> dict[str, int]:
        """What fills the GPU at the peak, in bytes: params, grads, optimizer, activations, buffers (everything in flight), which
        add up to peak. Gradients are those there at that moment: none where the peak stands at the end of forward."""
        state, peak = self.state, self.peak
        return {
            "params": state.params, "grads": peak.grads, "optimizer": state.moments, "activations": peak.kept,
            "buffers": peak.flying, "peak": state.params + state.moments + peak.total,
        }  # fmt: skip


def walk(blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel) -> Walk:
    """The memory of one GPU through a step in the steady state (second step on)."""
    state, made = standing(blocks, graph, model), layouts(blocks, graph, model)
    forward: Iterable[Moment] = made[""].forward()
    backward: Iterable[Moment] = backward_of(made[""]).run()
    if model.workload.accumulate > 1:  # the sums of the micro-batches before stand
        forward = (moment + Moment(0, state.grads, 0) for moment in forward)
        backward = _accumulating(backward, state)
    return Walk(state, made, tuple(forward), tuple(backward), Moment(0, state.grads, 2 * state.largest_param))


def backward_of(top: Layout) -> Backward:
    """Backward through the whole model, from the loss."""
    return Backward(top, {v: Gradient(0) for v in top.results})


def _accumulating(backward: Iterable[Moment], state: Standing) -> Iterator[Moment]:
    """Backward of a later micro-batch: all gradients stand, and one that is made is added to what stands."""
    before = 0
    for moment in backward:
        made = min(state.largest_gradient, max(0, moment.grads - before))
        yield Moment(moment.kept, state.grads, moment.flying + made)
        before = moment.grads


def layouts(blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel) -> dict[str, Layout]:
    """The storages of every block in running order, by label of the plan; the top block's, "", knows what its calls do."""
    inner = {label: Layout(Storages(block_of(graph, label), bp, model)) for label, bp in blocks.items() if label}
    calls = {}
    for label, layout in inner.items():
        calls.update(dict.fromkeys(blocks[label].prefixes, _call(layout)))
    return {**inner, "": Layout(Storages(graph.top, blocks[""], model), calls)}


def highest(moments: Iterable[Moment]) -> Moment:
    """The first of the highest."""
    return max(moments, key=lambda m: m.total)


def _call(layout: Layout) -> CallMemory:
    """One copy of a repeated block, as its caller sees it."""
    s = layout.storages
    block = s.block
    position: dict[Key | None, int] = {("in", v): k for k, v in reversed(list(enumerate(block.inputs)))}
    at = {v: s.at.get(v, ("in", v)) for v in block.outputs}
    results = tuple(-1 - position[k] if k in position else s.own(k) for k in (at[v] for v in block.outputs))
    given = arriving(layout)
    back = Backward(layout, dict(given))
    forward, backward = highest(layout.forward()), highest(back.run())
    kept = sum(map(layout.kept_bytes, range(len(block.items))))
    keeps = tuple(k for k, v in enumerate(block.inputs) if ("in", v) in layout.first)
    kept_results = tuple(k for k, v in enumerate(block.outputs) if at[v] in layout.first and results[k] >= 0)
    if s.plan.recompute != "none":  # keeps its operands and what the plan says, and runs forward again before backward
        again = highest(layout.again()) + Moment(0, 0, sum(g.num_bytes for g in given.values()))
        kept, kept_results, backward = sum(map(layout.size_of, layout.held())), (), highest([again, backward])
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
