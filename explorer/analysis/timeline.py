"""One training step of a plan as bars in three lanes, from the plan's own prices. Pure: values in, bars out.

A part of the model (a layer, the head) is drawn as its compute followed by what shows of its communication, and below it the
weight traffic that runs beside compute. The first two lanes and the optimizer add up to the step time.

Two things are for the eye only: inside a part, waiting stands after compute, though op by op they take turns; and a
weight's hidden traffic is put first behind the phase that sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from planner_core.core import Block, Call, Graph, Op, Plan
from planner_core.cost import (
    CONTENTION,
    WAITED,
    CostModel,
    Unit,
    all_seconds,
    beyond_compute,
    block_of,
    cost_model_of,
    exposed_parts,
    recomputed,
    unit_totals,
    units_of,
    weight_traffic,
)

LANES = ("compute", "exposed", "hidden")
PHASES = ("forward", "backward")
DENSE = 0.85
"""Share of compute in a phase above which its bars carry words."""
Split = tuple[float, float]
"""Seconds forward and backward."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: `part` is the piece of the model, `copy` its number among `copies` alike that follow each other."""

    lane: str
    phase: str
    part: str
    copy: int
    copies: int
    start_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step of one plan: the same on every rank, since all ranks hold equal shares and run the same ops."""

    bars: tuple[Bar, ...]
    num_ranks: int
    update_s: float

    def total(self, lane: str, phase: str = "") -> float:
        """Seconds of a lane, in one phase or both."""
        return sum(b.seconds for b in self.bars if b.lane == lane and phase in ("", b.phase))

    @property
    def step_s(self) -> float:
        """What the step takes."""
        return self.total("compute") + self.total("exposed") + self.update_s

    def start_of(self, phase: str) -> float:
        """When a phase begins."""
        return min((b.start_s for b in self.bars if b.phase == phase and b.lane != "hidden"), default=0.0)

    def dense(self, phase: str) -> bool:
        """Whether compute fills a phase so far that words can stand on its bars."""
        compute, exposed = self.total("compute", phase), self.total("exposed", phase)
        return compute > DENSE * (compute + exposed)

    def spans(self, phase: str) -> list[tuple[str, int, float, float]]:
        """(part, copies, start, end) of each stretch of equal parts."""
        found: list[tuple[str, int, float, float]] = []
        for b in sorted((b for b in self.bars if b.phase == phase and b.lane != "hidden"), key=lambda b: b.start_s):
            if found and found[-1][0] == b.part:
                found[-1] = (b.part, b.copies, found[-1][2], b.start_s + b.seconds)
            else:
                found.append((b.part, b.copies, b.start_s, b.start_s + b.seconds))
        return found


@dataclass
class _Stretch:
    """A stretch of the model that is drawn as one: ops of the top block, or one copy of a repeated block."""

    title: str
    copy: int = 1
    copies: int = 1
    compute: list[float] = field(default_factory=lambda: [0.0, 0.0])
    exposed: list[float] = field(default_factory=lambda: [0.0, 0.0])
    hidden: list[float] = field(default_factory=lambda: [0.0, 0.0])


def timeline(plan: Plan, graph: Graph) -> Timeline:
    """The bars of one step. Raises InputError for a plan of another model."""
    model = cost_model_of(plan)
    parts, home = _parts(plan, graph)
    micro_batches = model.workload.accumulate
    for label, bp in plan.blocks.items():
        block = block_of(graph, label)
        again = recomputed(block, bp)
        for op in block.ops:
            both = all_seconds(block, op, bp, again, model)
            _add(home[label](op.name), "compute", (micro_batches * both[0], micro_batches * both[1]), 1)
    for e in exposed_parts(plan.blocks, graph, model):
        site = _first_user(block_of(graph, e.label), e.weight) if e.why != WAITED else e.site
        both = (e.seconds, 0.0) if e.phase == "forward" else (0.0, e.seconds)
        _add(home[e.label](site), "exposed", both, len(plan.blocks[e.label].prefixes))
    for unit in units_of(plan.blocks, graph, model):
        for t in weight_traffic(unit, model):
            seconds = (micro_batches * t.each_s + t.once_s) * _hidden_share(unit, t.phase, model)
            both = (seconds, 0.0) if t.phase == "forward" else (0.0, seconds)
            _add(home[unit.label](_first_user(block_of(graph, unit.label), t.weight)), "hidden", both, 1)
    return Timeline(tuple(_lay(parts)), plan.mesh.num_devices, plan.cost.optimizer_time_s)


def _hidden_share(unit: Unit, phase: str, model: CostModel) -> float:
    """The share of a phase's weight traffic that the step does not wait for."""
    total = sum(
        model.workload.accumulate * t.each_s + t.once_s for t in weight_traffic(unit, model) if t.phase == phase
    )
    seconds, why = beyond_compute(unit_totals(unit, model), phase, model)
    return 1.0 if why == CONTENTION or not total else max(0.0, 1.0 - seconds / total)


