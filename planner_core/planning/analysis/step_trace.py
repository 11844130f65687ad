"""One rank's step as a list of work on streams, in order. It has the same seconds as the price of the plan, by operator.

All ranks do the same work. Four streams run side by side:

    parts         the part of the model that runs: a layer, or what is between layers
    compute       operators, and the waits that delay them; its seconds add up to the step's time
    collectives   the collectives for which an operator waits
    weights       gathers and reductions of weights beside compute

The weight traffic of a unit is drawn beside the unit itself, where the price counts it. A run sends gathers one unit earlier, and
reductions one unit later, beside work of the same kind; see `planner_core.cost.step_time`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from planner_core.core import Block, BlockLabel, Call, Graph, Op, Plan, refuse_stages
from planner_core.cost import (
    BESIDE,
    CostModel,
    Message,
    MessageSource,
    PricedUnit,
    block_of,
    cost_model_of,
    message_time,
    op_and_weight_seconds,
    op_seconds,
    priced_units,
    recomputed_ops,
    waited_message_seconds,
)
from planner_core.cost.memory import Rerun
from planner_core.planning.stages import stage_trace

PARTS, COMPUTE, COLLECTIVES, WEIGHTS = STREAMS = ("parts", "compute", "collectives", "weights")
WORKS, AGAIN, WAITS, HELD, UPDATES, SENDS, PART, HOST = KINDS = (
    "compute",
    "recomputation",
    "waits",
    "held up by weight traffic",
    "optimizer",
    "sends",
    "part",
    "host",
)
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
Sent = tuple[MessageSource, bool]
"""What a message moves, and whether it is the gradient."""
AFTER: Collection[Sent] = ((MessageSource.RESULT, False), (MessageSource.INSIDE, False))
AFTER_BACKWARD: Collection[Sent] = ((MessageSource.OPERAND, True), (MessageSource.INSIDE, False))
"""Messages for which the operators that follow wait, in forward and in backward; for others their own operator waits."""
MOST_WORK = 100_000
"""Up to this much work is listed in full. Beyond it, all micro-batches between the first and the last are summed up by kind."""


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
class _PassWork:
    """Work of one pass through a part, before it has a time. `message`: the work is a wait for this one."""

    kind: str
    name: str
    seconds: float
    note: str = ""
    message: Message | None = None


@dataclass
class _Segment:
    """A call of a repeated block, or the operators between two such calls."""

    title: str
    label: str
    ops: tuple[Op, ...]
    copy: int = 1
    copies: int = 1
    passes: dict[str, list[_PassWork]] = field(default_factory=dict)


def step_work(plan: Plan, graph: Graph) -> list[TraceWork]:
    """Return all work of one rank in a step of `plan`, in seconds from the step's begin. Raises InputError for a plan of another model."""
    refuse_stages(plan, "a trace of one rank", "take that of the stages")
    return _StepDrawing(plan, graph).work()


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


