"""The parts of a step's exposed communication, `exposed_comm_time_s`, each with its reason. They add up to it exactly.

waited for      the next operator needs the result of the collective
contention      weight traffic beside compute slows the compute
not hidden      weight traffic lasts longer than the compute beside it
at the ends     nothing hides the first unit's gather, the last unit's reduction, and small gradients when backward is over
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from planner_core.core import PASSES, BlockPlan, Graph, Phase
from planner_core.cost.model import CostModel
from planner_core.cost.step import PricedUnit, price_units, unit_totals
from planner_core.cost.step_messages import message_time, waited_message_seconds
from planner_core.cost.step_time import Component, Floats
from planner_core.ops import CoarseGraph


class Cause(StrEnum):
    """Why communication lengthens the step."""

    WAITED = "waited for"
    CONTENTION = "contention"
    NOT_HIDDEN = "not hidden"
    ENDS = "at the ends"


@dataclass(frozen=True, slots=True)
class Exposed:
    """Seconds per step that one collective or one weight adds to the step, for all copies of a block variant."""

    label: str
    site: str
    weight: str
    what: str
    phase: Phase
    cause: Cause
    seconds: float


@dataclass(frozen=True, slots=True)
class WeightTraffic:
    """Seconds of the traffic of one weight of one copy in one phase: in each micro-batch, and once a step."""

    weight: str
    phase: Phase
    each_s: float
    once_s: float


def exposed_parts(
    blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel, coarse: CoarseGraph | None = None
) -> list[Exposed]:
    """Return all parts. Their seconds add up to the plan's exposed communication."""
    units = price_units(blocks, graph, model, coarse)
    return [replace(e, seconds=e.seconds * unit.copies) for unit in units for e in _parts_of_unit(unit, model)]


def weight_traffic(unit: PricedUnit, model: CostModel) -> list[WeightTraffic]:
    """Return the weight traffic of one copy that runs beside compute, by weight and phase."""
    sums: dict[tuple[str, Phase], list[float]] = {}
    for m in unit.each:
        if unit.overlaps_compute(m):
            sums.setdefault((m.weight, m.phase), [0.0, 0.0])[0] += message_time(m, model)
    for m in unit.once:
        sums.setdefault((m.weight, m.phase), [0.0, 0.0])[1] += message_time(m, model)
    return [WeightTraffic(weight, phase, each, once) for (weight, phase), (each, once) in sums.items()]


def _parts_of_unit(unit: PricedUnit, model: CostModel) -> Iterator[Exposed]:
    m, totals = model.workload.accumulate, unit_totals(unit, model)
    for message in unit.each:
        if not unit.overlaps_compute(message):
            what = f"{message.kind} of {message.what}"
            seconds = m * waited_message_seconds(message, model)
            yield Exposed(unit.label, message.site, message.weight, what, message.phase, Cause.WAITED, seconds)
    for message in unit.alone:
        what, seconds = f"{message.kind} of {message.what}", message_time(message, model)
        yield Exposed(unit.label, message.site, message.weight, what, message.phase, Cause.ENDS, seconds)
    traffic, alone = weight_traffic(unit, model), sum(message_time(message, model) for message in unit.alone)
    for phase in PASSES:
        phase_traffic = [t for t in traffic if t.phase == phase]
        seconds, cause = seconds_beyond_compute(totals, phase, model)
        yield from _divide_by_traffic(unit, phase_traffic, cause, seconds, m)
    # STEP also has the optimizer and what is outside, which send nothing, and the messages alone, which have rows above.
    # The rest is what nothing hides.
    yield from _divide_by_traffic(
        unit, traffic, Cause.ENDS, float(totals[Component.STEP]) - unit.optimizer_s - unit.outside_s - alone, m
    )


def seconds_beyond_compute(totals: Floats, phase: Phase, model: CostModel) -> tuple[float, Cause]:
    """Return the seconds per step that the weight traffic of one copy adds to a phase, and the cause. `totals` [component] are the
    copy's."""
    m, k = model.workload.accumulate, model.contention
    first = Component.FORWARD if phase == "forward" else Component.BACKWARD
    compute, each, once = (float(totals[first + i]) for i in range(3))
    # The traffic of once a step runs beside one micro-batch. Example: 4 of them, compute 10, traffic 4 each and 8 once, k = 0.1:
    # steady = max(10.4, 4), edge = max(11.2, 12), so 3 * 10.4 + 12 - 4 * 10 = 3.2 are exposed.
    steady, edge = max(compute + k * each, each), max(compute + k * (each + once), each + once)
    seconds = (m - 1) * steady + edge - m * compute
    # The larger side of the last maximum names the reason for all: the traffic of once a step is what first exceeds compute.
    return seconds, Cause.CONTENTION if compute + k * (each + once) >= each + once else Cause.NOT_HIDDEN


def _divide_by_traffic(
    unit: PricedUnit, traffic: list[WeightTraffic], cause: Cause, seconds: float, micro_batches: int
) -> Iterator[Exposed]:
    """Divide `seconds` among the weights in proportion to their traffic."""
    # A maximum has no exact share for each weight. In proportion to their traffic the parts still add up to the step.
    total = sum(micro_batches * t.each_s + t.once_s for t in traffic)
    if seconds <= 0 or total <= 0:
        return
    for t in traffic:
        share = (micro_batches * t.each_s + t.once_s) / total
        yield Exposed(unit.label, t.weight, t.weight, "weight traffic", t.phase, cause, seconds * share)
