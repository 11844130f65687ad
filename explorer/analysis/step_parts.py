"""Why the recommended plan wins: its strongest rival, and the parts of both steps, which add up to their times. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner_core.core import Graph, Plan
from planner_core.cost import WAITED, block_of, cost_model_of, exposed_parts, op_seconds, recomputed_ops
from planner_core.ops import CoarseGraph
from planner_core.planning import Result, usable_bytes
from planner_core.planning.methods import BASELINES
from planner_core.planning.pricing import split_pipeline_step

STATED_METHOD = "layout"
"""The method of a plan whose layout somebody stated."""
COMPUTE, RECOMPUTATION, WAITS, WEIGHTS, OPTIMIZER = "compute", "recomputation", "waits", "weight traffic", "optimizer"
BUBBLE = "bubble"
"""Seconds in which a rank of a pipeline waits for others, in the mean over all ranks."""
OUTSIDE = "outside"
"""Seconds in which the GPU has no work. They are a part of a step, and the same in all plans, so they are no reason."""
REASONS = (COMPUTE, RECOMPUTATION, WAITS, WEIGHTS, OPTIMIZER, BUBBLE)
PARTS = (*REASONS, OUTSIDE)
CAUSE_PHRASES = {
    COMPUTE: ("computes {} less", "computes {} longer"),
    RECOMPUTATION: ("recomputes {} less", "recomputes {} longer"),
    WAITS: (
        "waits {} less for data that the next operation needs",
        "waits {} longer for data that the next operation needs",
    ),
    WEIGHTS: (
        "is held up {} less by weights and gradients on their way",
        "is held up {} longer by weights and gradients on their way",
    ),
    OPTIMIZER: ("updates weights {} faster", "updates weights {} slower"),
    BUBBLE: ("stands idle between stages {} less", "stands idle between stages {} longer"),
}
"""The cause in a plan why a part of its step is shorter, or longer."""
SIGNIFICANT_FIGURES = 3
MIN_CAUSE_SHARE = 0.2
"""A part whose difference is less than this share of the largest one is left to the table."""


def memory_limit_bytes(result: Result) -> int:
    """Bytes per GPU that a plan may take to fit."""
    return int(usable_bytes(result.cluster.gpu.memory_bytes, result.request))


def rank_rivals(plans: Mapping[str, Plan], chosen: str) -> list[str]:
    """The setup that the visitor runs now, then usual layouts by name: those that fit first, the fastest first."""
    others = [n for n, p in plans.items() if n != chosen and p.method in (STATED_METHOD, *BASELINES)]
    return sorted(
        others, key=lambda n: (plans[n].method != STATED_METHOD, not plans[n].fits, plans[n].cost.step_time_s)
    )


def fastest_other(shown: Mapping[str, Plan], first: str) -> str:
    """The shown plan that the first one is measured against: the fastest of the others that fits, else the fastest."""
    return min((n for n in shown if n != first), key=lambda n: (not shown[n].fits, shown[n].cost.step_time_s))


def split_step(plan: Plan, graph: Graph, coarse: CoarseGraph | None = None) -> dict[str, float]:
    """Seconds of a step by what they go to; they add up to the step's time."""
    if plan.pipeline:  # of the rank that works longest; what it computes again counts as compute
        return dict.fromkeys(PARTS, 0.0) | split_pipeline_step(plan)
    again = _recomputation_s(plan, graph)
    shown = exposed_parts(plan.blocks, graph, cost_model_of(plan), coarse)
    waits = sum(e.seconds for e in shown if e.why == WAITED)
    return {
        COMPUTE: plan.cost.compute_time_s - again,
        RECOMPUTATION: again,
        WAITS: waits,
        WEIGHTS: sum(e.seconds for e in shown) - waits,
        OPTIMIZER: plan.cost.optimizer_time_s,
        OUTSIDE: plan.cost.outside_time_s,
        BUBBLE: 0.0,
    }


