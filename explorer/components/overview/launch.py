"""The export of the first page: the launch line of the chosen plan, and a dialog that writes it in a tool's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import streamlit as st

from explorer.address import pins, settings, setups
from explorer.analysis import step_parts
from explorer.components import frame
from explorer.jobs import export as exporting
from explorer.session import current_setup, shared_plans, state
from explorer.session.later_searches import STAGES_SEARCH
from explorer.text import commands, recipe, units
from explorer.text.option_words import word_remarks
from planner_core.core import Cluster, Plan
from planner_core.planning import Request, Result
from planner_core.planning.methods import FREE, TARGETS, Target
from planner_core.planning.pricing import time_band

PREVIEW_LINES = 40
LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml"}


@dataclass(frozen=True, slots=True)
class Opened:
    """What the dialog was opened for: a search behind the page may recommend another plan, which it does not take.

    `home`: the result that the plan belongs to. `asked`: the page's request. `is_searched`: no search of stages was still to come, so
    what `home` recommends is what the command line recommends.
    """

    home: Result
    plan_id: str
    plan: Plan
    asked: Request
    is_searched: bool


def file_name(target: Target) -> str:
    """Name the file of a form when it is downloaded."""
    return f"{'train' if target.name == FREE else target.name}{target.suffix}"


def launch_line(target: Target, cluster: Cluster, plan: Plan) -> str:
    """Write the line that runs a plan in a form, the same on the page and in the dialog that writes the file."""
    return commands.launch_command(target.name, cluster, file_name(target), target.option(plan))


def show_export_bar(result: Result, plan_id: str, plan: Plan, length: int) -> None:
    """Draw the button and the launch line, in lines of `length` characters. Nothing is written before the button is pressed."""
    tool = state.value("tool") if state.value("method") == "exact" else ""
    target = TARGETS[tool or FREE]
    with st.container(horizontal=True, vertical_alignment="center", key="export_bar"):
        st.button(
            "Export as a script" if target.name == FREE else f"Export to {target.title}",
            type="primary",
            key="export",
            disabled=not plan.fits,
            on_click=_open_dialog,
            args=(result, plan_id, plan, target),
        )
        if plan.fits:
            _show_command(launch_line(target, result.cluster, plan), length)
        else:
            st.caption("A plan that does not fit is not launched.")
    opened: Opened | None = st.session_state.get("exporting")
    if opened and opened.asked == state.current_request():
        show_export_dialog(opened)
    else:
        _close_dialog()  # the address has changed under it


def _show_command(command: str, length: int = commands.LINE_LENGTH) -> None:
    """Draw what to type, with a button that copies it; a narrow window scrolls it."""
    st.code(commands.break_line(command, length), language="bash")


def _open_dialog(result: Result, plan_id: str, plan: Plan, target: Target) -> None:
    home = current_setup.result_of(plan_id, result)
    opened = Opened(home, plan_id, plan, state.current_request(), not STAGES_SEARCH.is_pending())
    st.session_state.update(form=target.name, exporting=opened)


def _close_dialog() -> None:
    st.session_state["exporting"] = None


@st.dialog("Export", width="large", on_dismiss=_close_dialog)
def show_export_dialog(opened: Opened) -> None:
    """Draw the forms; the chosen one is written, with its launch line and where it differs from the plan."""
    plan = opened.plan
    st.markdown(f"**{frame.escape(recipe.layout_name(plan))}**, {units.seconds(plan.cost.step_time_s)} a step")
    forms = {t.name: t for t in exporting.FORMS}
    default = st.session_state.get("form", FREE)
    chosen = st.pills(
        "Form",
        list(forms),
        default=default,
        format_func=lambda n: forms[n].title,
        required=True,
        key="export_form",
    )
    show_export(opened, forms[chosen or default])
    with st.expander("The plan itself, as a file", key="plan_file"):
        offer_plan_file(opened)


@st.cache_data(max_entries=64, show_spinner=False)
def export_plan(key: shared_plans.PlanKey, target: str, _plan: Plan, **options: bool) -> exporting.ExportedFile:
    """Write one export, kept by the plan's key (see `shared_plans.plan_key`)."""
    return exporting.export(_plan, target, **options)


def show_export(opened: Opened, target: Target) -> None:
    """Draw one form: what it does otherwise than the plan, its file, and how to launch it."""
    plan = opened.plan
    key = (shared_plans.plan_key(opened.home.request, opened.plan_id, plan), target.name, plan)
    place = st.empty()  # while this one is written, the file before is not offered under its name
    with st.spinner(f"Writing it for {target.title}", show_time=True):
        exported = export_plan(*key)
        if exported.problem and target.offers_nearest:
            exported = export_plan(*key, nearest=True)
    with place.container():
        _show_exported(opened.home, plan, target, exported)