class _StepDrawing:
    """Gives each piece of work of a plan its time."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.graph, self.model = plan, graph, cost_model_of(plan)
        self.units = {u.label: u for u in priced_units(plan.blocks, graph, self.model)}
        self.parts = _model_segments(plan, graph)
        self.now = 0.0
        self.free = 0.0
        self.done: list[TraceWork] = []
        templates: dict[tuple[str, str], list[_PassWork]] = {}
        for part in self.parts:
            for phase in (FORWARD, BACKWARD):
                # Copies of one variant do the same work; segments of the top block do not, though their titles may be equal.
                key = (part.label or part.title, phase)
                if part.label == "" or key not in templates:
                    templates[key] = list(self._list_pass(part, phase))
                part.passes[phase] = templates[key]

    # --- laying out -----------------------------------------------------------------------------------

    def work(self) -> list[TraceWork]:
        count = self.model.workload.accumulate
        each = sum(len(pieces) for part in self.parts for pieces in part.passes.values())
        # The first micro-batch also gathers and the last also reduces once a step, so only those between are alike.
        put_together = count > 2 and count * each > MOST_WORK
        for number in range(1, count + 1):
            if put_together and 2 < number < count:
                continue
            begin = len(self.done)
            self._micro_batch(number, number == 1, number == count)
            if put_together and number == 2:
                self._sum_middle_micro_batches(begin, count)
        optimizer = sum(u.copies * u.optimizer_s for u in self.units.values())
        self._add_compute(
            UPDATES, "clip gradients, update weights", OPTIMIZER, _Segment("all weights", "", ()), 0, optimizer
        )
        # The waits lie between kernels all through the step. They are drawn as one piece, since none belongs to an operator.
        waits, whole = self.plan.cost.host_wait_s, _Segment("the whole step", "", ())
        self._add_compute(
            HOST, "waits for the host, which issues the kernels", OPTIMIZER, whole, 0, waits, "summed over the step"
        )
        return _clip_to_step(self.done, self.now)

    def _micro_batch(self, number: int, first: bool, last: bool) -> None:
        seen: set[str] = set()
        if first:
            self._add_unhidden_messages(self.parts[0], FORWARD, number)
        for part in self.parts:
            if first and part.label and (block := BlockLabel.parse(part.label).block) not in seen:
                seen.add(block)
                self._add_end_of_units(part, FORWARD, number)
            self._run_part(part, FORWARD, number, first)
        # Reversed, so that the first copy of a block stays: backward reaches it last, when nothing is left to hide its reduction.
        ends = {BlockLabel.parse(p.label).block: i for i, p in reversed(list(enumerate(self.parts))) if p.label}
        for i, part in reversed(list(enumerate(self.parts))):
            self._run_part(part, BACKWARD, number, last)
            if last and part.label and ends[BlockLabel.parse(part.label).block] == i:
                self._add_end_of_units(part, BACKWARD, number)
        if last:
            self._add_unhidden_messages(self.parts[0], BACKWARD, number)

    def _run_part(self, part: _Segment, phase: str, number: int, edge: bool) -> None:
        """One pass of a micro-batch through a part."""
        begin = self.now
        for piece in part.passes[phase]:
            if (m := piece.message) is not None:
                name = _describe_sent(m)
                self._add_work(COLLECTIVES, SENDS, name, phase, part, number, self.now, piece.seconds, piece.note, m)
            self._add_compute(piece.kind, piece.name, phase, part, number, piece.seconds, piece.note)
        traffic = self._list_weight_traffic(part, phase, edge)
        # The top block is one unit in the price, but several parts here: each takes its share of what traffic adds to the unit.
        delay_s = self._delay_of_traffic_s(self.units[part.label], phase, edge) * self._share_of_traffic(
            part, phase, edge, traffic
        )
        if delay_s > 0:
            note = "weights of the units beside are on their way"
            self._add_compute(HELD, "held up by weight traffic", phase, part, number, delay_s, note)
        for m in traffic:
            seconds = message_time(m, self.model)
            # The stream of weights sends one message at a time, and none before the part beside which it is drawn begins.
            self.free = max(self.free, begin)
            note = f"{_axis_words(m, self.plan)}; the {'unit' if phase == FORWARD else 'optimizer'} that needs it waits for its end"
            self._add_work(WEIGHTS, SENDS, _describe_message(m), phase, part, number, self.free, seconds, note, m)
            self.free += seconds
        self._add_work(PARTS, PART, f"{phase}: {part.title}", phase, part, number, begin, self.now - begin, "")

    def _add_end_of_units(self, part: _Segment, phase: str, number: int) -> None:
        """Add the first unit's gather and the last unit's reduction, which nothing hides."""
        block, seconds = BlockLabel.parse(part.label).block, 0.0
        for label, u in self.units.items():
            if BlockLabel.parse(label).block == block and u.repeats > 1:
                mine = [m for m in u.each if m.category == BESIDE and (m.phase == FORWARD or m.gradient)]
                sent = sum(message_time(m, self.model) for m in (*mine, *u.once) if m.phase == phase)
                # The price knows no order of variants, so the first copy is of each of them by its share of the copies.
                seconds += u.copies * sent / u.repeats
        name = "the first gather of weights" if phase == FORWARD else "the last reduction of gradients"
        self._add_compute(HELD, name, phase, part, number, seconds, "nothing runs that it could hide behind")

    def _add_unhidden_messages(self, part: _Segment, phase: str, number: int) -> None:
        """Add what is sent once a step with nothing beside it: compute waits for the whole message."""
        for copies, m in ((u.copies, m) for u in self.units.values() for m in u.alone if m.phase == phase):
            seconds, name = copies * message_time(m, self.model), f"waits for {m.kind} of {m.what} {m.weight}"
            note = f"{_axis_words(m, self.plan)}; nothing runs beside it"
            self._add_work(WEIGHTS, SENDS, _describe_message(m), phase, part, number, self.now, seconds, note, m)
            self._add_compute(HELD, name, phase, part, number, seconds, note)
            self.free = max(self.free, self.now)

    def _add_compute(
        self, kind: str, name: str, phase: str, part: _Segment, number: int, seconds: float, note: str = ""
    ) -> None:
        """Add work on the compute stream. The next work on it starts when this ends."""
        if seconds:
            self._add_work(COMPUTE, kind, name, phase, part, number, self.now, seconds, note)
            self.now += seconds

    def _add_work(
        self,
        stream: str,
        kind: str,
        name: str,
        phase: str,
        part: _Segment,
        number: int,
        start_s: float,
        seconds: float,
        note: str,
        message: Message | None = None,
    ) -> None:
        sent = () if message is None else (message.kind, self.plan.mesh.name_of(message.axes))
        place = (part.title, part.copy, part.copies, number)
        self.done.append(TraceWork(stream, kind, name, phase, *place, start_s, seconds, note, *sent))

    def _sum_middle_micro_batches(self, begin: int, count: int) -> None:
        """Replace the second micro-batch by all micro-batches between the first and the last, summed up by kind."""
        second = [w for w in self.done[begin:] if w.stream == COMPUTE]
        sums: dict[str, float] = defaultdict(float)
        for w in second:
            sums[w.kind] += w.seconds
        # The clock goes back to where the second micro-batch began, since the sums that follow hold it too.
        self.now = self.free = second[0].start_s
        del self.done[begin:]
        micro_batches = f"micro-batches 2 to {count - 1}"
        for kind, seconds in sums.items():
            part = _Segment("the whole model", "", ())
            self._add_compute(
                kind,
                f"{micro_batches}: {kind}",
                FORWARD,
                part,
                2,
                (count - 2) * seconds,
                "each like the others, put together here",
            )
        self.free = self.now

    # --- what a pass consists of ------------------------------------------------------------------------

    def _list_pass(self, part: _Segment, phase: str) -> Iterator[_PassWork]:
        """Yield the work of a pass through a part: its operators in order, each with its waits."""
        bp, block, unit = self.plan.blocks[part.label], block_of(self.graph, part.label), self.units[part.label]
        reruns = recomputed_ops(block, bp)
        waits: dict[str, list[Message]] = defaultdict(list)
        for m in unit.each:
            if m.phase == phase and not unit.runs_beside_compute(m):
                waits[m.site].append(m)
        if phase == FORWARD:
            for op in part.ops:
                seconds = op_and_weight_seconds(block, op, bp, reruns, self.model)[0]
                yield from self._surround_by_waits(op, WORKS, seconds, waits[op.name], AFTER)
            return
        for op in part.ops:
            if op.name in reruns:
                seconds = _recompute_seconds(block, op, bp, reruns, self.model)
                mine = [m for m in waits[op.name] if not m.gradient]
                yield from self._surround_by_waits(op, AGAIN, seconds, mine, AFTER)
        for op in reversed(part.ops):
            seconds = op_and_weight_seconds(block, op, bp, reruns, self.model)[1]
            left = [m for m in waits[op.name] if op.name not in reruns or m.gradient]
            # The price counts the second forward in backward. It is drawn as a pass of its own before, so it is taken out here.
            seconds -= _recompute_seconds(block, op, bp, reruns, self.model) if op.name in reruns else 0.0
            yield from self._surround_by_waits(op, WORKS, seconds, left, AFTER_BACKWARD)

    def _surround_by_waits(
        self, op: Op, kind: str, seconds: float, waits: list[Message], after: Collection[Sent]
    ) -> Iterator[_PassWork]:
        """Yield an operator, after the collectives for which it waits, and before those for which the next operators wait."""
        later = [m for m in waits if (m.source, m.gradient) in after]
        yield from (self._make_wait(m, f"{op.name} waits for it") for m in waits if m not in later)
        if seconds:
            yield _PassWork(kind, op.name, seconds)
        yield from (self._make_wait(m, "the operators that follow wait for it") for m in later)

    def _make_wait(self, m: Message, who: str) -> _PassWork:
        note = f"{who}; {m.site}, {_axis_words(m, self.plan)}"
        return _PassWork(WAITS, f"waits for {_describe_sent(m)}", waited_message_seconds(m, self.model), note, m)

    def _list_weight_traffic(self, part: _Segment, phase: str, edge: bool) -> list[Message]:
        """Return the weight traffic beside one pass through a part; with `edge` also the traffic once a step."""
        unit = self.units[part.label]
        messages = [m for m in unit.each if m.phase == phase and unit.runs_beside_compute(m)]
        messages += [m for m in unit.once if m.phase == phase and edge]
        if part.label:
            return messages
        return [m for m in messages if self._find_home(m.weight) is part]

    def _find_home(self, weight: str) -> _Segment:
        """Return the part of the top block beside which the traffic of a weight is drawn: the first part that uses it."""
        top = self.graph.top
        for part in self.parts:
            if not part.label and any(top.values[v].name == weight for op in part.ops for v in op.inputs):
                return part
        return next(p for p in self.parts if not p.label)

    def _delay_of_traffic_s(self, unit: PricedUnit, phase: str, edge: bool) -> float:
        """Return the seconds by which weight traffic lengthens one pass through a unit (see `planner_core.cost.step_time`)."""
        waits = sum(
            waited_message_seconds(m, self.model)
            for m in unit.each
            if m.phase == phase and not unit.runs_beside_compute(m)
        )
        sent = sum(message_time(m, self.model) for m in unit.each if m.phase == phase and unit.runs_beside_compute(m))
        sent += sum(message_time(m, self.model) for m in unit.once if m.phase == phase and edge)
        busy = waits + (unit.forward_s if phase == FORWARD else unit.backward_s)
        return max(busy + self.model.contention * sent, sent) - busy

    def _share_of_traffic(self, part: _Segment, phase: str, edge: bool, traffic: list[Message]) -> float:
        """Return the share of its unit's traffic that is drawn beside a part: the top block is several parts."""
        if part.label:
            return 1.0
        mine = sum(message_time(m, self.model) for m in traffic)
        whole = sum(
            message_time(m, self.model)
            for p in self.parts
            if not p.label
            for m in self._list_weight_traffic(p, phase, edge)
        )
        return mine / whole if whole else 0.0


