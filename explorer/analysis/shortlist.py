"""The few plans that the first page sets beside each other, and what each of them is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from explorer.analysis.answer import OWN
from explorer.text import recipe, units
from planner_core.core import Plan
from planner_core.planning.analysis import Choice
from planner_core.planning.methods import BASELINES

MOST = 5
NEAR = 0.02
"""Steps, and memory, that differ by less than this share are nearly the same."""
MEGATRON = ("megatron", "megatron-sp")


@dataclass(frozen=True, slots=True)
class Listed:
    """A plan by its name in the address, and what it is in a few words."""

    name: str
    what: str


def shortlist(plans: Mapping[str, Plan], found: Choice, tool: str) -> list[Listed]:
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
        told[fastest] = "the exact optimum" + (
            f"; {units.percent(gain)} faster is less than the doubt" if gain >= 0.001 else ""
        )
    told |= {n: "what you run now" for n, p in plans.items() if p.method == OWN}
    stock = [n for n, p in plans.items() if p.method in MEGATRON]
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
    told.update({n: "other trade-off" for n, p in plans.items() if p.method == "exact" and n not in told})
    kept: dict[str, str] = {}
    for name, what in told.items():
        alike = any(same(plans[name], plans[k]) for k in kept)
        if len(kept) < MOST and (not alike or name in (run, fastest) or plans[name].method == OWN):
            kept[name] = what
    return [Listed(n, what + ("" if plans[n].fits else ", does not fit")) for n, what in kept.items()]


def same(one: Plan, other: Plan) -> bool:
    """Whether two plans are alike to who chooses: layouts of one name, or nearly the same step and memory."""
    near = all(
        abs(a - b) <= NEAR * max(a, b)
        for a, b in (
            (one.cost.step_time_s, other.cost.step_time_s), (one.cost.memory_bytes["peak"], other.cost.memory_bytes["peak"]),
        )
    )  # fmt: skip
    return near and recipe.short(one).partition(",")[0] == recipe.short(other).partition(",")[0]
