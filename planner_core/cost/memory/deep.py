"""The peak of the walk at a cost that does not grow with depth.

In the middle of many equal copies memory rises (or falls) by the same bytes with every copy. So the highest moment of a stretch of
equal copies is in one of the first or of the last copies. The middle is left out, and what it would have added is added:

    forward, after the gap         kept  + left out · (bytes that one copy keeps)
    backward, before the gap       kept  + the same, since those copies have not run yet
    backward, after the gap        grads + left out · (bytes of one copy's gradients)

Example: 1 000 layers keep 2 MB each. 12 of them are simulated, and 988 are left out: after the gap 1 976 MB more are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner_core.core import Block, BlockPlan, Call, Graph, Op, ParamPlan
from planner_core.cost.memory.backward import BackwardMemory, Gradient
from planner_core.cost.memory.forward import MOMENTS, BlockMemory, CallMemory, Moment
from planner_core.cost.memory.peak import (
    KnownCopies,
    backward_of,
    block_memories,
    highest_backward,
    highest_moment,
    walk_from_moments,
)
from planner_core.cost.memory.standing import StandingMemory, standing_memory
from planner_core.cost.model import CostModel
from planner_core.cost.resolved_ops import RECEIVE

COPIES_AT_EACH_END = 6
"""Copies of a stretch that are simulated at each end. What is in flight reaches over one copy for each mesh axis at most."""


@dataclass(frozen=True, slots=True)
class StageMoments:
    """One stage of a pipeline. `state`: what its weights take. `kept`: bytes that one micro-batch keeps when its forward is done, with
    those `received` that no operator keeps, or that are handed on. The highest moments of a `forward`, of a `backward`, both beside
    gradients that stand, of a step's `first_backward`, which makes these, and of its `last_backward`, which sums them over ranks."""

    state: StandingMemory
    kept: int
    received: int
    forward: Moment
    backward: Moment
    first_backward: Moment
    last_backward: Moment


@dataclass(frozen=True, slots=True)
class Gap:
    """Calls that are left out. `at`: the number of the item after them in the shortened block. `copies`: how many."""

    at: int
    copies: int


def peak_memory(
    blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel, known: KnownCopies | None = None
) -> dict[str, int]:
    """Return the bytes at the peak by kind, as `Walk.memory_bytes`. `known` is that of `block_memories`."""
    memories, gaps = _shortened_memories(blocks, graph, model, known, {})
    walk = walk_from_moments(
        standing_memory(blocks, graph, model),
        memories,
        _forward_moments(memories[""], gaps),
        _backward_moments(memories[""], gaps),
        model,
        of=lambda m: (highest_moment(m),),
    )
    return walk.memory_bytes()


def stage_moments(
    blocks: Mapping[str, BlockPlan],
    graph: Graph,
    model: CostModel,
    gradients: Mapping[int, int],
    sent: int,
    known: KnownCopies | None,
    borrowed: Mapping[str, ParamPlan],
) -> StageMoments:
    """Walk one stage of a pipeline. `gradients`: bytes of those that arrive, by value. `sent`: bytes of what is sent on, which is copied
    when forward is done. `known` and `borrowed` are those of `block_memories`."""
    state = standing_memory(blocks, graph, model)
    memories, gaps = _shortened_memories(blocks, graph, model, known, borrowed)
    given = {v: Gradient(size) for v, size in gradients.items()}
    inputs, outputs = Moment(state.inputs), Moment(state.inputs + sent)
    forward = tuple(_forward_moments(memories[""], gaps))
    last = highest_backward(_backward_moments(memories[""], gaps, given))
    inner = last
    reductions = [r for u in memories[""].units for r in u.reductions]
    # Example: ZeRO-1 sums the gradients of a step beside the last of 8 micro-batches. ZeRO-2 sums those of every micro-batch alike.
    if model.workload.accumulate > 1 and any(r.once for r in reductions):
        inner = highest_backward(_backward_moments(memories[""], gaps, given, is_last=False))
    first = inner[-1]
    # Example: ZeRO-2 adds what a reduce_scatter brings to the sum. In a step's first backward it is the sum.
    if any(r.landed for r in reductions):
        first = highest_moment(_backward_moments(memories[""], gaps, given, is_last=False, is_first=True))
    highest = highest_moment((*forward, forward[-1] + Moment(0, 0, sent)))
    return StageMoments(
        state,
        (forward[-1] + inputs).kept,
        _received_bytes(memories[""]),
        highest + inputs,
        # What was sent on is the root of autograd's graph, so torch lets it go when backward is over.
        replace(inner[0], grads=0) + outputs,
        first + outputs,
        replace(last[0], grads=0) + outputs,
    )


def _received_bytes(top: BlockMemory) -> int:
    """Return the bytes that the top block of a stage receives and of which no operator keeps any, or that it hands on."""
    block = top.storages.block
    receives = [isinstance(item, Op) and item.fn == RECEIVE for item in block.items]
    pairs = list(zip(receives, top.saved_at, strict=True))
    kept = {key for is_received, keys in pairs for key in keys if not is_received}
    # What several stages read is one buffer in all of a rank's copies, so the last of its readers counts it.
    kept -= {top.storages.at.get(v) for v in block.outputs}
    return top.size_of(key for is_received, keys in pairs for key in keys if is_received and key not in kept)


def _shortened_memories(
    blocks: Mapping[str, BlockPlan],
    graph: Graph,
    model: CostModel,
    known: KnownCopies | None,
    borrowed: Mapping[str, ParamPlan],
) -> tuple[dict[str, BlockMemory], list[Gap]]:
    """Return the memory of each block, of a model without the middle of its stretches of equal copies; and what is left out."""
    top, gaps = shorten_repeats(graph.top, {p: label for label, bp in blocks.items() for p in bp.prefixes})
    return block_memories(blocks, replace(graph, top=top), model, known, borrowed), gaps