def _recompute_seconds(block: Block, op: Op, bp: Any, reruns: Mapping[str, Rerun], model: CostModel) -> float:
    """Return the seconds of an operator that runs forward again in backward."""
    return op_seconds(block, op, bp, reruns, model)[1] - op_seconds(block, op, bp, {}, model)[1]


def _describe_sent(m: Message) -> str:
    return f"{m.kind} of {m.what}"


def _describe_message(m: Message) -> str:
    """`all_gather of mlp.up_proj.weight`, `reduce_scatter of the gradient of mlp.up_proj.weight`."""
    what = m.what if m.weight in m.what else f"{m.what} of {m.weight}"
    return f"{m.kind} of {'the ' * (what != m.weight)}{what}"


def _axis_words(m: Message, plan: Plan) -> str:
    ranks = math.prod(plan.mesh.axis_sizes[axis] for axis in m.axes)
    return f"{m.num_bytes / 1e6:,.3g} MB over {ranks} ranks ({plan.mesh.name_of(m.axes)})"


def _clip_to_step(done: list[TraceWork], end_s: float) -> list[TraceWork]:
    """Move traffic that would end after the step to before its end, since nothing is sent after the step."""
    clipped = []
    for w in reversed(done):
        if w.stream == WEIGHTS:
            # From the last message on: each must end before the one behind it begins, since one stream sends them in turn.
            w = replace(w, start_s=min(w.start_s, end_s - w.seconds))
            end_s = w.start_s
        clipped.append(w)
    return clipped[::-1]


