"""One rank's step as a list of work on streams, in the order and at the times of its simulation (`planner_core.cost.schedule`).

All ranks do the same work. Four streams run side by side:

    parts         the part of the model that runs: a layer, or what is between layers
    compute       operators, and what delays them; its seconds add up to the simulated step
    collectives   the collectives for which an operator waits
    weights       gathers of weights and reductions of gradients beside compute, where a run issues them
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from planner_core.core import BlockLabel, Graph, Op, Plan, list_names, refuse_stages
from planner_core.cost import (
    BucketStage,
    Message,
    Moved,
    ScheduledUnit,
    TimedWork,
    WorkKind,
    block_of,
    list_timed_work,
    schedule_units,
)
from planner_core.planning.stages import stage_trace

MODEL_PASSES, COMPUTE, COLLECTIVES, WEIGHTS = STREAMS = ("parts", "compute", "collectives", "weights")
STEP_WORK = {
    WorkKind.OPTIMIZER: ("clip gradients, update weights", ""),
    WorkKind.OUTSIDE: ("the GPU has no work", "loader, logging"),
    # The waits lie between kernels all through the step. They are one piece, since none belongs to an operator.
    WorkKind.HOST: ("waits for the host, which issues the kernels", "summed over the step"),
}
"""What is done once a step, and a note on it."""
ONE_MOVED = {Moved.WEIGHTS: "", Moved.COPIES: "the working copy of ", Moved.GRADIENTS: "the gradient of "}
MAX_MESSAGE_NAMES = 4
"""So many weights of a message are named."""


@dataclass(frozen=True, slots=True)
class TraceWork:
    """One piece of work of a rank. `part`: the part of the model. `copy`: its number among `copies` equal ones that follow each other.
    `note`: what waits for what. Micro-batches count from 1; 0 is work that belongs to no micro-batch. `collective` and `axis`: which one is
    sent, and along which mesh axis."""

    stream: str
    kind: str
    name: str
    phase: str
    part: str
    copy: int
    copies: int
    micro_batch: int
    start_s: float
    seconds: float
    note: str = ""
    collective: str = ""
    axis: str = ""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the model; `copy` counts equal ones that follow each other."""

    title: str
    copy: int = 1
    copies: int = 1


def step_work(plan: Plan, graph: Graph) -> list[TraceWork]:
    """Return all work of one rank in a step of `plan`, in seconds from the step's begin. Raises InputError for a plan of another model."""
    refuse_stages(plan, "a trace of one rank", "take that of the stages")
    units = schedule_units(plan, graph)
    words = _StepWords(plan, graph, units)
    return [words.describe(w) for w in list_timed_work(plan, graph, units)]


def trace_of(plan: Plan, graph: Graph) -> dict[str, Any]:
    """Return the step of a plan in the Trace Event Format: of one rank, or of a plan with stages a row for each rank of the pipeline."""
    return stage_trace(plan) if plan.pipeline else chrome_trace({plan.name: step_work(plan, graph)})


