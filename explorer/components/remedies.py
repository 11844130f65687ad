"""Ways out where no plan fits: single changes of the sentence, each planned here and told with what it then takes."""

from __future__ import annotations

from typing import Any

import streamlit as st

from explorer.address import settings
from explorer.analysis import step_parts
from explorer.analysis.remedies import Remedy, remedy_ladders
from explorer.components import frame
from explorer.session import state
from explorer.text import recipe, units
from planner_core.core import InputError, PlannerError, load_cluster
from planner_core.planning import Result
from planner_core.planning.pricing import Budget, count_model_flops, measure_speed


def show_remedies(result: Result) -> None:
    """Draw on the first page how much memory is missing, and the ways out."""
    least = min(p.cost.memory_bytes["peak"] for p in result.plans)
    limit = step_parts.memory_limit_bytes(result)
    st.html("<h2 class='recipe'>No plan fits the memory</h2>")
    st.markdown(
        f"The smallest plan needs **{units.memory(least)}** on each GPU; a plan may take **{units.memory(limit)}**, which is "
        f"{units.percent(limit / result.cluster.gpu.memory_bytes)} of the GPU’s {units.memory(result.cluster.gpu.memory_bytes)}."
    )
    for note in result.best.notes:
        if "hold the same weights" in note:
            st.caption(frame.escape(note))
    offer_remedies(least / limit)


def show_remedies_for_refusal() -> None:
    """Draw the ways out below the sentence with which the planner refuses the settings."""
    offer_remedies(None)


def offer_remedies(need: float | None) -> None:
    """The ways out as buttons, each with what it would take; planned one after the other."""
    v = state.values()
    try:
        found = remedy_ladders(v, load_cluster(settings.cluster_spec(v)), need)
    except InputError:
        return
    st.markdown("**What would fit**")
    wanted = state.current_request()
    if st.session_state.get("ways_stopped") == wanted:
        st.caption("Planning was stopped; the buttons below change the settings all the same.")
    places = [st.container(horizontal=True, vertical_alignment="center", key=f"way_{k}") for k in range(len(found))]
    told = [place.empty() for place in places]
    progress = st.empty()
    for k, ladder in enumerate(found):
        one = _first_that_fits(k, ladder, progress, wanted)
        with told[k].container(horizontal=True, vertical_alignment="center"):
            _remedy_row(k, ladder, one)
    progress.empty()


def _first_that_fits(k: int, ladder: list[Remedy], progress: Any, wanted: object) -> tuple[Remedy, Result] | None:
    if st.session_state.get("ways_stopped") == wanted:
        return None
    for rung, way in enumerate(ladder):
        say = state.progress_with_stop(
            progress, lambda: st.session_state.update(ways_stopped=wanted, changed=True), key=f"stop_way_{k}_{rung}"
        )
        try:
            result = state.plan_request(settings.build_request({**state.values(), **way.changes}), say)
        except PlannerError:
            continue
        finally:
            progress.empty()
        if result.best.fits:
            return way, result
    return None


def _remedy_row(k: int, ladder: list[Remedy], one: tuple[Remedy, Result] | None) -> None:
    way = one[0] if one else ladder[-1]
    if one is None and st.session_state.get("ways_stopped") != state.current_request():
        st.caption(f"{frame.escape(way.words)}: still does not fit.")
        return
    st.button(way.words, key=f"way_out_{k}", on_click=lambda: state.change(**way.changes))
    if one is not None:
        st.markdown(frame.escape(_describe_result(one[1])), width="content")


def _describe_result(result: Result) -> str:
    """The time and memory of the best plan of a way out."""
    plan = result.best
    s = measure_speed(plan, count_model_flops(result.graph), result.cluster)
    parts = [
        f"{units.memory(plan.cost.memory_bytes['peak'])} of {units.memory(step_parts.memory_limit_bytes(result))}",
        f"{units.seconds(s.step_time_s)} a step",
        f"{units.significant(s.tokens_per_s_per_gpu)} tokens/s on each GPU",
        recipe.describe_layout(plan),
    ]
    tokens = state.value("tokens")
    if tokens is not None:
        run = Budget(tokens, state.value("price")).to_json(s, result.cluster.num_gpus)
        parts.insert(
            2,
            f"{units.significant(run['days'] or 0)} days" + (f" and {units.count(run['cost'])}" if run["cost"] else ""),
        )
    return " · ".join(parts)
