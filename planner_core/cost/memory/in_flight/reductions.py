"""The gradients of one unit: which of them are reduced together, and the memory that this takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from planner_core.core import ITEM_BYTES, Block, BlockPlan
from planner_core.cost.memory.in_flight.uses import (
    Steps,
    UseMemory,
    buffer_bytes,
    gather_steps,
    placed_after,
    step_signature,
)
from planner_core.cost.model import SMALL_BYTES, CostModel


class SentMemory(NamedTuple):
    """Bytes of one collective of gradients, beside the gradients that are held. `flying`: what it reads and writes. `issuing`: what is
    packed for it and freed then, beside these. `landing`: what is unpacked from it, before these are freed."""

    flying: int
    issuing: int = 0
    landing: int = 0

    def add(self, other: SentMemory, times: int = 1) -> SentMemory:
        """Return this and `times` the other."""
        return SentMemory(*(a + times * b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class ReductionMemory:
    """Gradients that are reduced together. `flat`: their bytes before the first collective, from the first gradient on (0: each counts as
    held, as it was made). `beside`: those of each collective on their way. `late`: if they are few, with which gradients of other units
    they travel when backward is over; else None. `waiting`: bytes beside the gradients that are held, until the first collective is
    issued. `ends`: what is held is then this GPU's part of the sum. `once`: how many of the last collectives are issued in a step's last
    micro-batch alone. `landed`: bytes of `beside` and `waiting` that are the sum itself in a step's first backward, and are added to it and
    freed in others."""

    weights: frozenset[int]
    flat: int
    beside: tuple[SentMemory, ...]
    late: object = None
    waiting: int = 0
    ends: bool = False
    once: int = 0
    landed: int = 0

    @property
    def of_first(self) -> ReductionMemory:
        """The same in a step's first backward."""
        own = SentMemory(self.landed)
        beside = tuple(n.add(own, -1) for n in self.beside)
        return replace(self, beside=beside, waiting=self.waiting - self.landed, landed=0)


def reductions(
    block: Block,
    bp: BlockPlan,
    uses: Mapping[tuple[str, int], UseMemory],
    model: CostModel,
    later: frozenset[int],
    shared: frozenset[int],
) -> Iterator[ReductionMemory]:
    """Yield the messages of a unit that uses weights so. Another unit finishes the gradients of the weights `later`, and others also use
    the weights `shared`."""
    groups: dict[object, list[UseMemory]] = {}
    seen: set[int] = set()
    for use in uses.values():
        v = block.values[use.value]
        given = use.value in block.inputs and not use.reduce  # the caller's, which sums it
        if not v.grad or given or (not use.is_separate and use.value in seen | later):
            continue
        final = _steps_once(bp, block, use.value, model)
        # A weight with several uses is reduced once a step, by the unit whose backward comes last. The others keep their terms.
        holds = bool(final) and use.value in seen | later
        seen.add(use.value)
        summed = model.workload.summed_in(v.meta.dtype)
        groups.setdefault((holds, step_signature(use.reduce), step_signature(final), summed), []).append(use)
    for (holds, *_), group in groups.items():  # type: ignore[misc]
        yield _make_reduction(block, bp, group, model, holds, shared)