def _show_exported(home: Result, plan: Plan, target: Target, exported: exporting.ExportedFile) -> None:
    if exported.problem:
        st.caption(target.description)
        st.info(f"{target.title} cannot be told this plan: {frame.escape(exported.problem)}")
        _offer_to_plan_for(target)
        return
    if exported.nearest:
        high = time_band(plan, home.cluster).high
        highest_s = plan.cost.step_time_s * high if high else None
        if warning := warn_of_form(exported.nearest, highest_s, step_parts.memory_limit_bytes(home)):
            st.warning(warning)
        st.markdown(difference_table(exported.nearest))
    # what states a whole run says itself what it holds
    description = "" if target.states_run else target.description
    remarks = word_remarks(exported.remarks, file_name(target))
    st.caption(frame.escape(commands.join_sentences([description, *remarks])))
    mixed = len({b.recompute for label, b in plan.blocks.items() if label}) > 1
    if mixed and not target.runs_whole_plan:
        _offer_to_plan_for(target)
    _offer_export(home, plan, target, exported.content)


def _offer_export(home: Result, plan: Plan, target: Target, content: str) -> None:
    file = file_name(target)
    with st.container(horizontal=True):
        frame.offer_file(f"Download {file}", content, file, f"download_{target.name}", type="primary")
        if target.plan_suffix:
            plan_name = file.removesuffix(target.suffix) + target.plan_suffix
            frame.offer_file(f"Download {plan_name}", exporting.plan_text(plan), plan_name, "download_beside")
    _show_command(launch_line(target, home.cluster, plan))
    lines = content.splitlines()
    st.code("\n".join(lines[:PREVIEW_LINES]), language=LANGUAGES.get(target.suffix, "text"), height=260)
    if len(lines) > PREVIEW_LINES:
        st.caption(f"the first {PREVIEW_LINES} of {units.whole(len(lines))} lines")


def _offer_to_plan_for(target: Target) -> None:
    """Offer to plan for the tool: its own plan has its own figures."""

    def plan_for_tool() -> None:
        state.change(tool=target.name, method="exact", objective="time", plan="")
        _close_dialog()

    if target.name in settings.TOOLS and state.value("tool") != target.name:
        st.button(f"Plan for {target.title}", key="plan_for_form", on_click=plan_for_tool)


def warn_of_form(priced: Mapping[str, Any], highest_s: float | None, limit_bytes: int) -> str:
    """Say in a sentence that a form does not fit, or is slower than the plan may be; "" where it does neither.

    `highest_s`: the upper end of the plan's range, None where there is none.
    """
    step_s, peak = priced["step_time_s"], priced["peak_bytes"]
    causes = [] if priced["fits"] else [f"does not fit: it takes {units.memory(peak)} of {units.memory(limit_bytes)}"]
    if highest_s is not None and step_s > highest_s:
        causes.append(f"takes {units.seconds(step_s)} a step, the plan at most {units.seconds(highest_s)}")
    return f"This form {', and '.join(causes)}." if causes else ""


def difference_table(priced: Mapping[str, Any]) -> str:
    """Return what a form does against the plan as a Markdown table; a sentence where nothing differs."""
    quantities = (
        ("step", units.seconds, "step_time_s"),
        ("sent per GPU", units.traffic, "wire_bytes"),
        ("memory per GPU", units.memory, "peak_bytes"),
    )
    rows, differs = [], not priced["fits"]
    for name, show, key in quantities:
        of_form, of_plan = priced[key], priced[f"plan_{key}"]
        if key == "step_time_s" and priced.get("is_host_unknown") and priced.get("plan_host_wait_s"):
            name, of_plan = "step without waits for the host", of_plan - priced["plan_host_wait_s"]
        difference = ""
        if abs(of_form - of_plan) >= 0.0005 * of_plan:
            differs = True
            difference = units.change(of_form / of_plan - 1) if of_plan else ""
        rows.append(f"| {name} | {show(of_form)} | {show(of_plan)} | {difference} |")
    if not differs:
        return "This form does what the plan does: step, traffic and memory are the plan’s."
    rows.append(f"| fits | {'yes' if priced['fits'] else 'no'} | yes | |")  # a plan that does not fit is not exported
    return "| | in this form | the plan | difference |\n|---|---:|---:|---:|\n" + "\n".join(rows)


def offer_plan_file(opened: Opened) -> None:
    """Offer the plan as data, with the commands that make and verify it."""
    home, plan_id, plan = opened.home, opened.plan_id, opened.plan
    file = f"{home.graph.name}-{plan_id}.json".replace("/", "-")
    frame.offer_file(f"Download {file}", exporting.plan_text(plan), file, "download_plan", mime="application/json")
    if plan_id == pins.EDITED_ID:
        st.caption("A plan that was changed by hand has no command: keep the file.")
    else:
        is_setup = plan_id == setups.PLAN_ID
        request = home.request if is_setup else opened.asked
        # Without --pick the command writes what it recommends, which is not known here before stages are searched.
        is_settled = not is_setup and opened.is_searched
        pick = "" if is_settled and plan.name == home.choice.recommended else plan.name
        _show_command(commands.plan_command(request, file, pick))
    st.caption("Its collectives and memory at full size, in one process; with --ranks 4 its numbers, on real ones:")
    _show_command(commands.verify_command(file))