def _add(places: list[_Stretch], lane: str, both: Split, copies: int) -> None:
    for part in places:
        sums: list[float] = getattr(part, lane)
        sums[0] += both[0] / copies
        sums[1] += both[1] / copies


# --- parts of the model -------------------------------------------------------------------------------


def _parts(plan: Plan, graph: Graph) -> tuple[list[_Stretch], Mapping[str, Callable[[str], list[_Stretch]]]]:
    """The parts in order, and per block label the parts that an op of it (by name) belongs to."""
    labels: dict[tuple[str, str], list[str]] = {}
    for label, bp in plan.blocks.items():
        for prefix in bp.prefixes:
            labels.setdefault((label.partition("#")[0], prefix), []).append(label)
    parts: list[_Stretch] = []
    of_op: dict[str, _Stretch] = {}
    of_label: dict[str, list[_Stretch]] = {label: [] for label in plan.blocks}
    fresh = True
    for item in graph.top.items:
        if isinstance(item, Op):
            if fresh:
                parts.append(_Stretch(""))
            of_op[item.name] = parts[-1]
        else:
            parts.append(_Stretch(item.block))
            of_label[labels[item.block, item.prefix].pop(0)].append(parts[-1])
            for value in item.inputs:
                of_op.setdefault(_passed(graph.top, value), parts[-1])
        fresh = isinstance(item, Call)
    _name(parts, of_op)
    home: dict[str, Callable[[str], list[_Stretch]]] = {label: _always(found) for label, found in of_label.items()}
    home[""] = lambda name: [of_op[name]]
    return parts, home


def _passed(top: Block, value: int) -> str:
    return f"passed {top.values[value].name}"


def _always(parts: list[_Stretch]) -> Callable[[str], list[_Stretch]]:
    return lambda name: parts


def _first_user(block: Block, weight: str) -> str:
    """The op whose part shows the traffic of a weight that several use: the first, or the call it is first passed to."""
    for op in block.ops:
        if any(block.values[v].name == weight and block.values[v].kind == "parameter" for v in op.inputs):
            return op.name
    return f"passed {weight}"


def _name(parts: list[_Stretch], of_op: Mapping[str, _Stretch]) -> None:
    """Titles of the stretches of top ops, and numbers of the copies that follow each other."""
    for part in parts:
        if not part.title:
            modules = [n.rpartition("/")[0].rpartition(".")[2] for n, p in of_op.items() if p is part]
            known = list(dict.fromkeys(m for m in modules if m))
            part.title = " … ".join(dict.fromkeys((known[0], known[-1]))) if known else "top"
    runs: list[list[_Stretch]] = []
    for part in parts:
        if runs and runs[-1][0].title == part.title:
            runs[-1].append(part)
        else:
            runs.append([part])
    for run in runs:
        for k, part in enumerate(run):
            part.copy, part.copies = k + 1, len(run)


# --- bars ---------------------------------------------------------------------------------------------


def _lay(parts: list[_Stretch]) -> Iterator[Bar]:
    """Parts after each other, forward and then backward in reverse; what hides queues up beside them."""
    now, queue = 0.0, 0.0
    hidden: list[Bar] = []
    for k, phase in enumerate(PHASES):
        for part in parts if k == 0 else reversed(parts):
            queue = max(queue, now)
            if part.hidden[k]:
                hidden.append(Bar("hidden", phase, part.title, part.copy, part.copies, queue, part.hidden[k]))
                queue += part.hidden[k]
            for lane, seconds in (("compute", part.compute[k]), ("exposed", part.exposed[k])):
                if seconds:
                    yield Bar(lane, phase, part.title, part.copy, part.copies, now, seconds)
                    now += seconds
    end = now
    for bar in reversed(hidden):  # nothing is sent after the step
        start = min(bar.start_s, end - bar.seconds)
        yield Bar("hidden", bar.phase, bar.part, bar.copy, bar.copies, start, bar.seconds)
        end = start
