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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner_core.core import (
    ITEM_BYTES,
    Block,
    BlockPlan,
    Call,
    Edge,
    Op,
    Placements,
    Shard,
    Step,
    root,
)
from planner_core.cost.memory.redistribution_buffers import buffers
from planner_core.cost.memory.saved import kept_weights, parts
from planner_core.cost.model import CostModel

Steps = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class UseMemory:
    """How an op uses a weight: the steps that gather it before the unit begins; its placements then; the steps that the op itself
    takes; the first steps of its gradient, which the op takes; and the steps that are taken when the gradient is packed. `lasting`:
    autograd keeps a view of the gathered weight, which stays until backward has used it."""

    value: int
    gather: Steps
    whole: Placements
    slices: Steps
    made: Steps
    reduce: Steps
    sent_from: Placements
    again: bool
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class GatherMemory:
    """Weights that are gathered together. `whole`: their bytes. For each of their collectives: bytes in flight from its issue to its
    wait (`flying`), and the most while it is issued (`issuing`). The weights of `again` are gathered again for backward. `earlier`:
    the number of collectives of gathers that read what this one brings.

    The last collective is issued one unit ahead, the one before it two units ahead. `left` says how many are not yet issued.
    """

    whole: int
    flying: tuple[int, ...]
    issuing: tuple[int, ...]
    again: bool
    earlier: int = 0

    @property
    def reach(self) -> int:
        """Number of units that it is ahead."""
        return len(self.flying) + self.earlier

    def coming(self, left: int) -> int:
        """Bytes in flight."""
        issued = self.reach - left
        return self.flying[issued - 1] if 0 < issued <= len(self.flying) else 0

    def sending(self, left: int) -> int:
        """The most bytes while it comes to `left`."""
        issued = self.reach - left
        return self.issuing[issued - 1] if 0 < issued <= len(self.flying) else 0


@dataclass(frozen=True, slots=True)
class ReductionMemory:
    """Gradients that are reduced together. `flat`: bytes of the packed tensor, from the first gradient on (0: each gradient stays as it
    was made). `beside`: for each collective on their way, the bytes beside the gradients that are held."""

    weights: frozenset[int]
    flat: int
    beside: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """One unit of the step: its label in the plan, its ops' uses of weights (by op and operand), and its messages."""

    label: str
    uses: Mapping[tuple[str, int], UseMemory]
    gathers: tuple[GatherMemory, ...]
    copies: tuple[GatherMemory, ...]
    reductions: tuple[ReductionMemory, ...]

    def gathered(self, *, again: bool = False) -> int:
        """Bytes of its weights while it runs, forward or (with `again`) backward."""
        return sum(g.whole for g in self.gathers if g.again or not again)

    def coming(self, left: int = 0, *, again: bool = False) -> int:
        """Bytes in flight while `left` collectives of each message are not yet issued."""
        return sum(g.coming(left) for g in self.messages(again))

    def waiting(self, *, again: bool = False) -> int:
        """The most bytes while its weights are unpacked, one message after the other."""
        all_of = self.messages(again)
        here = [
            sum(g.whole for g in all_of[: k + 1]) + sum(g.coming(0) for g in all_of[k:]) for k in range(len(all_of))
        ]
        return max(here, default=0)

    def messages(self, again: bool) -> tuple[GatherMemory, ...]:
        """The messages that bring its weights, forward or `again` for backward."""
        return tuple(g for g in self.gathers if g.again) if again else (*self.copies, *self.gathers)

    def reduction_of(self, value: int) -> ReductionMemory | None:
        """The message that has the gradient of a weight."""
        return next((r for r in self.reductions if value in r.weights), None)


# --- units of a block ---------------------------------------------------------------------------------------


