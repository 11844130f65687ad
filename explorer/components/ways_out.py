"""Ways out where no plan fits: single changes of the sentence, each planned here and told with what it then takes."""

from __future__ import annotations

from typing import Any

import streamlit as st

from explorer.address import settings
from explorer.analysis import answer
from explorer.analysis.ways_out import Way, ladders
from explorer.components import frame
from explorer.session import state
from explorer.text import recipe, units
from planner_core.core import InputError, PlannerError, load_cluster
from planner_core.planning import Result
from planner_core.planning.pricing import Budget, model_flops, speed_of


def panel(result: Result) -> None:
    """Draw on the first page how much memory is missing, and the ways out."""
    least = min(p.cost.memory_bytes["peak"] for p in result.plans)
    limit = answer.limit_bytes(result)
    st.html("<h2 class='recipe'>No plan fits the memory</h2>")
    st.markdown(
        f"The smallest plan needs **{units.memory(least)}** on each GPU; a plan may take **{units.memory(limit)}**, which is "
        f"{units.percent(limit / result.cluster.gpu.memory_bytes)} of the GPU’s {units.memory(result.cluster.gpu.memory_bytes)}."
    )
    for note in result.best.notes:
        if "hold the same weights" in note:
            st.caption(frame.text(note))
    offer(least / limit)


def short() -> None:
    """Draw the ways out below the sentence with which the planner refuses the settings."""
    offer(None)


def offer(need: float | None) -> None:
    """The ways out as buttons, each with what it would take; planned one after the other."""
    v = state.values()
    try:
        found = ladders(v, load_cluster(settings.cluster(v)), need)
    except InputError:
        return
    st.markdown("**What would fit**")
    wanted = state.request()
    if st.session_state.get("ways_stopped") == wanted:
        st.caption("Planning was stopped; the buttons below change the settings all the same.")
    places = [st.container(horizontal=True, vertical_alignment="center", key=f"way_{k}") for k in range(len(found))]
    told = [place.empty() for place in places]
    progress = st.empty()
    for k, ladder in enumerate(found):
        one = _first_that_fits(k, ladder, progress, wanted)
        with told[k].container(horizontal=True, vertical_alignment="center"):
            _row(k, ladder, one)
    progress.empty()


def _first_that_fits(k: int, ladder: list[Way], progress: Any, wanted: object) -> tuple[Way, Result] | None:
    if st.session_state.get("ways_stopped") == wanted:
        return None
    for rung, way in enumerate(ladder):
        say = state.waiting(
            progress, lambda: st.session_state.update(ways_stopped=wanted, changed=True), key=f"stop_way_{k}_{rung}"
        )
        try:
            result = state.plan(settings.request({**state.values(), **way.changes}), say)
        except PlannerError:
            continue
        finally:
            progress.empty()
        if result.best.fits:
            return way, result
    return None


def _row(k: int, ladder: list[Way], one: tuple[Way, Result] | None) -> None:
    way = one[0] if one else ladder[-1]
    if one is None and st.session_state.get("ways_stopped") != state.request():
        st.caption(f"{frame.text(way.words)}: still does not fit.")
        return
    st.button(way.words, key=f"way_out_{k}", on_click=lambda: state.change(**way.changes))
    if one is not None:
        st.markdown(frame.text(_takes(one[1])), width="content")


def _takes(result: Result) -> str:
    """The time and memory of the best plan of a way out."""
    plan = result.best
    s = speed_of(plan, model_flops(result.graph), result.cluster)
    parts = [
        f"{units.memory(plan.cost.memory_bytes['peak'])} of {units.memory(answer.limit_bytes(result))}",
        f"{units.seconds(s.step_time_s)} a step",
        f"{units.significant(s.tokens_per_s_per_gpu)} tokens/s on each GPU",
        recipe.layout(plan),
    ]
    tokens = state.value("tokens")
    if tokens is not None:
        run = Budget(tokens, state.value("price")).to_json(s, result.cluster.num_gpus)
        parts.insert(
            2,
            f"{units.significant(run['days'] or 0)} days" + (f" and {units.count(run['cost'])}" if run["cost"] else ""),
        )
    return " · ".join(parts)
