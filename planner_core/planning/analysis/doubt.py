"""How sure the choice of a plan is: which plans the doubt does not tell apart, and what each loses where reality is worse.

Two plans on one machine share the errors of its GPU and its software; what is left is the scatter of their kinds of layout
(`sigma` of assets/bands.json). One is predicted faster with 95 % confidence where

    ln(slower / faster) > 1.645 hypot(sigma of one, sigma of the other)

and is called faster in any case where the two differ by more than MOST. Others are ties, and among ties the plan that a
stock tool runs as it is should be preferred.

Example: both of kind "FSDP, one node", sigma 2.9 %: steps of 500 and 530 ms differ by 5.8 % < 1.645 x 4.1 % = 6.7 %: a tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner_core.core import Cluster, Plan, Workload
from planner_core.cost import CostModel, cost_model, step_seconds, units_of
from planner_core.planning.methods import BASELINES
from planner_core.planning.pipeline import Result
from planner_core.planning.pricing import NINE_IN_TEN, sigma_of

MOST = 0.10
"""Share by which a slower plan is called slower whatever the scatter of its kind."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A plan that takes `slower` (a share of the chosen plan's time) longer by prediction, less than the `doubt` of the two."""

    name: str
    method: str
    slower: float
    doubt: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest plan by prediction, its ties by rising time, and which of all these should be run: the simplest."""

    fastest: str
    ties: tuple[Tie, ...]
    recommended: str

    @property
    def sentence(self) -> str:
        """Why the recommended plan is, and what is given up."""
        if not self.ties:
            return f"{self.fastest} is faster than every other plan here by more than the prediction's doubt"
        names = ", ".join(f"{t.name} (+{100 * t.slower:.1f} %)" for t in self.ties)
        told = f"a tie of {self.fastest} with {names}: they differ by less than the prediction's doubt"
        if self.recommended == self.fastest:
            return f"{told}. {self.fastest} is the simplest of them"
        gain = next(t.slower for t in self.ties if t.name == self.recommended)
        return (
            f"{told}. Run {self.recommended}, the simplest: stock tools run it as it is. {self.fastest} may gain "
            f"{100 * gain:.1f} %"
        )


def choice(result: Result) -> Choice:
    """Ties of the chosen plan among those that fit; only the step's time is in doubt, so nothing ties under another objective."""
    best = result.best
    found = []
    for plan in result.plans[1:]:
        doubt = doubt_between(best, plan, result.cluster)
        slower = plan.cost.step_time_s / best.cost.step_time_s - 1
        if plan.fits and best.objective == plan.objective == "time" and 0 <= slower <= doubt and plan.name != best.name:
            found.append(Tie(plan.name, plan.method, slower, doubt))
    stock = {name: rank for rank, name in enumerate(BASELINES)}
    found.sort(key=lambda t: t.slower)
    simple = min((t for t in found if t.method in stock), key=lambda t: stock[t.method], default=None)
    plain = best.method in stock and (simple is None or stock[best.method] <= stock[simple.method])
    return Choice(best.name, tuple(found), best.name if simple is None or plain else simple.name)


def doubt_between(one: Plan, other: Plan, cluster: Cluster) -> float:
    """The share by which the steps of two plans may differ by prediction and still be a tie."""
    both = math.hypot(sigma_of(one, cluster), sigma_of(other, cluster))
    return min(math.expm1(NINE_IN_TEN * both), MOST)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A machine that is worse than assumed: factors on bandwidth and latency of all links, and the price of a second of traffic
    beside compute (None: as assumed; 1: nothing is hidden)."""

    title: str
    bandwidth: float = 1.0
    latency: float = 1.0
    contention: float | None = None

    def model(self, plan: Plan, cluster: Cluster) -> CostModel:
        """The prices of a plan's own mesh and workload there."""
        there = cluster.with_bandwidth(self.bandwidth).with_latency(self.latency)
        made = cost_model(there, plan.mesh, Workload(**plan.workload))
        return made if self.contention is None else replace(made, contention=self.contention)


SCENARIOS = (
    Scenario("as assumed"), Scenario("links at 70 %", bandwidth=0.7), Scenario("links at 40 %", bandwidth=0.4),
    Scenario("three times the latency", latency=3.0), Scenario("half of the traffic is not hidden", contention=0.5),
    Scenario("no traffic is hidden", contention=1.0),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Regret:
    """Seconds of one plan's step in every scenario, and the share that it loses to the best of all plans there."""

    name: str
    step_time_s: tuple[float, ...]
    lost: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The largest share lost."""
        return max(self.lost)


def regret(result: Result, scenarios: Sequence[Scenario] = SCENARIOS) -> list[Regret]:
    """What each plan that fits loses in each scenario, in the plans' order."""
    plans = [p for p in result.plans if p.fits]
    times = [[_seconds(p, result, s) for s in scenarios] for p in plans]
    least = [min(column) for column in zip(*times, strict=True)]
    return [
        Regret(p.name, tuple(row), tuple(t / best - 1 for t, best in zip(row, least, strict=True)))
        for p, row in zip(plans, times, strict=True)
    ]


def _seconds(plan: Plan, result: Result, scenario: Scenario) -> float:
    model = scenario.model(plan, result.cluster)
    return step_seconds(units_of(plan.blocks, result.graph, model, result.coarse), model)