def _model_segments(plan: Plan, graph: Graph) -> list[_Segment]:
    """Return the parts of the model in order, with titles and numbers of copies that follow each other."""
    labels: dict[tuple[str, str], list[str]] = {}
    for label, bp in plan.blocks.items():
        for prefix in bp.prefixes:
            labels.setdefault((BlockLabel.parse(label).block, prefix), []).append(label)
    segments: list[_Segment] = []
    for item in graph.top.items:
        if isinstance(item, Call):
            label = labels[item.block, item.prefix].pop(0)
            segments.append(_Segment(item.block, label, tuple(graph.blocks[item.block].ops)))
        elif segments and not segments[-1].label:
            segments[-1].ops += (item,)
        else:
            segments.append(_Segment("", "", (item,)))
    for part in segments:
        part.title = part.title or _segment_title(part.ops)
    start = 0
    for i in range(1, len(segments) + 1):
        if i == len(segments) or segments[i].title != segments[start].title:
            for k, part in enumerate(segments[start:i]):
                part.copy, part.copies = k + 1, i - start
            start = i
    return segments


def _segment_title(ops: tuple[Op, ...]) -> str:
    """Return the modules from the first to the last: `norm … lm_head`."""
    modules = [op.name.rpartition("/")[0].rpartition(".")[2] for op in ops]
    known = list(dict.fromkeys(m for m in modules if m))
    return " … ".join(dict.fromkeys((known[0], known[-1]))) if known else "top"
