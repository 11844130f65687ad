"""The way out of the first page: the launch line of the chosen plan, and a dialog that writes it in a tool's form when one is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from explorer.address import pins, settings, setups
from explorer.components import frame
from explorer.components.overview import verify
from explorer.jobs import export as exporting
from explorer.session import current_setup, state
from explorer.text import commands, recipe, units
from planner_core.core import Plan
from planner_core.exporters import TARGETS, WITH_STAGES, Target
from planner_core.planning import Request, Result

TRAINING_SCRIPT = "torchrun"
PREVIEW_LINES = 40


def target_of(tool: str, plan: Plan) -> Target:
    """The form that runs what is planned: the tool's, else the training script, if it runs such a plan."""
    if tool or not plan.pipeline or TRAINING_SCRIPT in WITH_STAGES:
        return TARGETS[tool or TRAINING_SCRIPT]
    return TARGETS[next(name for name in WITH_STAGES if name in settings.TOOLS)]


def target_title(target: Target) -> str:
    """A form by its tool."""
    return settings.TOOLS.get(target.name, target.title)


def file_name(target: Target) -> str:
    """What the file is called when it is downloaded."""
    return f"{'train' if target.name == TRAINING_SCRIPT else target.name}{target.suffix}"


def show_export_bar(result: Result, name: str, plan: Plan) -> None:
    """The button and the launch line. Nothing is written yet."""
    target = target_of(state.value("tool") if state.value("method") == "exact" else "", plan)
    with st.container(horizontal=True, vertical_alignment="center", key="export_bar"):
        st.button(
            f"Export to {target_title(target)}" if target.name != TRAINING_SCRIPT else "Export as a script",
            type="primary",
            key="export",
            disabled=not plan.fits,
            on_click=lambda: st.session_state.update(form=target.name, exporting=True),
        )
        st.code(
            commands.launch_command(target.name, result.cluster, file_name(target)), language="bash", wrap_lines=True
        )
    if st.session_state.get("exporting"):
        show_export_dialog(result, name, plan)


def _shut() -> None:
    st.session_state["exporting"] = False


@st.dialog("Export", width="large", on_dismiss=_shut)
def show_export_dialog(result: Result, name: str, plan: Plan) -> None:
    """The forms; the chosen one is written, with its launch line and where it differs from the plan."""
    home = current_setup.result_of(name, result)
    st.markdown(f"**{frame.escape(recipe.layout_name(plan))}**, {units.seconds(plan.cost.step_time_s)} a step")
    forms = {t.name: t for t in exporting.FORMS}
    first = st.session_state.get("form", TRAINING_SCRIPT)
    chosen = st.pills(
        "Form",
        list(forms),
        default=first,
        format_func=lambda n: target_title(forms[n]),
        required=True,
        key="export_form",
    )
    show_export(home, name, plan, forms[chosen or first])
    with st.expander("The plan itself, as a file", key="plan_file"):
        offer_plan_file(home, name, plan)
    with st.expander("Verify it", key="verify", on_change="rerun") as box:
        if box.open:
            verify.show_verification(plan, name, home.graph)


@st.cache_data(max_entries=64, show_spinner=False)
def export_plan(
    request: Request, plan_id: str, edit: tuple[str, ...], target: str, suffix: str, _plan: Plan, near: bool = False
) -> exporting.ExportedFile:
    """One export, kept; `request` is what the plan answers, `edit` as in `state.edit_of`."""
    return exporting.export(_plan, target, suffix, near=near)


def show_export(home: Result, name: str, plan: Plan, target: Target) -> None:
    """One form: its file, how to launch it, and what it does otherwise than the plan."""
    st.caption(target.words)
    asked = (home.request, name, state.edit_of(name), target.name, target.suffix, plan)
    with st.spinner(f"Writing it for {target_title(target)}", show_time=True):
        made = export_plan(*asked)
        if made.problem and target.in_pairs:
            made = export_plan(*asked, near=True)
    if made.problem:
        st.info(f"{target_title(target)} cannot be told this plan: {frame.escape(made.problem)}")
        _plan_for(target)
        return
    for remark in made.remarks:
        if not (made.nearest and remark.startswith("in this form:")):  # the table says it
            st.caption(frame.escape(remark))
    mixed = len({b.recompute for label, b in plan.blocks.items() if label}) > 1
    if mixed and not target.runs_all:
        st.info(
            f"The plan recomputes some blocks and not others, which {target_title(target)} cannot be told: these are not its figures."
        )
        _plan_for(target)
    elif made.nearest:
        st.markdown(difference_table(made.nearest))
    file = file_name(target)
    st.download_button(
        f"Download {file}",
        made.content,
        file_name=file,
        on_click="ignore",
        key=f"download_{target.name}",
        type="primary",
        icon=":material/download:",
    )
    if target.beside:
        own = file.removesuffix(target.suffix) + target.beside
        st.download_button(
            f"Download {own}",
            exporting.plan_text(plan),
            file_name=own,
            on_click="ignore",
            key="download_beside",
            icon=":material/download:",
        )
    st.code(commands.launch_command(target.name, home.cluster, file), language="bash", wrap_lines=True)
    language = {".py": "python", ".json": "json", ".yaml": "yaml"}.get(target.suffix, "text")
    lines = made.content.splitlines()
    st.code("\n".join(lines[:PREVIEW_LINES]), language=language, height=260)
    if len(lines) > PREVIEW_LINES:
        st.caption(f"the first {PREVIEW_LINES} of {units.whole(len(lines))} lines")


def _plan_for(target: Target) -> None:
    """A way to what the tool can be told, with its own figures."""
    if target.name in settings.TOOLS and state.value("tool") != target.name:
        st.button(f"Plan for {target_title(target)}", key="plan_for_form", on_click=_take_tool, args=(target.name,))


def _take_tool(tool: str) -> None:
    state.change(tool=tool, method="exact", objective="time", plan="")
    _shut()


def difference_table(priced: Mapping[str, Any]) -> str:
    """What this form does, beside the plan, as a table; a sentence where nothing differs."""
    rows = (
        ("step", units.seconds, "step_time_s"),
        ("sent per GPU", units.traffic, "wire_bytes"),
        ("memory per GPU", units.memory, "peak_bytes"),
    )
    lines = []
    for name, show, key in rows:
        here, there = priced[key], priced[f"plan_{key}"]
        if abs(here - there) >= 0.0005 * there:
            lines.append(
                f"| {name} | {show(here)} | {show(there)} | {units.change(here / there - 1) if there else ''} |"
            )
    if not priced["fits"]:
        lines.append("| fits | no | yes | |")
    head = "| | in this form | the plan | difference |\n|---|---:|---:|---:|\n"
    return (
        head + "\n".join(lines)
        if lines
        else "This form does what the plan does: step, traffic and memory are the plan’s."
    )


def offer_plan_file(home: Result, name: str, plan: Plan) -> None:
    """The plan as data, and the command that makes it; `home` is what it is one of."""
    file = f"{home.graph.name}-{name}.json".replace("/", "-")
    st.download_button(
        f"Download {file}",
        exporting.plan_text(plan),
        file_name=file,
        mime="application/json",
        on_click="ignore",
        key="download_plan",
        icon=":material/download:",
    )
    if name == pins.EDITED_ID:
        st.caption("A plan that was changed by hand has no command: keep the file.")
        return
    request = home.request if name == setups.PLAN_ID else state.current_request()
    pick = plan.name if name == setups.PLAN_ID or plan is not home.best else ""
    st.code(commands.plan_command(request, file, pick), language="bash", wrap_lines=True)