def chrome_trace(steps: Mapping[str, Iterable[TraceWork]]) -> dict[str, Any]:
    """Return the steps of plans, by name, in the Trace Event Format, which Perfetto and chrome://tracing open. A plan is a process, a
    stream is a thread, times are in microseconds."""
    events: list[dict[str, Any]] = []
    for pid, (name, step) in enumerate(steps.items()):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        events += [
            {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": stream}}
            for tid, stream in enumerate(STREAMS)
        ]
        events += [_trace_event(pid, w) for w in step]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _trace_event(pid: int, w: TraceWork) -> dict[str, Any]:
    part = f"{w.part} {w.copy} of {w.copies}" if w.copies > 1 else w.part
    args = {"part": part, "phase": w.phase, "micro-batch": w.micro_batch, "note": w.note}
    return {
        "ph": "X",
        "pid": pid,
        "tid": STREAMS.index(w.stream),
        "ts": w.start_s * 1e6,
        "dur": w.seconds * 1e6,
        "name": w.name,
        "cat": w.kind,
        "args": {k: v for k, v in args.items() if v},
    }


class _StepWords:
    """Names the work of a step: the parts of the model, what is sent, and who waits for it."""

    def __init__(self, plan: Plan, graph: Graph, units: Sequence[ScheduledUnit]) -> None:
        self.plan, self.graph = plan, graph
        self.parts = _name_parts(units)
        self.labels = {unit.name: unit.label for unit in units}
        # Reversed, so that the first part that uses a weight stays.
        self.homes = {
            use.weight: part for unit, part in reversed([*zip(units, self.parts, strict=True)]) for use in unit.uses
        }

    def describe(self, w: TimedWork) -> TraceWork:
        """Name one piece of work."""
        name, note = self._name(w)
        part, sent = self._part_of(w), w.sent
        where = (w.phase, part.title, part.copy, part.copies, w.micro_batch, w.start_s, w.seconds, note)
        if w.kind is WorkKind.SEND and sent is not None:
            stream = COLLECTIVES if isinstance(sent, Message) else WEIGHTS
            return TraceWork(stream, w.kind, name, *where, sent.kind, self.plan.mesh.name_of(sent.axes))
        # A wait for a message is a piece of compute, whose seconds add up to the step.
        stream = MODEL_PASSES if w.kind is WorkKind.PASS else COMPUTE
        return TraceWork(stream, w.kind, name if sent is None else f"waits for {name}", *where)

    def _part_of(self, w: TimedWork) -> _Part:
        if isinstance(w.sent, BucketStage):
            parts = {self.homes[weight] for weight in w.sent.weights}
            return parts.pop() if len(parts) == 1 else _Part(f"{len(parts)} parts of the model")
        return _Part("the whole model") if w.unit is None else self.parts[w.unit]

    def _name(self, w: TimedWork) -> tuple[str, str]:
        """Return what is done, and a note on it."""
        if w.together > 1:
            numbers = f"micro-batches {w.micro_batch} to {w.micro_batch + w.together - 1}"
            return f"{numbers}: {w.kind}", "each like the others, put together here"
        if isinstance(w.sent, Message):
            who = "the operators that follow wait for it" if w.follows else f"{w.op} waits for it"
            return f"{w.sent.kind} of {w.sent.what}", f"{who}; {w.op}, {self._describe_size(w.sent)}"
        if w.sent is not None:
            return self._name_weights(w.sent)
        if w.kind is WorkKind.PASS and w.unit is not None:
            return f"{w.phase}: {self.parts[w.unit].title}", ""
        if w.kind is WorkKind.EXPOSED:
            return "slowed by weight traffic", f"{w.op}; weights or gradients are on their way beside it"
        return STEP_WORK.get(w.kind, (w.op, ""))

    def _name_weights(self, sent: BucketStage) -> tuple[str, str]:
        """Return `all_gather of 7 weights`, or `reduce_scatter of the gradient of lm_head.weight`; and its size, and whose weights."""
        weights = dict.fromkeys(sent.weights)
        names = [block_of(self.graph, self.labels[prefix]).values[number].name for prefix, number in weights]
        size = self._describe_size(sent)
        if len(names) == 1:
            return f"{sent.kind} of {ONE_MOVED[sent.moved]}{names[0]}", size
        named = list(dict.fromkeys(names))
        return f"{sent.kind} of {len(names)} {sent.moved.value}", f"{size}: {list_names(named, MAX_MESSAGE_NAMES)}"

    def _describe_size(self, sent: Message | BucketStage) -> str:
        mesh = self.plan.mesh
        ranks = math.prod(mesh.axis_sizes[axis] for axis in sent.axes)
        return f"{sent.num_bytes / 1e6:,.3g} MB over {ranks} ranks ({mesh.name_of(sent.axes)})"


def _name_parts(units: Iterable[ScheduledUnit]) -> list[_Part]:
    """Return the part of the model that each unit of a forward pass is."""
    titles = [BlockLabel.parse(u.label).block if u.label else _segment_title(u.ops) for u in units]
    parts: list[_Part] = []
    for title, run in groupby(titles):
        copies = len(list(run))
        parts += [_Part(title, copy, copies) for copy in range(1, copies + 1)]
    return parts


def _segment_title(ops: Sequence[Op]) -> str:
    """Return the modules from the first to the last: `norm … lm_head`."""
    modules = [op.site.scope.rpartition(".")[2] for op in ops]
    named_modules = list(dict.fromkeys(m for m in modules if m))
    return " … ".join(dict.fromkeys((named_modules[0], named_modules[-1]))) if named_modules else "top"
