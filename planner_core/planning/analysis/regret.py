"""What each plan loses if the machine is worse than assumed: slower links, more latency, or less traffic hidden behind compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner_core.core import Cluster, Plan
from planner_core.cost import CostModel, cost_model_of, ops_at_the_ends, price_pipeline, price_with_host
from planner_core.planning.analysis.reporting import format_seconds, format_table
from planner_core.planning.result import Result


@dataclass(frozen=True, slots=True)
class Scenario:
    """A machine that is worse than assumed: factors on the bandwidth and the latency of all links, and the contention, which is the
    seconds by which one second of traffic slows the compute beside it (None: as assumed; 1: nothing is hidden)."""

    title: str
    bandwidth: float = 1.0
    latency: float = 1.0
    contention: float | None = None

    def model(self, plan: Plan, cluster: Cluster) -> CostModel:
        """Return the cost model of this machine, for the mesh and the workload of a plan."""
        worse = cluster.with_bandwidth(self.bandwidth).with_latency(self.latency)
        priced = cost_model_of(plan, worse)
        return priced if self.contention is None else replace(priced, contention=self.contention)


SCENARIOS = (
    Scenario("as assumed"),
    Scenario("links at 70 %", bandwidth=0.7),
    Scenario("links at 40 %", bandwidth=0.4),
    Scenario("three times the latency", latency=3.0),
    Scenario("half of the traffic is not hidden", contention=0.5),
    Scenario("no traffic is hidden", contention=1.0),
)


@dataclass(frozen=True, slots=True)
class Regret:
    """Seconds of one plan's step in every scenario, and the share by which it is slower than the best of all plans there."""

    name: str
    step_time_s: tuple[float, ...]
    lost: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The largest share lost."""
        return max(self.lost)


def plan_regrets(result: Result) -> list[Regret]:
    """Return the regret of each plan that fits, in the order of the plans."""
    plans = [p for p in result.plans if p.fits]
    times = [[_step_seconds(p, result, s) for s in SCENARIOS] for p in plans]
    # Regret is against the plan that is best in that scenario, which another machine may make another plan.
    best_times = [min(column) for column in zip(*times, strict=True)]
    return [
        Regret(p.name, tuple(row), tuple(t / best - 1 for t, best in zip(row, best_times, strict=True)))
        for p, row in zip(plans, times, strict=True)
    ]


def _step_seconds(plan: Plan, result: Result, scenario: Scenario) -> float:
    model, result = scenario.model(plan, result.cluster), result.of_plan(plan)
    if plan.pipeline:
        # Worse links change no order, but every wait, so the stages are simulated anew.
        ends = ops_at_the_ends(result.coarse)
        return price_pipeline(plan.blocks, result.graph, plan.pipeline, model, ends).step_time_s
    return price_with_host(plan.blocks, result.graph, model, result.coarse).step_time_s


def regret_report(regrets: Sequence[Regret]) -> dict[str, Any]:
    """Return what `plan --regret --json` adds: each plan's step in every scenario, and the share that it loses to the best plan there."""
    return {
        "scenarios": [s.title for s in SCENARIOS],
        "plans": [
            {"name": r.name, "step_time_s": list(r.step_time_s), "lost": list(r.lost), "worst": r.worst}
            for r in regrets
        ],
    }


def regret_text(regrets: Sequence[Regret]) -> str:
    """Return the steps of `regret_report` as a table: seconds, and the share that each plan loses to the best plan of that scenario."""
    rows = [["plan", *(s.title for s in SCENARIOS), "loses at most"]]
    for r in regrets:
        cells = [f"{format_seconds(t)} (+{100 * lost:.1f} %)" for t, lost in zip(r.step_time_s, r.lost, strict=True)]
        rows.append([r.name, *cells, f"{100 * r.worst:.1f} %"])
    head = "if the machine is worse than assumed: step, and what it loses to the best of these plans there"
    return f"{head}\n\n{format_table(rows, frozenset(range(1, len(rows[0]))))}"
