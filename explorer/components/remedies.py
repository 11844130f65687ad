"""What would fit where no plan does: single changes of the settings, each planned here and shown with what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from explorer.address import settings
from explorer.analysis.remedies import Remedy, remedy_ladders
from explorer.analysis.step_parts import memory_limit_bytes
from explorer.components import frame
from explorer.session import current_plans, shared_plans, state
from explorer.session.later_searches import STAGES_SEARCH
from explorer.text import recipe, units
from explorer.text.option_words import page_wording
from explorer.text.shortage import Shortage
from planner_core.core import InputError, NoteKind, Plan, PlannerError, load_cluster
from planner_core.planning import Result
from planner_core.planning.pricing import Budget, count_model_flops, measure_speed, name_throughput


def show_remedies(result: Result, plans: Mapping[str, Plan]) -> None:
    """Draw how much memory is missing, and what would fit. `plans`: those of the table, with the visitor's own setup."""
    tool, limit, capacity = result.request.bounding_tool, memory_limit_bytes(result), result.cluster.gpu.memory_bytes
    shortage = Shortage.of(
        result, plans.values(), settings.TOOLS[tool] if tool else "", searching=STAGES_SEARCH.is_pending()
    )
    least = shortage.least_bytes
    st.markdown(f"### {frame.escape(shortage.head)}")
    st.markdown(
        f"{shortage.smallest} needs **{units.memory(least)}** on each GPU; a plan may take **{units.memory(limit)}**, which is "
        f"{units.percent(limit / capacity)} of the GPU’s {units.memory(capacity)}.{shortage.more}"
    )
    for note in result.best.notes:
        if note.kind is NoteKind.IDLE_GPUS:
            st.caption(frame.escape(page_wording(note)))
    offer_remedies(least / limit)


def offer_remedies(need: float | None = None) -> None:
    """Draw the remedies as buttons, each with what it would take; plan one after the other.

    `need` is the least memory that a plan takes, over what there is; None where the planner refuses the settings without it.
    """
    values = state.values()
    try:
        ladders = remedy_ladders(values, load_cluster(settings.cluster_spec(values)), need)
    except InputError:
        return
    head = st.empty()
    head.markdown("**What would fit**")
    if _is_stopped():
        st.caption("Planning was stopped; the buttons below change the settings all the same.")
    # All places first: a row that is known sooner must not move those that are not.
    places = [
        st.container(horizontal=True, vertical_alignment="center", key=f"remedy_{k}").empty()
        for k in range(len(ladders))
    ]
    progress, is_any_fitting = st.empty(), False
    for k, ladder in enumerate(ladders):
        fitting = _find_fitting(k, ladder, progress)
        is_any_fitting |= fitting is not None
        with places[k].container(horizontal=True, vertical_alignment="center"):
            _show_remedy(k, ladder, fitting)
    progress.empty()
    if not is_any_fitting and not _is_stopped():
        head.markdown("**No single change makes a plan fit**")


def _is_stopped() -> bool:
    return bool(st.session_state.get("remedies_stopped") == state.current_request())


def _find_fitting(k: int, ladder: list[Remedy], place: Any) -> tuple[Remedy, Result] | None:
    """Return the first remedy of a ladder whose best plan fits."""
    request = state.current_request()
    if _is_stopped():
        return None
    for rung, remedy in enumerate(ladder):
        progress = current_plans.progress_with_stop(
            place,
            lambda: st.session_state.update(remedies_stopped=request, changed=True),
            key=f"stop_remedy_{k}_{rung}",
        )
        try:
            result = shared_plans.plan_request(settings.build_request({**state.values(), **remedy.changes}), progress)
        except PlannerError:
            continue
        finally:
            place.empty()
        if result.best.fits:
            return remedy, result
    return None


def _show_remedy(k: int, ladder: list[Remedy], fitting: tuple[Remedy, Result] | None) -> None:
    remedy = fitting[0] if fitting else ladder[-1]
    if fitting is None and not _is_stopped():
        st.caption(f"{frame.escape(remedy.words)}: still does not fit.")
        return
    st.button(remedy.words, key=f"take_remedy_{k}", on_click=lambda: state.change(**remedy.changes))
    if fitting is not None:
        st.markdown(frame.escape(_describe_result(fitting[1])), width="content")


def _describe_result(result: Result) -> str:
    """Say what the best plan of a remedy takes: memory, time, and what all tokens take."""
    plan = result.best
    speed = measure_speed(plan, count_model_flops(result.of_plan(plan).graph), result.cluster)
    parts = [
        f"{units.memory(plan.cost.memory_bytes['peak'])} of {units.memory(memory_limit_bytes(result))}",
        f"{units.seconds(speed.step_time_s)} a step",
    ]
    tokens = state.value("tokens")
    if tokens is not None:
        run = Budget(tokens, state.value("price")).to_json(speed, result.cluster.num_gpus)
        cost = f" and {units.count(run['cost'])}" if run["cost"] else ""
        parts.append(f"{units.significant(run['days'] or 0)} days{cost}")
    parts += [
        f"{units.significant(speed.tokens_per_s_per_gpu)} {name_throughput(plan)} on each GPU",
        recipe.layout_name(plan),
    ]
    return " · ".join(parts)
