"""How sure the choice of a plan is: which plans cannot be told apart, and what each loses if the machine is worse than assumed.

Two plans on one machine share the errors of its GPU and of its software. What remains is the scatter of their kinds of layout
(`sigma` of assets/bands.json). One plan is predicted faster with 95 % confidence if

    ln(slower / faster) > 1.645 hypot(sigma of one, sigma of the other)

If two plans differ by more than MOST_DOUBT, the faster one is called faster in any case. Other plans are ties. Among ties, a plan that
a stock tool runs without changes is preferred.

Example: two plans are of the kind "FSDP, one node", with a sigma of 2.9 %. Their steps take 500 and 530 ms. ln(530 / 500) is
5.8 %, which is less than 1.645 x 4.1 % = 6.7 %: a tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner_core.core import Cluster, Plan
from planner_core.cost import CostModel, cost_model_of, ops_at_the_ends, price_pipeline, price_with_host
from planner_core.planning.fitting.simpler import leads_by_simplicity
from planner_core.planning.methods import BASELINES
from planner_core.planning.pipeline import Result
from planner_core.planning.pricing import Z_NINE_IN_TEN, time_sigma

MOST_DOUBT = 0.10
"""A plan that is slower by more than this share is called slower, whatever the scatter of its kind."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A plan that is predicted slower than the chosen one by the share `slower`, which is less than the `doubt` about the two."""

    name: str
    method: str
    slower: float
    doubt: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan that is predicted fastest, its ties by rising time, and which of all these is recommended: the simplest, or the one for
    the request's `tool`. `one_axis`: no stock tool runs the recommended plan as it is, but it needs one mesh axis. `fits`: some plan
    fits; where none does, the chosen one takes the least memory and is not the fastest."""

    fastest: str
    ties: tuple[Tie, ...]
    recommended: str
    tool: str | None = None
    one_axis: bool = False
    fits: bool = True

    @property
    def sentence(self) -> str:
        """A sentence that says why the plan is recommended, and what is given up."""
        if not self.fits:
            return f"no plan fits, so none is recommended; {self.fastest} comes nearest"
        if not self.ties:
            return f"{self.fastest} is faster than every other plan that fits, by more than the prediction's doubt"
        names = ", ".join(f"{t.name} (+{100 * t.slower:.1f} %)" for t in self.ties)
        told = f"a tie of {self.fastest} with {names}: they differ by less than the prediction's doubt"
        if self.recommended == self.fastest:
            return (
                f"{told}. {self.fastest} is {f'what {self.tool} can be told' if self.tool else 'the simplest of them'}"
            )
        gain = next(t.slower for t in self.ties if t.name == self.recommended)
        why = (
            "it needs one mesh axis, and is not slower by the simulation"
            if self.one_axis
            else "stock tools run its layout"
        )
        return f"{told}. Run {self.recommended}, the simplest: {why}. {self.fastest} may gain {100 * gain:.1f} %"


def choose_among_ties(result: Result) -> Choice:
    """The ties of the chosen plan among the plans that fit. Under another objective than time there are none: bytes are exact. A plan
    for a tool is recommended as it is: the tool runs it, and may not run the others."""
    if not result.best.fits:
        return Choice(result.best.name, (), result.best.name, result.request.tool, fits=False)
    lead = result.best if leads_by_simplicity(result.best) else None
    best = result.plans[1] if lead else result.best
    found = []
    for plan in result.plans:
        doubt = doubt_between(best, plan, result.cluster)
        slower = plan.cost.step_time_s / best.cost.step_time_s - 1
        timed = best.objective == plan.objective == "time"
        # Another row may hold the same plan under another name.
        other = plan.name != best.name and (plan.mesh, plan.blocks) != (best.mesh, best.blocks)
        if plan.fits and timed and 0 <= slower <= doubt and other:
            found.append(Tie(plan.name, plan.method, slower, doubt))
    stock = {name: rank for rank, name in enumerate(BASELINES)}
    found.sort(key=lambda t: t.slower)
    simple = min((t for t in found if t.method in stock), key=lambda t: stock[t.method], default=None)
    plain = result.request.tool is not None or (
        best.method in stock and (simple is None or stock[best.method] <= stock[simple.method])
    )
    if simple is not None and not plain:
        return Choice(best.name, tuple(found), simple.name, result.request.tool)
    return Choice(best.name, tuple(found), (lead or best).name, result.request.tool, lead is not None)


def doubt_between(one: Plan, other: Plan, cluster: Cluster) -> float:
    """The share by which the predicted steps of two plans may differ and still be a tie."""
    both = math.hypot(time_sigma(one, cluster), time_sigma(other, cluster))
    # expm1 turns the difference of logarithms into a share: 6.7 % of ln are 6.9 %.
    return min(math.expm1(Z_NINE_IN_TEN * both), MOST_DOUBT)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A machine that is worse than assumed: factors on the bandwidth and the latency of all links, and the contention, which is the
    seconds by which one second of traffic slows the compute beside it (None: as assumed; 1: nothing is hidden)."""

    title: str
    bandwidth: float = 1.0
    latency: float = 1.0
    contention: float | None = None

    def model(self, plan: Plan, cluster: Cluster) -> CostModel:
        """The cost model of this machine, for the mesh and the workload of a plan."""
        there = cluster.with_bandwidth(self.bandwidth).with_latency(self.latency)
        made = cost_model_of(plan, there)
        return made if self.contention is None else replace(made, contention=self.contention)


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


def plan_regrets(result: Result, scenarios: Sequence[Scenario] = SCENARIOS) -> list[Regret]:
    """The regret of each plan that fits, in the order of the plans."""
    plans = [p for p in result.plans if p.fits]
    times = [[_step_seconds(p, result, s) for s in scenarios] for p in plans]
    # Regret is against the plan that is best in that scenario, which another machine may make another plan.
    least = [min(column) for column in zip(*times, strict=True)]
    return [
        Regret(p.name, tuple(row), tuple(t / best - 1 for t, best in zip(row, least, strict=True)))
        for p, row in zip(plans, times, strict=True)
    ]


def _step_seconds(plan: Plan, result: Result, scenario: Scenario) -> float:
    model, result = scenario.model(plan, result.cluster), result.of_plan(plan)
    if plan.pipeline:
        ends = ops_at_the_ends(result.coarse)
        return price_pipeline(plan.blocks, result.graph, plan.pipeline, model, ends).step_time_s
    return price_with_host(plan.blocks, result.graph, model, result.coarse).step_time_s
