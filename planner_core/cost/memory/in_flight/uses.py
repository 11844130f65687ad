"""How the operators of a unit use its weights: what gathers a weight before the unit begins, and what takes its gradient away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from planner_core.core import ITEM_BYTES, Block, BlockPlan, Edge, Op, Placements, Shard, Step, root
from planner_core.cost.memory.redistribution_buffers import buffer_bytes_by_step
from planner_core.cost.memory.saved import lasting_weights
from planner_core.cost.model import CostModel

Steps = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class UseMemory:
    """How an op uses a weight: the steps that gather it before the unit begins; its placements then; the steps that the op itself
    takes; the first steps of its gradient, which the op takes; and the steps that are taken when the gradient is packed. `lasting`:
    autograd keeps a view of the gathered weight, which stays until backward has used it."""

    value: int
    gather: Steps
    gathered_placements: Placements
    op_steps: Steps
    first_gradient_steps: Steps
    reduce: Steps
    sent_from: Placements
    for_backward: bool
    lasting: bool = False

    @property
    def is_separate(self) -> bool:
        """Whether autograd tells this use from those of other units, since the unit gathers the weight or reduces its gradient."""
        return bool(self.gather or self.reduce)


def uses_of(block: Block, bp: BlockPlan, ops: Sequence[Op], model: CostModel) -> dict[tuple[str, int], UseMemory]:
    """Return the uses of weights by a unit's ops, by op and operand. If several uses take different steps, or another unit takes a view of
    the weight, the op itself takes the steps."""
    uses: dict[tuple[str, int], UseMemory] = {}
    # Backward does not come to operators below the first trained weight, so nothing is gathered or computed again for them.
    returns = any(block.values[v].grad for op in ops for v in op.outputs)
    for op in ops:
        for position, (value, edge) in enumerate(zip(op.inputs, bp.sites[op.name].inputs, strict=True)):
            v = block.values[value]
            if v.kind == "parameter":
                # Backward needs the weight whole if the operator saved it, or if the block runs again.
                for_backward = value in op.saved or (returns and bp.recompute != "none")
                uses[op.name, position] = _use_outside_op(value, edge, for_backward, model.sizes)
    passed_on, viewed = lasting_weights(block, ops)
    steps_of: dict[int, set[tuple[Steps, Steps]]] = {}
    for use in uses.values():
        steps_of.setdefault(use.value, set()).add((use.gather, use.reduce))
    # One gathered copy serves all uses of a unit only if all want it alike. A view that another unit reads would outlive the unit.
    stay = {v for v, steps in steps_of.items() if len(steps) > 1 or (v in passed_on and next(iter(steps))[0])}
    lasting = {
        (op.name, position)
        for op in ops
        for position, value in enumerate(op.inputs)
        if bp.recompute == "none" and value in viewed and value in {root(block, v) for v in op.outputs}
    }
    return {
        at: replace(use, lasting=bool(use.gather) and at in lasting)
        for at, use in uses.items()
        if use.value not in stay
    }


def _use_outside_op(value: int, edge: Edge, for_backward: bool, sizes: tuple[int, ...]) -> UseMemory:
    """Return the steps outside of the op: the first steps forward, up to the last one that communicates; and the last steps of the
    gradient, from where it has the weight's placements."""
    ahead, back = (tuple(s for s in steps if sizes[s.axis] > 1) for steps in (edge.forward, edge.backward))
    last = max((i + 1 for i, s in enumerate(ahead) if s.collective), default=0)
    # If the gradient never lies as the gathered weight does, nothing is gathered ahead: packing needs the two to agree.
    for gather in (last, 0):
        here = placed_after(edge.src.forward, ahead[:gather])
        for number in range(len(back) + 1):
            gradient = placed_after(edge.dst.gradient, back[:number])
            # From here on the gradient is split as the gathered weight is, so gradients can be packed and reduced together.
            if _sharded_dims(gradient) == _sharded_dims(here):
                return UseMemory(
                    value, ahead[:gather], here, ahead[gather:], back[:number], back[number:], gradient, for_backward
                )
    return UseMemory(value, (), edge.src.forward, ahead, back, (), edge.dst.gradient, for_backward)


def placed_after(placements: Placements, steps: Iterable[Step]) -> Placements:
    """Return the placements of a tensor that has taken these steps."""
    last = {step.axis: step.dst for step in steps}
    return tuple(last.get(axis, p) for axis, p in enumerate(placements))


def _sharded_dims(placements: Placements) -> tuple[int | None, ...]:
    return tuple(p.dim if isinstance(p, Shard) else None for p in placements)


def step_signature(steps: Steps) -> tuple[tuple[int, str | None], ...]:
    """Return a key: weights that take alike steps share a message."""
    return tuple((s.axis, s.collective) for s in steps)


def gather_steps(start: Placements, end: Placements, sizes: tuple[int, ...]) -> Steps:
    """Return the steps from one form of a weight to another; `sizes` are those of the mesh axes."""
    return tuple(Step(a, p, q) for a, (p, q) in enumerate(zip(start, end, strict=True)) if p != q and sizes[a] > 1)


def buffer_bytes(
    members: Iterable[tuple[Block, int, Placements, Steps]], model: CostModel, *, gradients: bool = False
) -> list[int]:
    """Return the bytes of all members together before the first step, and after each: of the buffers that collectives read and write. The
    members are weights in the dtype in which they compute, or their `gradients` in that in which they are summed."""
    total: list[int] = []
    for block, value, start, steps in members:
        meta = block.values[value].meta
        item = ITEM_BYTES[model.workload.summed_in(meta.dtype) if gradients else meta.dtype]
        each = buffer_bytes_by_step(meta.shape, item, start, steps, model.sizes)
        total = [a + b for a, b in zip(total or [0] * len(each), each, strict=True)]
    return total
