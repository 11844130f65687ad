"""Memory of one GPU, simulated along forward, backward and the optimizer step. The simulation is called the *walk*.

Four parts are counted:
- what stays: weights, gradients, optimizer states;
- what grows in forward and shrinks in backward: the activations that autograd keeps;
- what is in flight: an operator's operands and results, and gradients on their way;
- what a run holds for its overlap: weights that come ahead of their use, and gradients that leave in buckets (`overlap`).

The peak is the highest moment of the walk. Not counted are a rank's own samples of the input batch, the allocator's fragmentation,
and the workspaces of kernels and of NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from planner_core.core import OPTIMIZERS, BlockPlan, Graph, ParamPlan, Workload
from planner_core.cost.memory.backward import BackwardMemory, Gradient
from planner_core.cost.memory.forward import BlockMemory, CallMemory, HandedThrough, Moment
from planner_core.cost.memory.in_flight import UnitMemory, brought_by_caller, unit_memory, units_of_top
from planner_core.cost.memory.standing import StandingMemory, standing_memory
from planner_core.cost.memory.storages import BlockStorages, Key
from planner_core.cost.model import CostModel
from planner_core.cost.resolved_ops import block_of


@dataclass(frozen=True, slots=True)
class Walk:
    """The moments of the last micro-batch's forward and backward, and of the optimizer's step. They come on top of the parameters
    and optimizer states, which are held all the time. `block_memories` has the storages of each block, by label of the plan."""

    state: StandingMemory
    block_memories: Mapping[str, BlockMemory]
    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    step: Moment

    @property
    def peak(self) -> Moment:
        """The first of the highest moments."""
        return highest_moment((*self.forward, *self.backward, self.step))

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes at the peak by kind: params, grads, optimizer, activations and buffers (all that is in flight), which add up to
        peak.

        `overlap` is the part of the buffers that the run holds for its overlap. `grads` are the gradients at that moment. It is 0
        if the peak is at the end of forward and one micro-batch makes a step.
        """
        state, peak = self.state, self.peak
        return {
            "params": state.params,
            "grads": peak.grads,
            "optimizer": state.moments,
            "activations": peak.kept,
            "buffers": peak.flying + peak.ahead,
            "overlap": peak.ahead,
            "peak": state.params + state.moments + peak.total,
        }


def walk(blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel) -> Walk:
    """Simulate the memory of one GPU through a step, from the second step on."""
    state, memories = standing_memory(blocks, graph, model), block_memories(blocks, graph, model)
    return walk_from_moments(
        state, memories, memories[""].forward_moments(), backward_of(memories[""]).moments(), model
    )


def walk_from_moments(
    state: StandingMemory,
    memories: Mapping[str, BlockMemory],
    forward: Iterable[Moment],
    backward: Iterable[Moment],
    model: CostModel,
    of: Callable[[Iterable[Moment]], tuple[Moment, ...]] = tuple,
) -> Walk:
    """Return the walk with these moments of one micro-batch. `of` may leave some of them out."""
    if model.holds_gradients:  # those of the micro-batches before are there, or the room for them
        forward = (moment + Moment(0, state.grads, 0) for moment in forward)
        # Backward adds to gradients that stand already, so they take the place of those that its walk counts, and are not added to them.
        backward = (replace(moment, grads=state.grads) for moment in backward)
    if state.inputs:
        # A run gathers these inputs before forward and holds them as it holds activations, until backward is over.
        forward, backward = ((moment + Moment(state.inputs) for moment in moments) for moments in (forward, backward))
    return Walk(
        state,
        memories,
        of(forward),
        of(backward),
        # When the optimizer runs nothing is kept for backward, and every gradient is this GPU's part, unless a buffer keeps all of it.
        Moment(
            0,
            state.grads if model.software.gradient_buffer else state.reduced,
            num_update_tensors(model.workload) * state.largest_param,
        ),
    )


def num_update_tensors(workload: Workload) -> int:
    """Return how many tensors as large as a weight its update holds: two of the optimizer's own, and the moments if they come from the
    host."""
    return 2 + (OPTIMIZERS[workload.optimizer] if workload.offload else 0)


def backward_of(top: BlockMemory) -> BackwardMemory:
    """Backward through the whole model, from the loss."""
    return BackwardMemory(top, {v: Gradient(0) for v in top.results})


KnownCopies = dict[tuple[str, int, int], tuple[BlockPlan, BlockMemory, CallMemory]]
"""One copy of each repeated block that was walked, by label and by the identities of its sites and its block, which its plan and its memory
keep alive. Stages that receive an operand may have another block than the stage that makes it."""