def _recomputation_s(plan: Plan, graph: Graph) -> float:
    """Seconds of a step that compute what was computed before."""
    model, total = cost_model_of(plan), 0.0
    for label, bp in plan.blocks.items():
        block = block_of(graph, label)
        again = recomputed_ops(block, bp)
        for op in block.ops if again else ():
            twice = op_seconds(block, op, bp, again, model)[1] - op_seconds(block, op, bp, {}, model)[1]
            total += len(bp.prefixes) * twice
    return model.workload.accumulate * total


@dataclass(frozen=True, slots=True)
class RoundedSteps:
    """The parts of several steps as whole numbers of one unit (`name`, with `places` after the point): each plan's parts add up to
    its total, and so do differences."""

    name: str
    places: int
    parts: Mapping[str, Mapping[str, int]]

    def total(self, plan: str) -> int:
        """A step's time."""
        return sum(self.parts[plan].values())

    def text(self, value: int, *, sign: bool = False) -> str:
        """`33 ms`, `1.25 s`; with a sign `+33 ms`."""
        if value == 0:
            return f"0 {self.name}"
        size, places, name = abs(value) / 10**self.places, self.places, self.name
        if name == "ms" and size >= 1e3:
            size, places, name = size / 1e3, places + 3, "s"
        number = f"{size:,.{places}f}".replace(",", "\u202f")
        mark = ("+" if value > 0 else "\u2212" if value < 0 else "") if sign else ""
        return f"{mark}{number} {name}"


def round_steps(parts: Mapping[str, Mapping[str, float]], chosen: str) -> RoundedSteps:
    """Seconds rounded so that what is read adds up. The unit has three figures of the chosen step, one more where the closest
    rival differs by less than ten of them."""
    totals = {name: sum(p.values()) for name, p in parts.items()}
    step = totals[chosen]
    size, name = (1.0, "s") if step >= 1 else (1e-3, "ms")
    places = max(0, SIGNIFICANT_FIGURES - 1 - math.floor(math.log10(max(step, 1e-9) / size)))
    near = min((abs(t - step) for n, t in totals.items() if n != chosen), default=step)
    if near < 10 * size / 10**places:
        places += 1
    quantum = size / 10**places
    return RoundedSteps(name, places, {n: apportion(p, quantum) for n, p in parts.items()})


def apportion(parts: Mapping[str, float], quantum: float) -> dict[str, int]:
    """Numbers of quanta, each rounded up or down so that together they are the rounded sum (the largest remainders go up)."""
    down = {name: math.floor(value / quantum) for name, value in parts.items()}
    missing = round(sum(parts.values()) / quantum) - sum(down.values())
    order = sorted(parts, key=lambda name: down[name] - parts[name] / quantum)
    return {name: n + (name in order[:missing]) for name, n in down.items()}


def explain_difference(found: RoundedSteps, chosen: str, rival: str) -> str:
    """Why the chosen plan takes less time than a rival, or more: the parts that differ most, those in its favour first."""
    differences = {k: found.parts[rival][k] - found.parts[chosen][k] for k in REASONS}
    most = max(map(abs, differences.values()))
    faster = sum(differences.values()) >= 0
    for_it = [
        k
        for k in REASONS
        if abs(differences[k]) >= MIN_CAUSE_SHARE * most and differences[k] != 0 and (differences[k] > 0) == faster
    ]
    against = [
        k
        for k in REASONS
        if abs(differences[k]) >= MIN_CAUSE_SHARE * most and differences[k] != 0 and (differences[k] > 0) != faster
    ]
    text = _join([_phrase(found, k, differences[k]) for k in sorted(for_it, key=lambda k: -abs(differences[k]))])
    but = _join([_phrase(found, k, differences[k]) for k in sorted(against, key=lambda k: -abs(differences[k]))])
    return ", but ".join(filter(None, (text, but)))


def _phrase(found: RoundedSteps, part: str, difference: int) -> str:
    return CAUSE_PHRASES[part][difference < 0].format(found.text(abs(difference)))


def _join(texts: Sequence[str]) -> str:
    return ", ".join(texts[:-1]) + (" and " if len(texts) > 1 else "") + texts[-1] if texts else ""