def _forward_moments(top: BlockMemory, gaps: Sequence[Gap]) -> Iterator[Moment]:
    """Yield the moments of forward, with what the copies left out keep."""
    more = [_gap_saved_bytes(top, gap) for gap in gaps]
    for number, moment in enumerate(top.forward_moments()):
        # Each gap that lies behind has run forward, so its copies' kept bytes are there.
        gap_bytes = sum(extra for gap, extra in zip(gaps, more, strict=True) if gap.at <= number // MOMENTS)
        yield moment + Moment(gap_bytes) if gap_bytes else moment


def _backward_moments(
    top: BlockMemory,
    gaps: Sequence[Gap],
    given: Mapping[int, Gradient] | None = None,
    *,
    is_last: bool = True,
    is_first: bool = False,
) -> Iterator[Moment]:
    """Yield the moments of backward, with what the copies left out keep until they run, and with their gradients after that. `given`: the
    gradients that arrive, if it does not begin with the loss. `is_last`, `is_first`: whether it is that of a step's last micro-batch, or of
    its first."""
    more = [(_gap_saved_bytes(top, gap), _gap_gradient_bytes(top, gap)) for gap in gaps]
    # A stage that is not the last begins with the gradients that the next stage sends.
    run = BackwardMemory(top, dict(given), tuple(given.values())) if given else backward_of(top)
    run.is_last, run.is_first = is_last, is_first
    for gap in gaps:
        for reduction in _gap_call(top, gap).unit.reductions:
            run.leave_late(reduction, gap.copies)
    for moment in run.moments():
        extra = Moment()
        for gap, (gap_bytes, grads) in zip(gaps, more, strict=True):
            # Backward comes from the end: a gap before the item at work has not run yet and still keeps; one behind it has left its
            # gradients.
            extra += Moment(gap_bytes) if gap.at <= run.at else Moment(0, grads)
        yield moment + extra


def _gap_saved_bytes(top: BlockMemory, gap: Gap) -> int:
    return gap.copies * top.saved_bytes(gap.at)


def _gap_gradient_bytes(top: BlockMemory, gap: Gap) -> int:
    return gap.copies * _gap_call(top, gap).grads


def _gap_call(top: BlockMemory, gap: Gap) -> CallMemory:
    """Return what one of the copies that are left out does to the memory of its caller."""
    call = top.storages.block.items[gap.at]
    assert isinstance(call, Call)
    return top.calls[call.prefix]


def shorten_repeats(top: Block, labels: Mapping[str, str]) -> tuple[Block, list[Gap]]:
    """Return the top block without the middle of each long stretch of equal copies. `labels`: the plan of each copy, by prefix."""
    readers = Counter(v for item in top.items for v in set(item.inputs)) + Counter(top.outputs)
    items: list[Op | Call] = []
    gaps: list[Gap] = []
    first = 0
    while first < len(top.items):
        last = _stretch_end(top.items, first, labels, readers)
        whole = list(top.items[first:last])
        # The first six copies stay, and the last six. The first after the gap reads what the sixth copy makes.
        if len(whole) > 2 * COPIES_AT_EACH_END + 1:
            left = len(whole) - 2 * COPIES_AT_EACH_END
            gaps.append(Gap(len(items) + COPIES_AT_EACH_END, left))
            whole = [
                *whole[:COPIES_AT_EACH_END],
                _rewire_copies(
                    whole[COPIES_AT_EACH_END + left],
                    whole[COPIES_AT_EACH_END + left - 1],
                    whole[COPIES_AT_EACH_END - 1],
                ),
                *whole[-COPIES_AT_EACH_END + 1 :],
            ]
        items += whole
        first = last
    return replace(top, items=tuple(items)), gaps


def _rewire_copies(item: Op | Call, old: Op | Call, new: Op | Call) -> Op | Call:
    """Return the same item, but it reads what `new` makes where it read what `old` makes."""
    swap = dict(zip(old.outputs, new.outputs, strict=True))
    return replace(item, inputs=tuple(swap.get(v, v) for v in item.inputs))


def _stretch_end(items: Sequence[Op | Call], first: int, labels: Mapping[str, str], readers: Mapping[int, int]) -> int:
    """Return the number of the item after a stretch of equal copies that begins with item `first`."""
    last = first + 1
    while last < len(items) and _is_equal_successor(items[last - 1], items[last], labels, readers):
        # The first copy reads what no copy makes (the embedding), so operands are compared from the second copy on.
        if last - first > 1 and not _reads_same_operands(items[last - 2], items[last - 1], items[last]):
            break
        last += 1
    return last


def _is_equal_successor(
    one: Op | Call, other: Op | Call, labels: Mapping[str, str], readers: Mapping[int, int]
) -> bool:
    """Return whether two items are copies with the same plan, and the second alone reads what the first makes."""
    if not isinstance(one, Call) or not isinstance(other, Call) or labels[one.prefix] != labels[other.prefix]:
        return False
    # If another item read a result of the middle, it would live across the gap, and memory would not rise evenly from copy to copy.
    return all(readers[v] == (v in other.inputs) for v in one.outputs)


def _reads_same_operands(before: Op | Call, one: Op | Call, other: Op | Call) -> bool:
    """Return whether each operand of two copies is the same value, or the same result of the copy before."""

    def source(copy: Op | Call, previous: Op | Call) -> list[tuple[str, int]]:
        position = {v: k for k, v in enumerate(previous.outputs)}
        return [("result", position[v]) if v in position else ("value", v) for v in copy.inputs]

    # A mask that all copies share is the same value in each; the residual stream is the same result of the copy before.
    return source(one, before) == source(other, one)