def _make_reduction(
    block: Block, bp: BlockPlan, group: Sequence[UseMemory], model: CostModel, holds: bool, shared: frozenset[int]
) -> ReductionMemory:
    shared &= {u.value for u in group if u.is_separate}  # autograd gives the sum of all uses of a weight that is kept
    dtype = model.workload.summed_in(block.values[group[0].value].meta.dtype)
    group = [_after_local_steps(use) for use in group]
    micro = buffer_bytes([(block, u.value, u.sent_from, u.reduce) for u in group], model, gradients=True)
    final = () if holds else _steps_once(bp, block, group[0].value, model)
    landed = [
        (block, u.value, placed_after(u.sent_from, u.reduce), _steps_once(bp, block, u.value, model)) for u in group
    ]
    weights, sums = frozenset(u.value for u in group), model.workload.accumulate > 1
    packs = bool(group[0].reduce) and group[0].reduce[0].collective == "reduce_scatter"
    last = buffer_bytes(landed, model, gradients=True)
    if group[0].reduce:
        # For a reduce_scatter gradients are packed as they are made; for any other collective when the unit is done, by a copy.
        first, *rest = _sent_bytes(micro, group[0].reduce, packs)
        first = first.add(SentMemory(micro[0]) if packs else SentMemory(0, micro[0]))
        # With several micro-batches the result is added to the sum of the earlier ones and is free before that is copied to be sent.
        result = SentMemory(0 if sums else micro[-1])
        then = [n.add(result) for n in _sent_bytes(last, final, packed=False)]
        # What arrives is the gradient that stands; of a weight that the caller gives, it is added to that of the copies before.
        given = any(value in block.inputs for value in weights)
        stands = SentMemory(0 if sums or given else last[-1] if final else micro[-1])
        # A gradient that is not packed is the one that stands, until it is sent, unless that one is a sum or of another dtype.
        flat = micro[0] if packs or sums or dtype != block.values[group[0].value].meta.dtype else 0
        beside = tuple(n.add(stands, -1) for n in (first, *rest, *then))
        waiting = flat - stands.flying if flat else 0
        item = ITEM_BYTES[block.values[group[0].value].meta.dtype]
        # A reduce_scatter brings a new tensor. It stands as it came, unless the optimizer's gradient has another dtype.
        stays = bool(final) or model.summed_item(item) == model.workload.updated_item(item)
        new = sums and not given and group[0].reduce[-1].collective == "reduce_scatter" and stays
        return ReductionMemory(
            weights,
            flat,
            beside,
            waiting=waiting,
            ends=bool(final) and not sums,
            once=len(then),
            landed=micro[-1] if new else 0,
        )
    # Few bytes wait for one message of all units when backward is over: a norm needs no message of its own, but stands until then.
    if final and micro[0] <= SMALL_BYTES:
        packed_bytes = 0 if sums or shared >= weights else micro[0]
        anew = _sent_bytes(last, final, packed=False)
        return ReductionMemory(weights, packed_bytes, anew, late=(step_signature(final), dtype), once=len(anew))
    # A reduce_scatter sends what is packed rank by rank. An all_reduce sums it where it lies, if no term came from another unit.
    ranked = bool(final) and final[0].collective == "reduce_scatter"
    packed_bytes = micro[0] if final and not sums and (ranked or not shared >= weights) else 0
    packed = ranked or (packed_bytes > 0 and not shared & weights)
    terms = 0 if ranked else sum(_local_bytes(block, u, model) for u in group if u.value in shared)
    more = 0 if sums or not final else packed_bytes + terms - last[-1]
    beside = tuple(n.add(SentMemory(more)) for n in _sent_bytes(last, final, packed=packed))
    return ReductionMemory(weights, packed_bytes, beside, waiting=more, ends=bool(final) and not sums, once=len(beside))


def _after_local_steps(use: UseMemory) -> UseMemory:
    """Return a use whose gradient has taken its first steps as it came: those without a message, before the first collective."""
    local = next((n for n, step in enumerate(use.reduce) if step.collective), len(use.reduce))
    return replace(use, sent_from=placed_after(use.sent_from, use.reduce[:local]), reduce=use.reduce[local:])


def _local_bytes(block: Block, use: UseMemory, model: CostModel) -> int:
    return buffer_bytes([(block, use.value, use.sent_from, ())], model, gradients=True)[0]


def _steps_once(bp: BlockPlan, block: Block, value: int, model: CostModel) -> Steps:
    """Return the steps of a weight's gradient once a step."""
    param = bp.params.get(block.values[value].name)
    if param is None:
        return ()
    return tuple(s for s in gather_steps(param.gradient, param.stored, model.sizes) if s.collective)


def _sent_bytes(chain: Sequence[int], steps: Steps, packed: bool) -> tuple[SentMemory, ...]:
    """For each collective on the way: the bytes beside what was packed before the first one, which are the copies that are sent and
    what arrives."""
    by_collective = []
    before = 0
    for number, step in enumerate(steps):
        size, after = chain[number], chain[number + 1]
        # What is packed already is sent as it lies; else it is copied first. An all_reduce writes where it reads, others another tensor.
        ready, writes = packed and number == 0, step.collective != "all_reduce"
        # The parts that an all_to_all brings are joined in another tensor.
        joined = after if step.collective == "all_to_all" else 0
        by_collective.append(SentMemory(after * writes + (0 if ready else size), before, joined))
        before = after if writes or not ready else 0
    return tuple(by_collective)
