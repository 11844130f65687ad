"""The parts of a plan's step, which add up to its time, and why one plan is faster than another. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from explorer.text import units
from planner_core.core import Graph, Plan
from planner_core.cost import Cause, block_of, cost_model_of, exposed_parts, op_seconds, recomputed_ops
from planner_core.ops import CoarseGraph
from planner_core.planning import Result, usable_bytes
from planner_core.planning.pricing import split_pipeline_step

COMPUTE, RECOMPUTATION, WAITS, WEIGHTS, OPTIMIZER = "compute", "recomputation", "waits", "weight traffic", "optimizer"
BUBBLE = "bubble"
"""Seconds in which the rank of a pipeline that works longest waits for others because of the schedule."""
HOST = "host"
"""Seconds in which the GPU waits for the host to issue its kernels."""
OUTSIDE = "outside"
"""Seconds in which the GPU has no work. They are the same in all plans, so they explain no difference."""
REASONS = (COMPUTE, RECOMPUTATION, WAITS, WEIGHTS, OPTIMIZER, BUBBLE, HOST)
ALL_PARTS = (*REASONS, OUTSIDE)
MEANINGS = {
    COMPUTE: "The GPU computes",
    RECOMPUTATION: "The GPU computes again, in backward, what it did not keep",
    WAITS: "The next operation needs data of other GPUs",
    WEIGHTS: "Weights and gradients on their way slow the GPU down or hold it up",
    OPTIMIZER: "Gradients are clipped and weights updated",
    BUBBLE: "The rank of the pipeline that works longest waits for other stages",
    HOST: "The GPU waits for the host, which issues its kernels",
    OUTSIDE: "The GPU has no work: loader, logging",
}
"""What the GPU does in each part of a step."""
SIGNIFICANT_FIGURES = 3
MIN_CAUSE_SHARE = 0.2
"""A smaller share of the largest difference is no cause; the table shows it, and the sentence adds it to “others”."""


def memory_limit_bytes(result: Result) -> int:
    """Return the bytes per GPU that a plan may take."""
    return int(usable_bytes(result.cluster.gpu.memory_bytes, result.request))


def fastest_other(shown: Mapping[str, Plan], first: str) -> str:
    """Return the plan that the first one is measured against: the fastest of the others that fits, else the fastest."""
    return min((n for n in shown if n != first), key=lambda n: (not shown[n].fits, shown[n].cost.step_time_s))


def split_step(plan: Plan, graph: Graph, coarse: CoarseGraph | None = None) -> dict[str, float]:
    """Split the seconds of a step by what they go to; they add up to the step's time."""
    if plan.pipeline:  # of the rank that works longest; what it computes again counts as compute
        return dict.fromkeys(ALL_PARTS, 0.0) | split_pipeline_step(plan)
    recomputed_s = _recomputation_s(plan, graph)
    exposed = exposed_parts(plan.blocks, graph, cost_model_of(plan), coarse)
    waits = sum(e.seconds for e in exposed if e.cause is Cause.WAITED)
    # the model's compute time holds what is computed again and the wait for the host, which stand as parts of their own here
    return {
        COMPUTE: plan.cost.gpu_compute_s - recomputed_s,
        RECOMPUTATION: recomputed_s,
        WAITS: waits,
        WEIGHTS: sum(e.seconds for e in exposed) - waits,
        OPTIMIZER: plan.cost.optimizer_time_s,
        OUTSIDE: plan.cost.outside_time_s,
        HOST: plan.cost.host_wait_s,
        BUBBLE: 0.0,
    }


def _recomputation_s(plan: Plan, graph: Graph) -> float:
    """Return the seconds of a step that compute what was computed before."""
    model, total = cost_model_of(plan), 0.0
    for label, bp in plan.blocks.items():
        block = block_of(graph, label)
        repeated = recomputed_ops(block, bp)
        for op in block.ops if repeated else ():
            extra_s = op_seconds(block, op, bp, repeated, model)[1] - op_seconds(block, op, bp, {}, model)[1]
            total += len(bp.prefixes) * extra_s
    return model.workload.accumulate * total


