"""Cut a recorded forward pass into stages: the calls of each stage's range, and the tensors that pass from one stage to the
next.

    whole      embedding  block 0  block 1  block 2  block 3  norm  head  loss
    stage 0    embedding  block 0  block 1                                          sends h
    stage 1    receives h                   block 2  block 3  norm  head  loss

Constants of the model's inputs (masks, positions, rotary tables) are made in each stage that reads them, and not sent. If a
stage needs a tensor of a stage that is not its neighbour, the stages between pass it on. A plan's price counts the same tensors
(`cost.schedule.pipeline.stages`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner_core.core import Pipeline
from planner_core.ops import writes_in_place
from planner_core.runtime.mismatch import CannotRewrite, PlanMismatch
from planner_core.runtime.record import Ref, Tape
from planner_core.runtime.record.batch import find_input_write
from planner_core.runtime.record.tape import BUFFER, INPUT
from planner_core.runtime.write.placed_tape import PlannedTape
from planner_core.runtime.write.program import split_into_units


@dataclass(frozen=True)
class StageLayout:
    """One stage of a recording under a plan.

    `takes` and `gives`: the tensors from the stage before and for the next one, by number. `inputs`: the inputs of the model
    that it reads.
    """

    number: int
    layout: PlannedTape
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    inputs: frozenset[int]

    def shape(self, number: int) -> tuple[int, ...]:
        """Return this rank's shape of a tensor that passes between stages."""
        return self.layout.local_shape(number, self.layout.delivered_placements[number])


def cut_layout(layout: PlannedTape, cut: Pipeline) -> list[StageLayout]:
    """Return every stage of a recording under a plan, in order.

    Raises PlanMismatch if its blocks are not those that were cut, and CannotRewrite if the model cannot run in stages.
    """
    _refuse_unstageable(layout)
    prefixes: list[str] = []
    stage_of: dict[int, int] = {}  # of each operator's call, by id
    # Units come in running order, so the number of labels so far says which call of a block a unit belongs to.
    for unit in split_into_units(layout):
        if unit.label:
            prefixes.append(unit.prefix)
        stage = _find_stage(cut, len(prefixes), is_call=bool(unit.label))
        stage_of.update((id(call), stage) for call in unit.calls)
    _check_copies(prefixes, cut)
    _place_counters(layout, stage_of)
    return [_stage_layout(layout, number, stage_of, len(cut.copies)) for number in range(len(cut.copies))]


def _find_stage(cut: Pipeline, calls: int, *, is_call: bool) -> int:
    """Return the stage of the call number `calls` (from 1), or of what follows that call and precedes the next one.

    What follows a call belongs to the call's stage.
    """
    # Example: copies (2, 2, 0). The last stage begins at call 4, so it gets what follows the last call, such as the norm and the loss.
    after_last = not is_call and calls == sum(cut.copies)
    last_call = calls if after_last else calls - 1
    return max((s for s in range(len(cut.copies)) if cut.call_range(s)[0] <= last_call), default=0)


def _place_counters(layout: PlannedTape, stage_of: dict[int, int]) -> None:
    """Place each write to a buffer (a norm counts its batches) in one stage: that of the operator before it. Other constants
    belong to every stage that needs them."""
    tensors, stage = layout.tape.tensors, 0
    for call in layout.tape.calls:
        stage = stage_of.get(id(call), stage)
        writes = call.kind == "constant" and call.inputs and writes_in_place(call.fn)
        if writes and tensors[tensors[call.inputs[0]].root].kind == BUFFER:
            stage_of[id(call)] = stage


def _refuse_unstageable(layout: PlannedTape) -> None:
    tape = layout.tape
    if layout.loss is None or tape.tensors[layout.loss].shape != ():
        raise PlanMismatch(
            "a plan with stages trains on the loss that the last stage computes, and this call returns none; give the model its labels"
        )
    if line := find_input_write(tape):
        raise CannotRewrite(
            f"forward writes into an input in place at {line.rpartition('/')[2]}, and several stages read it; write into a copy"
        )
    if any(c.answer == "random" for c in tape.calls):
        raise CannotRewrite(
            "forward draws random numbers other than masks of dropout, which each stage would draw for itself; give them as an input"
        )


def _check_copies(prefixes: Sequence[str], cut: Pipeline) -> None:
    """Check that the copies of blocks are those by which weights were assigned to the stages."""
    if len(prefixes) != sum(cut.copies):
        raise PlanMismatch(
            f"the stages of the plan run {sum(cut.copies)} copies of blocks, and this call runs {len(prefixes)}; plan the model again"
        )
    for stage in range(len(cut.copies)):
        first, end = cut.call_range(stage)
        if misplaced := next((p for p in prefixes[first:end] if p not in cut.parts[stage]), None):
            raise PlanMismatch(f"{misplaced} runs in stage {stage} here, and not in the plan; plan the model again")


def _stage_layout(layout: PlannedTape, number: int, stage_of: dict[int, int], stages: int) -> StageLayout:
    tape = layout.tape
    calls_of_stage = [c for c in tape.calls if stage_of.get(id(c), number) == number]
    takes = _crossing_tensors(layout, number, stage_of)
    last = number + 1 == stages
    # By the same rule as the next stage's `takes`, so both ends of a message agree without asking one another.
    gives = () if last else _crossing_tensors(layout, number + 1, stage_of)
    result = Ref(layout.loss) if last and layout.loss is not None else tuple(map(Ref, gives))
    tape_of_stage = replace(tape, calls=calls_of_stage, result=result, received=takes)
    # A shallow copy: stages share placements and tensors, and differ in their calls alone.
    layout_of_stage = copy.copy(layout)
    layout_of_stage.tape = tape_of_stage
    return StageLayout(number, layout_of_stage, takes, gives, _model_inputs(tape_of_stage))


def _crossing_tensors(layout: PlannedTape, number: int, stage_of: dict[int, int]) -> tuple[int, ...]:
    """Return the tensors that are made before a stage and used in or after it, in the order of their first use there."""
    computed_before: set[int] = set()
    crossing: dict[int, None] = {}
    for call in layout.tape.calls:
        if call.kind != "constant" and stage_of.get(id(call), number) < number:
            computed_before.update(call.outputs)
    for call in layout.tape.calls:
        # In or after it: a tensor for a later stage passes through this one, since torch sends between neighbours alone.
        if stage_of.get(id(call), -1) >= number:
            crossing.update(dict.fromkeys(n for n in call.inputs if n in computed_before))
    return tuple(crossing)


def _model_inputs(tape: Tape) -> frozenset[int]:
    """Return the inputs of the model that a stage reads, also through constants."""
    makers = {n: c for c in tape.calls if c.kind == "constant" for n in c.outputs}
    todo = [n for c in tape.calls if c.kind != "constant" or writes_in_place(c.fn) for n in c.inputs]
    seen: set[int] = set()
    while todo:
        number = todo.pop()
        if number not in seen:
            seen.add(number)
            todo += makers[number].inputs if number in makers else ()
    return frozenset(n for n in seen if tape.tensors[n].kind == INPUT)
