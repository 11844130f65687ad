"""What the compute stream does in one pass through a unit, in order: operators, and the collectives for which they wait.

forward     each operator, behind what it waits for and before what the operators that follow wait for
backward    what runs forward again (recomputation), in the order of forward; then the gradients of each operator, in reverse order
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner_core.core import Block, BlockPlan, Op
from planner_core.cost.memory.saved import is_recomputed
from planner_core.cost.model import CostModel
from planner_core.cost.step import op_and_weight_seconds, op_seconds
from planner_core.cost.step_messages import Message, MessageSource, recomputed_ops, waited_message_seconds


class WorkKind(StrEnum):
    """What a rank does for a while. `EXPOSED`: messages of weights hold it up, or slow it. `PASS`: a pass through a unit as a whole."""

    COMPUTE = "compute"
    RECOMPUTATION = "recomputation"
    WAIT = "waits"
    EXPOSED = "held up by weight traffic"
    OPTIMIZER = "optimizer"
    OUTSIDE = "outside"
    HOST = "host"
    SEND = "sends"
    PASS = "part"


@dataclass(frozen=True, slots=True)
class PassWork:
    """An operator of a pass, or the wait for a collective at it, with its seconds if nothing is sent beside it. `follows`: what is behind
    the operator waits, not the operator itself."""

    kind: WorkKind
    op: str
    seconds: float
    message: Message | None = None
    follows: bool = False


def list_forward(
    block: Block, ops: Iterable[Op], bp: BlockPlan, sent: Iterable[Message], model: CostModel
) -> Iterator[PassWork]:
    """Yield the work of a forward pass through `ops` of a block; `sent`: the collectives for which it waits."""
    reruns, waits = recomputed_ops(block, bp), _group_by_site(sent)
    for op in ops:
        seconds = op_and_weight_seconds(block, op, bp, reruns, model)[0]
        yield from _surround_by_waits(WorkKind.COMPUTE, op, seconds, waits[op.name], model)


def list_backward(
    block: Block, ops: Sequence[Op], bp: BlockPlan, sent: Iterable[Message], model: CostModel
) -> Iterator[PassWork]:
    """Yield the work of a backward pass through `ops` of a block; `sent`: the collectives for which it waits."""
    reruns, waits, rerun_seconds = recomputed_ops(block, bp), _group_by_site(sent), {}
    for op in ops:
        if op.name in reruns:
            rerun_seconds[op.name] = op_seconds(block, op, bp, {}, model)[0] if is_recomputed(op, reruns) else 0.0
            repeated = [m for m in waits[op.name] if not m.gradient]
            yield from _surround_by_waits(WorkKind.RECOMPUTATION, op, rerun_seconds[op.name], repeated, model)
    for op in reversed(ops):
        # The price counts the second forward in backward. It is a pass of its own before, so it is taken out here.
        seconds = op_and_weight_seconds(block, op, bp, reruns, model)[1] - rerun_seconds.get(op.name, 0.0)
        once = [m for m in waits[op.name] if op.name not in reruns or m.gradient]
        yield from _surround_by_waits(WorkKind.COMPUTE, op, seconds, once, model)


def _group_by_site(sent: Iterable[Message]) -> dict[str, list[Message]]:
    waits: dict[str, list[Message]] = defaultdict(list)
    for m in sent:
        waits[m.site].append(m)
    return waits


def _surround_by_waits(
    kind: WorkKind, op: Op, seconds: float, waits: Sequence[Message], model: CostModel
) -> Iterator[PassWork]:
    """Yield an operator, behind the collectives for which it waits, and before those for which the next operators wait."""
    follow = [_moves_what_its_operator_makes(m) for m in waits]
    works = [
        PassWork(WorkKind.WAIT, op.name, waited_message_seconds(m, model), m, follows)
        for m, follows in zip(waits, follow, strict=True)
    ]
    yield from (w for w in works if not w.follows)
    if seconds:
        yield PassWork(kind, op.name, seconds)
    yield from (w for w in works if w.follows)


def _moves_what_its_operator_makes(m: Message) -> bool:
    """Return whether the operator makes what the message moves: results in forward, gradients of operands in backward."""
    return m.source is MessageSource.INSIDE or (m.source is MessageSource.RESULT) != m.gradient
