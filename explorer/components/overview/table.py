"""The plans of the first page: a row each, what it takes, and in a sentence why the chosen one is as fast as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from explorer import components
from explorer.address import setups
from explorer.analysis import step_parts
from explorer.analysis.shortlist import ListedPlan
from explorer.components import frame
from explorer.session import current_setup, state
from explorer.text import recipe, units, words
from planner_core.core import Plan
from planner_core.cost.communication import sent_per_gpu
from planner_core.planning import Request, Result
from planner_core.planning.methods import EXACT
from planner_core.planning.pricing import count_model_flops, measure_speed, predict_reserved

PART_NAMES = {
    step_parts.COMPUTE: "compute",
    step_parts.RECOMPUTATION: "computed again",
    step_parts.WAITS: "waits for data",
    step_parts.WEIGHTS: "weight traffic that shows",
    step_parts.OPTIMIZER: "optimizer",
    step_parts.BUBBLE: "bubble of the pipeline",
    step_parts.OUTSIDE: "the GPU has no work",
}


MAX_BAR_RATIO = 3.0
"""A bar that is so many times as long as the shortest fills its place, as longer ones do."""


@st.cache_resource(max_entries=256, show_spinner=False)
def _cached_parts(request: Request, name: str, edit: tuple[str, ...], _plan: Plan, _home: Result) -> dict[str, float]:
    return step_parts.split_step(_plan, _home.graph, _home.coarse)


def step_parts_of(name: str, plan: Plan, result: Result) -> dict[str, float]:
    """Seconds of a plan's step by what they go to."""
    home = current_setup.result_of(name, result)
    return _cached_parts(home.request, name, state.edit_of(name), plan, home)


@st.cache_resource(max_entries=64, show_spinner=False)
def _cached_flops(request: Request, _home: Result) -> int:
    return count_model_flops(_home.graph)


def show_table(result: Result, plans: Mapping[str, Plan], listed: Sequence[ListedPlan], chosen: str) -> None:
    """The table, its legend, and the sentence about the chosen plan."""
    parts = {one.name: step_parts_of(one.name, plans[one.name], result) for one in listed}
    steps = [sum(parts[n].values()) for n in ([n for n in parts if plans[n].fits] or parts)]
    longest = min(max(steps), MAX_BAR_RATIO * min(steps))  # one bad plan must not make all other bars specks
    rows = [_table_row(plans[one.name], one, parts[one.name], longest, result) for one in listed]

    def choose() -> None:
        picked = str((st.session_state["plans_table"].get("chosen") or {}).get("id") or "")
        if picked in plans:
            state.change(plan=picked)

    components.draw_plans_table({"label": "Plans", "rows": rows, "chosen": chosen}, key="plans_table", on_choose=choose)
    shown = [p for p in step_parts.PARTS if any(found[p] for found in parts.values())]
    st.html(
        "<p class='bar-keys'>"
        + "".join(f"<span><i class='p-{p.replace(' ', '-')}'></i>{PART_NAMES[p]}</span>" for p in shown)
        + "</p>"
    )
    if chosen in parts:
        st.markdown(frame.escape(explain_choice(plans, listed, chosen, parts)))


def _table_row(
    plan: Plan, one: ListedPlan, parts: Mapping[str, float], longest: float, result: Result
) -> dict[str, Any]:
    s = measure_speed(plan, _cached_flops(result.request, result), result.cluster)
    held, kept, most = (
        plan.cost.memory_bytes["peak"],
        predict_reserved(plan, result.cluster),
        result.cluster.gpu.memory_bytes,
    )
    work = recipe.describe_extra_work(plan)
    over = not plan.fits or kept.short
    # what is reserved is never less than what is held
    low, high = (max(held, n) / units.GIB for n in (kept.low_bytes, kept.high_bytes))
    bounds = f"{low:.0f} – {high:.0f} reserved of {most / units.GIB:.3g}"
    shows = units.seconds(parts[step_parts.WAITS] + parts[step_parts.WEIGHTS])
    return {
        "id": one.name,
        "name": recipe.layout_name(plan),
        "what": f"{one.what}; {work}" if work else one.what,
        "fits": plan.fits,
        "step": units.seconds(s.step_time_s),
        "band": " – ".join(filter(None, s.between(units.seconds))) if plan.fits else "",
        "parts": _bar(parts, longest),
        "sent": units.traffic(sent_per_gpu(plan)),
        "shows": f"{shows} of it show",
        "memory": units.memory(held),
        "filled": min(1.0, held / most),
        "over": over,
        "range": f"of {units.memory(most)}"
        if not plan.fits
        else f"would reserve all {most / units.GIB:.3g}"
        if kept.short
        else bounds,
        "likely": max(held / most, min(1.0, kept.high_bytes / most)) if plan.fits else 1.0,
    }


def _bar(parts: Mapping[str, float], longest: float) -> list[list[Any]]:
    """The parts of a step as shares of the longest bar, with what each is."""
    most = max(longest, sum(parts.values()))
    return [[p, parts[p] / most, f"{PART_NAMES[p]}: {units.seconds(parts[p])}"] for p in step_parts.PARTS if parts[p]]


def explain_choice(
    plans: Mapping[str, Plan], listed: Sequence[ListedPlan], chosen: str, parts: Mapping[str, Mapping[str, float]]
) -> str:
    """Why the chosen plan takes more or less time than the one that it is measured against: what is run now, else the recommended one;
    for the recommended one, the next in the list that fits."""
    names = [one.name for one in listed if one.name != chosen]
    run = listed[0].name
    fit = [n for n in names if plans[n].fits]
    usual = [n for n in fit if chosen != run or plans[n].method != EXACT.name]
    other = setups.PLAN_ID if setups.PLAN_ID in names else run if run in names else next(iter(usual or fit), None)
    if not plans[chosen].fits:
        needed = units.memory(plans[chosen].cost.memory_bytes["peak"])
        return f"{recipe.layout_name(plans[chosen])} does not fit: a GPU would need {needed}."
    if other is None:
        return f"{recipe.layout_name(plans[chosen])} is the only plan here that fits."
    found = step_parts.round_steps({n: parts[n] for n in (chosen, other)}, chosen)
    gap = found.total(other) - found.total(chosen)
    against = "what you run now" if other == setups.PLAN_ID else recipe.layout_name(plans[other])
    causes = step_parts.explain_difference(found, chosen, other)
    tie = " The prediction cannot tell the two apart." if words.is_tie(plans[chosen], plans[other]) else ""
    if not causes:
        return f"{recipe.layout_name(plans[chosen])} takes as long as {against}, and {words.compare_sizes(plans[chosen], plans[other])}."
    share = units.percent(abs(gap) / max(1, found.total(other)))
    more = f"{share} {'less' if gap > 0 else 'more'} than" if gap else "as long as"
    return f"{recipe.layout_name(plans[chosen])} takes {more} {against}: it {causes}.{tie}"
