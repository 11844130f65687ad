"""The few plans that the first page sets beside each other, and what each of them is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from explorer.analysis.step_parts import STATED_METHOD
from explorer.text import recipe, units
from planner_core.core import Plan
from planner_core.planning import STAGES_PLAN_NAME
from planner_core.planning.analysis import MOST_DOUBT, Choice
from planner_core.planning.methods import BASELINES

MAX_LISTED = 5
NEARLY_EQUAL = 0.02
"""Steps, and memory, that differ by less than this share are nearly the same."""
MIN_GAIN = 0.001
"""The exact optimum that gains a smaller share, by a layout of the same name, is not listed beside it."""
MEGATRON_METHODS = ("megatron", "megatron-sp")


@dataclass(frozen=True, slots=True)
class ListedPlan:
    """A plan by its name in the address, and what it is in a few words."""

    name: str
    what: str


def shortlist(plans: Mapping[str, Plan], found: Choice, tool: str) -> list[ListedPlan]:
    """At most five: what is recommended, the fastest, what is run now, Megatron-LM at its best, FSDP, and what else there is.

    A layout that stands in the list is not listed again.
    """
    names = {p.name: n for n, p in plans.items()}
    run, fastest = names[found.recommended], names[found.fastest]
    told = {run: f"recommended: {tool} runs it as it is" if tool else "recommended"}
    if plans[run].method in BASELINES and not tool:
        told[run] = "recommended: stock tools run it as it is"
    if fastest != run:
        gain = plans[run].cost.step_time_s / plans[fastest].cost.step_time_s - 1
        if gain >= MIN_GAIN or recipe.layout_name(plans[run]) != recipe.layout_name(plans[fastest]):
            less = f"; {units.percent(gain)} faster is less than the doubt" if gain >= MIN_GAIN else ""
            told[fastest] = "the exact optimum" + less
        else:
            told[run] += ", as fast as the exact optimum"
    told |= {n: "what you run now" for n, p in plans.items() if p.method == STATED_METHOD}
    deep = {n: p for n, p in plans.items() if p.name == STAGES_PLAN_NAME}
    told |= {n: _describe_stages(p, plans[fastest]) for n, p in deep.items()}
    if any(p.cost.step_time_s * (1 + MOST_DOUBT) < plans[run].cost.step_time_s for p in deep.values()):
        told[run] = "the best without pipeline stages"
    stock = [n for n, p in plans.items() if p.method in MEGATRON_METHODS]
    if stock:
        told.setdefault(
            min(stock, key=lambda n: (not plans[n].fits, plans[n].cost.step_time_s)), "Megatron-LM at its best"
        )
    told.update(
        {
            n: BASELINES[p.method].title
            for n, p in plans.items()
            if p.method in ("fsdp", "data-parallel") and n not in told
        }
    )
    told.update({n: "other trade-off" for n, p in plans.items() if p.method == "exact" and n not in (*told, fastest)})
    kept: dict[str, str] = {}
    for name, what in told.items():
        alike = any(nearly_equal(plans[name], plans[k]) for k in kept)
        if len(kept) < MAX_LISTED and (
            not alike
            or name in (run, fastest)
            or plans[name].method == STATED_METHOD
            or plans[name].name == STAGES_PLAN_NAME
        ):
            kept[name] = what
    return [ListedPlan(n, what + ("" if plans[n].fits else ", does not fit")) for n, what in kept.items()]


def _describe_stages(plan: Plan, best: Plan) -> str:
    """What a plan with pipeline stages gains over the fastest without."""
    gain = 1 - plan.cost.step_time_s / best.cost.step_time_s
    return f"with pipeline stages: {units.percent(gain)} less time" if best.fits else "with pipeline stages it fits"


def nearly_equal(one: Plan, other: Plan) -> bool:
    """Whether two plans are alike to who chooses: layouts of one name, or nearly the same step and memory."""
    near = all(
        abs(a - b) <= NEARLY_EQUAL * max(a, b)
        for a, b in (
            (one.cost.step_time_s, other.cost.step_time_s),
            (one.cost.memory_bytes["peak"], other.cost.memory_bytes["peak"]),
        )
    )
    return near and recipe.layout_name(one).partition(",")[0] == recipe.layout_name(other).partition(",")[0]