def uses_of(block: Block, bp: BlockPlan, ops: Sequence[Op], model: CostModel) -> dict[tuple[str, int], UseMemory]:
    """The uses of weights by a unit's ops, by op and operand. If several uses take different steps, or another unit takes a view of
    the weight, the op itself takes the steps."""
    found: dict[tuple[str, int], UseMemory] = {}
    for op in ops:
        for position, (value, edge) in enumerate(zip(op.inputs, bp.sites[op.name].inputs, strict=True)):
            v = block.values[value]
            if v.kind == "parameter":
                again = bool(v.grad) and (value in op.saved or bp.recompute != "none")
                found[op.name, position] = _outside(value, edge, again, model.sizes)
    passed_on, viewed = kept_weights(block, ops)
    ways: dict[int, set[tuple[Steps, Steps]]] = {}
    for use in found.values():
        ways.setdefault(use.value, set()).add((use.gather, use.reduce))
    # One gathered copy serves all uses of a unit only if all want it alike. A view that another unit reads would outlive the unit.
    stay = {v for v, way in ways.items() if len(way) > 1 or (v in passed_on and next(iter(way))[0])}
    lasting = {
        (op.name, position) for op in ops for position, value in enumerate(op.inputs)
        if bp.recompute == "none" and value in viewed and value in {root(block, v) for v in op.outputs}
    }  # fmt: skip
    return {
        at: replace(use, lasting=bool(use.gather) and at in lasting)
        for at, use in found.items()
        if use.value not in stay
    }


def _outside(value: int, edge: Edge, again: bool, sizes: tuple[int, ...]) -> UseMemory:
    """The steps outside of the op: the first steps forward, up to the last one that communicates; and the last steps of the gradient,
    from where it has the weight's placements."""
    ahead, back = (tuple(s for s in steps if sizes[s.axis] > 1) for steps in (edge.forward, edge.backward))
    last = max((i + 1 for i, s in enumerate(ahead) if s.collective), default=0)
    for gather in (last, 0):
        here = _after(edge.src.forward, ahead[:gather])
        for number in range(len(back) + 1):
            gradient = _after(edge.dst.gradient, back[:number])
            # From here on the gradient is split as the gathered weight is, so gradients can be packed and reduced together.
            if _split(gradient) == _split(here):
                return UseMemory(
                    value, ahead[:gather], here, ahead[gather:], back[:number], back[number:], gradient, again
                )
    return UseMemory(value, (), edge.src.forward, ahead, back, (), edge.dst.gradient, again)


def _after(placements: Placements, steps: Iterable[Step]) -> Placements:
    last = {step.axis: step.dst for step in steps}
    return tuple(last.get(axis, p) for axis, p in enumerate(placements))


def _split(placements: Placements) -> tuple[int | None, ...]:
    return tuple(p.dim if isinstance(p, Shard) else None for p in placements)


# --- the messages of a unit ---------------------------------------------------------------------------------


def unit(
    label: str, block: Block, bp: BlockPlan, ops: Sequence[Op], model: CostModel, later: frozenset[int] = frozenset(),
    shared: frozenset[int] = frozenset(),
) -> UnitMemory:  # fmt: skip
    """The unit of these ops of a block. Another unit finishes the gradients of the weights `later`. Other units also use the weights
    `shared`."""
    uses = uses_of(block, bp, ops, model)
    return UnitMemory(
        label, uses, tuple(_gathers(block, uses, model)), tuple(_copies(block, bp, uses, model)),
        tuple(_reductions(block, bp, uses, model, later, shared)),
    )  # fmt: skip


def brought_by_caller(whole: UnitMemory) -> UnitMemory:
    """The unit of a called block as the simulation inside it sees it: the caller counts what is gathered ahead and what is reduced."""
    return replace(whole, gathers=(), copies=(), reductions=tuple(replace(r, beside=()) for r in whole.reductions))


def units_of_top(
    top: Block, bp: BlockPlan, calls: Mapping[str, UnitMemory], model: CostModel
) -> tuple[tuple[UnitMemory, ...], tuple[int, ...]]:
    """All units of a step in running order; and for each item of the top block the number of its unit. `calls` are the units of the
    copies of repeated blocks, by prefix."""
    spans = [[item] for item in top.items if isinstance(item, Call)] + parts(top)
    at = {id(item): number for number, item in enumerate(top.items)}
    # Calls and the parts between them, in running order: embedding, layer 0, layer 1, ..., final norm and loss are L + 2 units.
    spans.sort(key=lambda span: at[id(span[0])])
    used = [{v for item in span for v in item.inputs if top.values[v].kind == "parameter"} for span in spans]
    units = []
    for number, span in enumerate(spans):
        before = frozenset().union(*used[:number])
        others = before.union(*used[number + 1 :])
        first = span[0]
        if isinstance(first, Call):
            units.append(calls[first.prefix])
        else:
            ops = [item for item in span if isinstance(item, Op)]
            units.append(unit("", top, bp, ops, model, before, others & used[number]))
    return tuple(units), tuple(number for number, span in enumerate(spans) for _ in span)