@dataclass(frozen=True)
class RoundedSteps:
    """The parts of several steps as whole numbers of one unit: parts add up to totals, and so do differences.

    `name` is the unit, `places` the digits after the point; `exact` holds the parts in this unit, by plan.
    """

    name: str
    places: int
    exact: Mapping[str, Mapping[str, float]]

    @cached_property
    def parts(self) -> Mapping[str, Mapping[str, int]]:
        """The parts in units of the last place, by plan."""
        return {plan: self._round(parts) for plan, parts in self.exact.items()}

    def subtract(self, rival: str, plan: str) -> dict[str, int]:
        """Return by how much each part of a plan's step is longer than a rival's, in units of the last place.

        Exact values are subtracted, and rounded once. Example: 515.2 and 543.6 ms differ by 28 ms, and rounded they are 515 and 544.
        """
        return self._round({name: s - self.exact[rival][name] for name, s in self.exact[plan].items()})

    def _round(self, parts: Mapping[str, float]) -> dict[str, int]:
        return apportion(parts, 10.0**-self.places)

    def total(self, plan: str) -> int:
        """Return the step of a plan, in units of the last place."""
        return sum(self.parts[plan].values())

    def text(self, value: int, *, sign: bool = False) -> str:
        """Write a number of units: `33 ms`, `1.25 s`; with a sign `+33 ms`."""
        if value == 0:
            return f"0 {self.name}"
        size, places, name = abs(value) / 10**self.places, self.places, self.name
        if name == "ms" and size >= 1e3:
            size, places, name = size / 1e3, places + 3, "s"
        number = f"{size:,.{places}f}".replace(",", "\u202f")
        mark = ("+" if value > 0 else "\u2212" if value < 0 else "") if sign else ""
        return f"{mark}{number} {name}"


def round_steps(parts: Mapping[str, Mapping[str, float]], chosen: str) -> RoundedSteps:
    """Round seconds to the third figure of the chosen step, so that the rounded parts add up."""
    step = sum(parts[chosen].values())
    unit_s, name = (1.0, "s") if step >= 1 else (1e-3, "ms")
    places = max(0, SIGNIFICANT_FIGURES - 1 - math.floor(math.log10(max(step, 1e-9) / unit_s)))
    return RoundedSteps(name, places, {n: {k: s / unit_s for k, s in p.items()} for n, p in parts.items()})


def apportion(parts: Mapping[str, float], quantum: float) -> dict[str, int]:
    """Round parts up or down so that they add up to the rounded sum: those with the largest remainders go up (Hamilton's method)."""
    floors = {name: math.floor(value / quantum) for name, value in parts.items()}
    missing = round(sum(parts.values()) / quantum) - sum(floors.values())
    order = sorted(parts, key=lambda name: floors[name] - parts[name] / quantum)
    return {name: n + (name in order[:missing]) for name, n in floors.items()}


def explain_difference(rounded: RoundedSteps, chosen: str, rival: str) -> str:
    """Say by which parts the chosen plan's step differs most from a rival's, those that make the difference of the sums first."""
    every = rounded.subtract(rival, chosen)
    differences = {k: every[k] for k in REASONS}
    most, total = max(map(abs, differences.values())), sum(differences.values())
    named = [k for k in REASONS if differences[k] and abs(differences[k]) >= MIN_CAUSE_SHARE * most]
    # A part that goes against the sum explains nothing by itself, so it comes behind those that make it.
    named.sort(key=lambda k: ((differences[k] > 0) != (total > 0), -abs(differences[k])))
    causes = {k: differences[k] for k in named}
    # Differences that are too small to be named stand as one sum, so that a reader can add up to the difference of the two steps.
    rest = sum(every.values()) - sum(causes.values())
    if causes and rest:
        causes["others"] = rest
    # The unit stands once, behind the last, unless a larger one has another.
    texts, unit = units.share_unit([rounded.text(n, sign=True) for n in causes.values()])
    return ", ".join(f"{k} {text}" for k, text in zip(causes, texts, strict=True)) + f" {unit}" * bool(unit)