def block_memories(
    blocks: Mapping[str, BlockPlan],
    graph: Graph,
    model: CostModel,
    known: KnownCopies | None = None,
    borrowed: Mapping[str, ParamPlan] = MappingProxyType({}),
) -> dict[str, BlockMemory]:
    """Return the storages of every block in running order, by label of the plan; the top block's, "", knows what its calls do. `known`:
    what is known from other plans of the same model; it is added to. `borrowed`: weights of which gradients are made here, and summed and
    updated elsewhere."""
    known = {} if known is None else known
    inner: dict[str, BlockMemory] = {}
    calls: dict[str, CallMemory] = {}
    for label, bp in blocks.items():
        if label:
            at = label, id(bp.sites), id(block_of(graph, label))
            if at not in known:
                known[at] = bp, *_simulate_copy(label, bp, graph, model)
            _, inner[label], one = known[at]
            calls.update(dict.fromkeys(bp.prefixes, one))
    top = graph.top
    # Equal copies are walked once (`one`), so a model of 100 layers takes as long as one of 2, save for the top block's own items.
    units, unit_at = units_of_top(top, blocks[""], {prefix: copy.unit for prefix, copy in calls.items()}, model)
    whole = replace(blocks[""], params={**blocks[""].params, **borrowed})
    return {**inner, "": BlockMemory(BlockStorages(top, whole, model), units, unit_at, calls)}


def highest_moment(moments: Iterable[Moment]) -> Moment:
    """Return the first of the highest moments."""
    return max(moments, key=lambda m: m.total)


def highest_backward(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """Return the first highest moment of a backward to gradients of micro-batches before, which stand all the time, and that of one
    whose gradients come with it. They may be the same.

    Example: an expert layer keeps 3 GB when its backward begins, and has 4 GB of gradients in float32 when it ends. The first is higher
    where all gradients stand at both moments, and the second where they are new."""
    every = tuple(moments)
    return tuple(dict.fromkeys((max(every, key=lambda m: m.total - m.grads), highest_moment(every))))


def _simulate_copy(label: str, bp: BlockPlan, graph: Graph, model: CostModel) -> tuple[BlockMemory, CallMemory]:
    block = block_of(graph, label)
    whole = unit_memory(label, block, bp, block.ops, model)
    memory = BlockMemory(BlockStorages(block, bp, model), (brought_by_caller(whole),), (0,) * len(block.items))
    return memory, _call_memory(memory, whole)


def _call_memory(block_memory: BlockMemory, unit: UnitMemory) -> CallMemory:
    """One copy of a repeated block, as its caller sees it."""
    s = block_memory.storages
    block = s.block
    # Reversed, so that of a value that is given at two positions the first one stays.
    operand = {v: k for k, v in reversed(list(enumerate(block.inputs)))}
    position: dict[Key | None, int] = {Key("input", v): k for v, k in operand.items()}
    # A result that no operator makes is an operand that the block hands through.
    at = {v: s.at.get(v, Key("input", v)) for v in block.outputs}
    results = tuple(
        HandedThrough(position[key]) if key in position else s.bytes_of_key(key)
        for key in (at[v] for v in block.outputs)
    )
    given = arriving_gradients(block_memory)
    # A copy: the walk takes gradients out of it, and `given` is summed again for the recomputation.
    back = BackwardMemory(block_memory, dict(given))
    forward, backward = highest_moment(block_memory.forward_moments()), highest_backward(back.moments())
    saved_bytes = sum(map(block_memory.saved_bytes, range(len(block.items))))
    # Operands that an item inside keeps are the caller's storages: `saved_bytes` leaves them out, and the caller counts each once.
    saved_operands = tuple(k for k, v in enumerate(block.inputs) if Key("input", v) in block_memory.first_saver)
    saved_results = tuple(
        k for k, v in enumerate(block.outputs) if at[v] in block_memory.first_saver and at[v] not in position
    )
    if s.plan.recompute != "none":  # it keeps its operands and what the plan keeps, and runs again
        # Backward of a recomputed copy runs it forward again first, with the gradients of its results waiting.
        recomputation = highest_moment(block_memory.recomputation_moments()) + Moment(
            0, 0, sum(g.num_bytes for g in given.values())
        )
        saved_bytes, saved_results = sum(map(block_memory.size_of, block_memory.keys_kept_for_recompute)), ()
        backward = highest_backward([recomputation, *backward])
        # To run again it needs every operand, also those that no operator inside keeps.
        saved_operands = tuple(k for k, v in enumerate(block.inputs) if block.values[v].kind == "activation")
    gradients = {operand[v]: g.num_bytes for v, g in back.by_value.items() if v in operand}
    reduced = tuple(operand[v] for r in unit.reductions for v in r.weights if v in operand)
    return CallMemory(
        saved_bytes=saved_bytes,
        saved_operands=saved_operands,
        results=results,
        saved_results=saved_results,
        forward=forward,
        backward=backward,
        gradients=gradients,
        grads=back.weight_bytes,
        unit=unit,
        last_packed=back.last_of_unit,
        reduced=reduced,
    )


def arriving_gradients(block_memory: BlockMemory) -> dict[int, Gradient]:
    """Return the gradients of a called block's results, as its caller brings them."""
    s = block_memory.storages
    placements = {
        v: e.dst.gradient for op in s.block.ops for v, e in zip(op.outputs, s.plan.sites[op.name].outputs, strict=True)
    }
    return {
        v: Gradient(s.bytes_of(v, placements[v]))
        for v in block_memory.results
        if v in placements and s.block.values[v].grad
    }