def _gathers(block: Block, uses: Mapping[tuple[str, int], UseMemory], model: CostModel) -> Iterator[GatherMemory]:
    groups: dict[object, list[UseMemory]] = {}
    for use in uses.values():
        if use.gather:
            groups.setdefault((use.again, _alike(use.gather), block.values[use.value].meta.dtype), []).append(use)
    for group in groups.values():
        chain = _sizes([(block, u.value, _before(u.whole, u.gather), u.gather) for u in group], model)
        first = block.values[group[0].value]
        cast = first.grad and model.workload.kept_item(item := ITEM_BYTES[first.meta.dtype]) != item
        freed = [
            (block, u.value, u.whole, ()) for u in group if not u.lasting
        ]  # others are counted as what autograd keeps
        yield GatherMemory(
            sum(_sizes(freed, model)), *_brought(chain, group[0].gather, len(group) > 1 or cast, 0), group[0].again
        )


def _copies(
    block: Block, bp: BlockPlan, uses: Mapping[tuple[str, int], UseMemory], model: CostModel
) -> Iterator[GatherMemory]:  # fmt: skip
    """Working copies that are made again in the first micro-batch of a step. With several micro-batches, none is in flight in the last."""
    if model.workload.accumulate > 1:
        return
    groups: dict[object, list[tuple[int, Steps]]] = {}
    for value in dict.fromkeys(u.value for u in uses.values()):
        param, meta = bp.params.get(block.values[value].name), block.values[value].meta
        if param is None or not block.values[value].grad or value in block.inputs:
            continue
        steps = _gathering(param.stored, param.working, model.sizes)
        if steps:
            groups.setdefault((_alike(steps), meta.dtype), []).append((value, steps))
    for group in groups.values():
        stored = [bp.params[block.values[v].name].stored for v, _ in group]
        chain = _sizes([(block, v, at, steps) for (v, steps), at in zip(group, stored, strict=True)], model)
        item = ITEM_BYTES[block.values[group[0][0]].meta.dtype]
        cast = chain[0] if model.workload.kept_item(item) != item else 0
        read = [u.gather for u in uses.values() if u.value in {v for v, _ in group}]
        earlier = max(sum(bool(s.collective) for s in steps) for steps in read)
        yield GatherMemory(0, *_brought(chain, group[0][1], len(group) > 1, cast), again=False, earlier=earlier)


def _gathering(start: Placements, end: Placements, sizes: tuple[int, ...]) -> Steps:
    return tuple(Step(a, p, q) for a, (p, q) in enumerate(zip(start, end, strict=True)) if p != q and sizes[a] > 1)


def _reductions(
    block: Block, bp: BlockPlan, uses: Mapping[tuple[str, int], UseMemory], model: CostModel, later: frozenset[int], shared: frozenset[int],
) -> Iterator[ReductionMemory]:  # fmt: skip
    groups: dict[object, list[UseMemory]] = {}
    seen: set[int] = set()
    for use in uses.values():
        v = block.values[use.value]
        if not v.grad or use.value in block.inputs or (not use.gather and use.value in seen):
            continue
        final = _final(bp, block, use.value, model)
        # A weight with several uses is reduced once a step, by the unit whose backward comes last. The others keep their terms.
        holds = use.value in seen or (use.value in later and bool(final))
        seen.add(use.value)
        groups.setdefault((holds, _alike(use.reduce), _alike(final), v.meta.dtype), []).append(use)
    for (holds, *_), group in groups.items():  # type: ignore[misc]
        yield _reduction(block, bp, group, model, holds, shared)


