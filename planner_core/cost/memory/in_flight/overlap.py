"""The memory that one GPU holds so that weight traffic hides behind compute: weights gathered ahead, and gradients on their way.

A unit is a copy of a repeated block, or a part of the top block between two calls. The run gathers a unit's weights together, one unit
ahead, and frees them together. It reduces the unit's gradients together (`runtime.program.units`). Weights that are gathered axis by
axis are on their way two units ahead, and so on. So four things are held:

    gathered  the unit's weights, Replicate on the axes over which they are gathered, while it runs forward and while it runs backward
    coming    the weights of the next units, from this unit's begin to the next one's: what the collectives write, and what they send
    filling   the unit's gradients, packed as their collective sends them, from the first one that is made
    sent      the packed gradients of the unit before, until this unit's are sent

Weights that take the same steps share a message. All sizes are bytes on one GPU.

Example: FSDP over 8 GPUs, layers of 400 MB of weights in bf16. While a layer runs forward, its gathered weights take 400 MB, and those of
the next layer 400 MB, with 50 MB that this GPU sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner_core.core import ITEM_BYTES, Block, BlockPlan, Call, Op, Placements
from planner_core.cost.memory.in_flight.reductions import ReductionMemory, reductions
from planner_core.cost.memory.in_flight.uses import (
    Steps,
    UseMemory,
    buffer_bytes,
    gather_steps,
    step_signature,
    uses_of,
)
from planner_core.cost.model import CostModel
from planner_core.cost.units import split_into_units


@dataclass(frozen=True, slots=True)
class GatherMemory:
    """Weights that are gathered together. `whole`: their bytes. For each of their collectives: bytes in flight from its issue to its
    wait (`flying`), and the most while it is issued (`issuing`). Those of `for_backward` are gathered once more in backward. `earlier`:
    the number of collectives of gathers that read what this one brings.

    The last collective is issued one unit ahead, the one before it two units ahead. `left` says how many are not yet issued.
    """

    whole: int
    flying: tuple[int, ...]
    issuing: tuple[int, ...]
    for_backward: bool
    earlier: int = 0

    @property
    def reach(self) -> int:
        """Number of units that it is ahead."""
        return len(self.flying) + self.earlier

    def in_flight_bytes(self, left: int) -> int:
        """Return the bytes in flight."""
        # Over two axes (`reach` 2): with 2 left nothing is on its way, with 1 left the first collective, with 0 left the second,
        # which reads what the first one wrote.
        issued = self.reach - left
        return self.flying[issued - 1] if 0 < issued <= len(self.flying) else 0

    def issuing_bytes(self, left: int) -> int:
        """Return the most bytes while it comes to `left`."""
        issued = self.reach - left
        return self.issuing[issued - 1] if 0 < issued <= len(self.flying) else 0


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """One unit of the step: its label in the plan, its ops' uses of weights (by op and operand), and its messages. `waits`: the weights
    whose gradient autograd holds until another unit has made its own, and then gives away the sum of both."""

    label: str
    uses: Mapping[tuple[str, int], UseMemory]
    gathers: tuple[GatherMemory, ...]
    copies: tuple[GatherMemory, ...]
    reductions: tuple[ReductionMemory, ...]
    waits: frozenset[int] = frozenset()

    def gathered_bytes(self, *, backward: bool = False) -> int:
        """Return the bytes of its weights while it runs, in forward or in `backward`."""
        return sum(g.whole for g in self.gathers if g.for_backward or not backward)

    def in_flight_bytes(self, left: int = 0, *, backward: bool = False) -> int:
        """Return the bytes in flight while `left` collectives of each message are not yet issued."""
        return sum(g.in_flight_bytes(left) for g in self.messages(backward))

    def unpacking_bytes(self, *, backward: bool = False) -> int:
        """The most bytes while its weights are unpacked, one message after the other."""
        all_of = self.messages(backward)
        # Message k is unpacked while those before it are weights and those behind it still wait. Example: weights of 100 and 60 MB in
        # messages of 110 and 65 MB: max(100 + 110 + 65, 160 + 65) = 275 MB.
        here = [
            sum(g.whole for g in all_of[: k + 1]) + sum(g.in_flight_bytes(0) for g in all_of[k:])
            for k in range(len(all_of))
        ]
        return max(here, default=0)

    def messages(self, backward: bool) -> tuple[GatherMemory, ...]:
        """Return the messages that bring its weights, in forward or in `backward`."""
        return tuple(g for g in self.gathers if g.for_backward) if backward else (*self.copies, *self.gathers)

    def reduction_of(self, value: int) -> ReductionMemory | None:
        """Return the message that has the gradient of a weight."""
        return next((r for r in self.reductions if value in r.weights), None)


# --- the messages of a unit ---------------------------------------------------------------------------------


def unit_memory(
    label: str,
    block: Block,
    bp: BlockPlan,
    ops: Sequence[Op],
    model: CostModel,
    later: frozenset[int] = frozenset(),
    shared: frozenset[int] = frozenset(),
) -> UnitMemory:
    """Return the unit of these ops of a block. Another unit finishes the gradients of the weights `later`. Other units also use the weights
    `shared`."""
    uses = uses_of(block, bp, ops, model)
    waits = later & {v for op in ops for v in op.inputs} - {u.value for u in uses.values() if u.is_separate}
    return UnitMemory(
        label,
        uses,
        tuple(_list_gathers(block, uses, model)),
        tuple(_list_copies(block, bp, uses, model)),
        tuple(reductions(block, bp, uses, model, later, shared)),
        waits,
    )


def brought_by_caller(whole: UnitMemory) -> UnitMemory:
    """Return the unit of a called block as the simulation inside it sees it: the caller counts what is gathered ahead and what is
    reduced."""
    return replace(
        whole,
        gathers=(),
        copies=(),
        reductions=tuple(replace(r, beside=(), late=None, landed=0) for r in whole.reductions),
    )


def units_of_top(
    top: Block, bp: BlockPlan, calls: Mapping[str, UnitMemory], model: CostModel
) -> tuple[tuple[UnitMemory, ...], tuple[int, ...]]:
    """Return all units of a step in running order; and for each item of the top block the number of its unit. `calls` are the units of the
    copies of repeated blocks, by prefix."""
    # Calls and the parts between them, in running order: embedding, layer 0, layer 1, ..., final norm and loss are L + 2 units.
    spans = split_into_units(top)
    used = [{v for item in span for v in item.inputs if top.values[v].kind == "parameter"} for span in spans]
    units = []
    for number, span in enumerate(spans):
        # Backward runs the other way: the first unit that uses a weight is the last to make its gradient, so that one finishes it.
        before = frozenset().union(*used[:number])
        others = before.union(*used[number + 1 :])
        first = span[0]
        if isinstance(first, Call):
            units.append(calls[first.prefix])
        else:
            ops = [item for item in span if isinstance(item, Op)]
            units.append(unit_memory("", top, bp, ops, model, before, others & used[number]))
    return tuple(units), tuple(number for number, span in enumerate(spans) for _ in span)


def _list_gathers(block: Block, uses: Mapping[tuple[str, int], UseMemory], model: CostModel) -> Iterator[GatherMemory]:
    # A message carries one dtype, and all its weights take the same steps at the same times, forward or again for backward.
    groups: dict[object, list[UseMemory]] = {}
    for use in uses.values():
        if use.gather:
            groups.setdefault(
                (use.for_backward, step_signature(use.gather), block.values[use.value].meta.dtype), []
            ).append(use)
    for group in groups.values():
        chain = buffer_bytes(
            [(block, u.value, _placements_before(u.gathered_placements, u.gather), u.gather) for u in group], model
        )
        first = block.values[group[0].value]
        # A weight that is kept in another dtype is cast before it is sent, so even a single one has a packed copy.
        cast = first.grad and model.workload.kept_item(item := ITEM_BYTES[first.meta.dtype]) != item
        freed = [
            (block, u.value, u.gathered_placements, ()) for u in group if not u.lasting
        ]  # others are counted as what autograd keeps
        yield GatherMemory(
            sum(buffer_bytes(freed, model)),
            *_in_flight_bytes(chain, group[0].gather, len(group) > 1 or cast, 0),
            group[0].for_backward,
        )


def _list_copies(
    block: Block, bp: BlockPlan, uses: Mapping[tuple[str, int], UseMemory], model: CostModel
) -> Iterator[GatherMemory]:
    """Working copies that are made again in the first micro-batch of a step. With several micro-batches, none is in flight in the last."""
    if model.workload.accumulate > 1:
        return
    groups: dict[object, list[tuple[int, Steps]]] = {}
    for value in dict.fromkeys(u.value for u in uses.values()):
        param, meta = bp.params.get(block.values[value].name), block.values[value].meta
        if param is None or not block.values[value].grad or value in block.inputs:
            continue
        steps = gather_steps(param.stored, param.working, model.sizes)
        if steps:
            groups.setdefault((step_signature(steps), meta.dtype), []).append((value, steps))
    for group in groups.values():
        stored = [bp.params[block.values[v].name].stored for v, _ in group]
        chain = buffer_bytes([(block, v, at, steps) for (v, steps), at in zip(group, stored, strict=True)], model)
        item = ITEM_BYTES[block.values[group[0][0]].meta.dtype]
        cast = chain[0] if model.workload.kept_item(item) != item else 0
        read = [u.gather for u in uses.values() if u.value in {v for v, _ in group}]
        # A gather at use reads the working copy, so the copy must arrive before that gather's first collective: as many units earlier.
        earlier = max(sum(bool(s.collective) for s in steps) for steps in read)
        yield GatherMemory(
            0, *_in_flight_bytes(chain, group[0][1], len(group) > 1, cast), for_backward=False, earlier=earlier
        )


def _placements_before(placements: Placements, steps: Steps) -> Placements:
    first = {step.axis: step.src for step in reversed(steps)}
    return tuple(first.get(axis, p) for axis, p in enumerate(placements))


def _in_flight_bytes(
    chain: Sequence[int], steps: Steps, several: bool, cast: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each collective of a gather: the bytes from its issue to its wait, and the most while it is issued. It reads a packed copy
    if there are several tensors, and writes what is then unpacked."""
    by_collective: list[tuple[int, int]] = []
    current, most = cast, 0
    for number, step in enumerate(steps):
        size, after = chain[number], chain[number + 1]
        if step.collective == "all_gather":
            # all_gather of 400 MB over 8 GPUs: 50 MB are packed and 400 MB written, then unpacked. One tensor needs no packing.
            pack = size if several else 0
            flying = after + (pack if several else current)
            by_collective.append((flying, max(most, current + pack + after)))
            most = flying + after
        else:
            most = max(most, current + after)
            if step.collective:
                by_collective.append((after, most))
                most = after
        current = after
    return tuple(n for n, _ in by_collective), tuple(n for _, n in by_collective)