def _reduction(
    block: Block, bp: BlockPlan, group: Sequence[UseMemory], model: CostModel, holds: bool, shared: frozenset[int]
) -> ReductionMemory:  # fmt: skip
    ratio = model.workload.kept_item(item := ITEM_BYTES[block.values[group[0].value].meta.dtype]) / item
    group = [_sliced(use) for use in group]
    micro = _sizes([(block, u.value, u.sent_from, u.reduce) for u in group], model, ratio)
    final = () if holds else _final(bp, block, group[0].value, model)
    landed = [(block, u.value, _after(u.sent_from, u.reduce), _final(bp, block, u.value, model)) for u in group]
    weights, sums = frozenset(u.value for u in group), model.workload.accumulate > 1
    packs = bool(group[0].reduce) and group[0].reduce[0].collective == "reduce_scatter"
    if group[0].reduce:
        # For a reduce_scatter gradients are packed as they are made; for an all_reduce when the unit is done (`base`, and a copy).
        base = 0 if packs else micro[0]
        held = _sent(micro, group[0].reduce, packs)
        after = _sent(_sizes(landed, model, ratio), final, packed=False, before=micro[-1])
        flat = micro[0] if packs else 0
        stands = 0 if sums else micro[-1]
        return ReductionMemory(weights, flat, tuple(flat + base + n - stands for n in (*held, *after)))
    whole = micro[0]
    parted = bool(shared & weights)  # its terms came from elsewhere: nothing is packed yet
    own = 0 if sums or not final or shared >= weights else whole
    packed = own > 0 and not parted
    beside = _sent(_sizes(landed, model, ratio), final, packed=packed)
    if parted:
        beside = tuple(
            n + own - sum(_local(block, u, model, ratio) for u in group if u.value not in shared) for n in beside
        )
    return ReductionMemory(weights, own, beside)


def _sliced(use: UseMemory) -> UseMemory:
    """A use whose gradient has taken its first steps as it came: those without a message, before the first collective."""
    local = next((n for n, step in enumerate(use.reduce) if step.collective), len(use.reduce))
    return replace(use, sent_from=_after(use.sent_from, use.reduce[:local]), reduce=use.reduce[local:])


def _local(block: Block, use: UseMemory, model: CostModel, ratio: float) -> int:
    return _sizes([(block, use.value, use.sent_from, ())], model, ratio)[0]


def _final(bp: BlockPlan, block: Block, value: int, model: CostModel) -> Steps:
    """The steps of a weight's gradient once a step."""
    param = bp.params.get(block.values[value].name)
    if param is None:
        return ()
    return tuple(s for s in _gathering(param.gradient, param.stored, model.sizes) if s.collective)


def _alike(steps: Steps) -> tuple[tuple[int, str | None], ...]:
    return tuple((s.axis, s.collective) for s in steps)


def _before(placements: Placements, steps: Steps) -> Placements:
    first = {step.axis: step.src for step in reversed(steps)}
    return tuple(first.get(axis, p) for axis, p in enumerate(placements))


def _sizes(
    members: Iterable[tuple[Block, int, Placements, Steps]], model: CostModel, ratio: float = 1.0
) -> list[int]:  # fmt: skip
    """Bytes of all members together before the first step, and after each: of the buffers that collectives read and write."""
    total: list[int] = []
    for block, value, start, steps in members:
        meta = block.values[value].meta
        each = buffers(meta.shape, ITEM_BYTES[meta.dtype], start, steps, model.sizes)
        total = [a + b for a, b in zip(total or [0] * len(each), each, strict=True)]
    return [int(n * ratio) for n in total]


def _brought(chain: Sequence[int], steps: Steps, several: bool, cast: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each collective of a gather: the bytes from its issue to its wait, and the most while it is issued. It reads a packed copy
    if there are several tensors, and writes what is then unpacked."""
    found: list[tuple[int, int]] = []
    made, most = cast, 0
    for number, step in enumerate(steps):
        size, after = chain[number], chain[number + 1]
        if step.collective == "all_gather":
            # all_gather of 400 MB over 8 GPUs: 50 MB are packed and 400 MB written, then unpacked. One tensor needs no packing.
            pack = size if several else 0
            flying = after + (pack if several else made)
            found.append((flying, max(most, made + pack + after)))
            most = flying + after
        else:
            most = max(most, made + after)
            if step.collective:
                found.append((after, most))
                most = after
        made = after
    return tuple(n for n, _ in found), tuple(n for _, n in found)


def _sent(chain: Sequence[int], steps: Steps, packed: bool, before: int = 0) -> tuple[int, ...]:
    """For each collective on the way: the bytes beside what was packed before the first one, which are the copies that are sent and
    what arrives."""
    found = []
    for number, step in enumerate(steps):
        size, after = chain[number], chain[number + 1]
        ready = packed and number == 0
        new = (after if step.collective == "reduce_scatter" else 0) + (0 if ready else size)
        found.append(before + new)
        before = after if step.collective == "reduce_scatter" or not ready else 0
    return tuple(found)
