"""Choosing a plan: filters, the scatter of whole-model plans, its table, and pins; candidates of a block: `candidates`."""

from __future__ import annotations

from typing import Any

import streamlit as st

from explorer.address import pins, settings, setups
from explorer.analysis import filters as choosing
from explorer.analysis import rows as table_rows
from explorer.analysis import step_parts
from explorer.components import frame
from explorer.figures import scatter
from explorer.session import current_setup, state
from explorer.text import glossary, recipe, units, words
from explorer.text.notebook import build_notebook
from planner_core.core import Plan
from planner_core.cost.communication import sent_per_gpu
from planner_core.planning import Result, edit
from planner_core.planning.methods import ALL
from planner_core.planning.pricing import Speed, count_model_flops, measure_speed

CHART_OPTIONS = {**frame.CHART, "modeBarButtonsToRemove": ["autoScale2d"], "displayModeBar": True}
AXIS_NAMES = {"communication": "communication", "exposed": "exposed communication", "step": "step time"}
METHOD_NAMES = {
    **{m.name: m.shown for m in ALL.values()},
    edit.NAME: "by hand",
    step_parts.STATED_METHOD: "what is run now",
}

Plans = dict[str, Plan]


def current_filter() -> choosing.PlanFilter:
    """The filter in the address."""
    v = state.values()
    return choosing.PlanFilter(v["fits"] == "only", v["meshes"], v["methods"], v["differs"])


def _many(label: str, key: str, options: list[str], names: Any, placeholder: str, help: str | None = None) -> None:
    what = {"meshes": "mesh", "methods": "method"}.get(key, "weight")
    frame.warn_missing(what, state.value(key), options, "“Show all” takes it out of the filter")
    now = [x for x in state.value(key) if x in options]
    widget = state.widget_key(f"w_{key}", now)
    st.multiselect(
        label,
        options,
        default=now,
        format_func=names,
        key=widget,
        placeholder=placeholder,
        help=help,
        on_change=lambda: state.change(**{key: tuple(st.session_state[widget])}),
    )


def show_filters(plans: Plans, shown: Plans) -> None:
    """The controls: only what fits, meshes, methods, weights placed otherwise than by Megatron-LM."""
    other = sorted(set().union(*choosing.weights_unlike_reference(plans).values()))
    on = current_filter()
    with st.expander(
        f"Filter: {len(shown)} of {len(plans)} plans" if on else "Filter", expanded=bool(on), key=f"filter_{bool(on)}"
    ):
        widget = state.widget_key("w_fits", state.value("fits") == "only")
        st.checkbox(
            "Only what fits the memory",
            value=state.value("fits") == "only",
            key=widget,
            on_change=lambda: state.change(fits="only" if st.session_state[widget] else "all"),
        )
        left, middle, right = st.columns(3)
        with left:
            meshes = {choosing.format_mesh(p): words.mesh_words(p.mesh) for p in plans.values()}
            _many("Mesh", "meshes", list(meshes), lambda m: meshes.get(m, m), "any")
        with middle:
            methods = list(dict.fromkeys(p.method for p in plans.values()))
            _many("Method", "methods", methods, lambda m: METHOD_NAMES.get(m, m), "any")
        with right:
            told = "Plans, and candidates of a block, that place all of these weights otherwise than Megatron-LM"
            named = {w: w.partition(":")[2] for w in other}
            _many("Differs from Megatron-LM in", "differs", other, lambda w: named[w], "any weight", told)
        if not other:
            st.caption("Megatron-LM's plan suits no mesh here, so there is nothing to differ from.")
        if on:
            st.button("Show all", on_click=_clear, key="clear_filters")


def _clear() -> None:
    state.change(fits="all", meshes=(), methods=(), differs=())


# --- whole-model plans ----------------------------------------------------------------------------------


def show_plans_chart(result: Result, plans: Plans, shown: Plans, chosen: str) -> None:
    """Whole-model plans; a click chooses one, a lasso or box marks several here and in the table."""
    widget = state.widget_key("w_axis", state.value("axis"))
    with st.container(horizontal=True, vertical_alignment="center", height=56, border=False, key="chart_head_plans"):
        st.markdown("**Plans for the whole model** by", width="content")
        st.selectbox(
            "Across",
            list(AXIS_NAMES),
            index=list(AXIS_NAMES).index(state.value("axis")),
            format_func=lambda a: AXIS_NAMES[a],
            key=widget,
            width=230,
            on_change=state.take_widget_value,
            args=("axis", widget),
            label_visibility="collapsed",
        )
    limit = step_parts.memory_limit_bytes(result)
    figure = scatter.plans_scatter(
        shown,
        chosen,
        choosing.baseline_ids(plans),
        limit,
        frame.theme(),
        state.value("axis"),
        plans,
        state.value("among"),
    )
    key = f"plans_chart{chart_generation()}"

    def pick() -> None:
        selection = st.session_state[key]["selection"]
        names = [n for n in dict.fromkeys(point_data(p) for p in selection["points"]) if n in plans]
        if selection.get("lasso") or selection.get("box"):
            state.change(among=tuple(names))
        elif names:
            state.change(plan=names[0])

    st.plotly_chart(
        figure,
        key=key,
        theme=None,
        on_select=pick,
        selection_mode=("points", "box", "lasso"),
        config=CHART_OPTIONS,
        alt=f"Plans by {AXIS_NAMES[state.value('axis')]} per step and memory per GPU",
    )


def point_data(point: Any) -> Any:
    """What a figure wrote to a point of its own."""
    data = point.get("customdata")
    return data[0] if isinstance(data, list) else data


def chart_generation() -> int:
    """Part of the charts' keys, so that the browser forgets what was marked in them when the page does."""
    return int(st.session_state.get("marked_generation", 0))


def clear_marks(**changes: Any) -> None:
    """Change settings, and forget what is marked in the charts."""
    st.session_state["marked_generation"] = chart_generation() + 1
    state.change(**changes)


def show_plans_table(result: Result, plans: Plans, shown: Plans, chosen: str) -> None:
    """Every plan a row, its figures before the long words, which a narrow window cuts off; a click chooses."""
    frame.warn_missing("plan", state.value("among"), list(plans), "It is left out of what is marked")
    among = [n for n in state.value("among") if n in shown]
    listed = {n: shown[n] for n in among} if among else shown
    if among:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.caption(f"{len(among)} plans marked in the chart", width="content")
            st.button("Show all plans", on_click=clear_marks, kwargs={"among": ()}, key="unmark_plans", type="tertiary")
    if not listed:
        st.info("No plan passes the filter.")
        return
    tied = choosing.find_ties(plans)
    homes = {n: current_setup.result_of(n, result) for n in listed}
    speeds = {n: measure_speed(p, count_model_flops(homes[n].graph), result.cluster) for n, p in listed.items()}
    unit, size = ("s", 1.0) if any(p.cost.step_time_s >= 1 for p in plans.values()) else ("ms", 1e3)
    rows = [
        {
            "plan": recipe.layout_name(p),
            "what": words.plan_title(p) + (f", {work}" if (work := recipe.describe_extra_work(p)) else ""),
            f"step, {unit}": round_figures(p.cost.step_time_s * size),
            f"communication, {unit}": round_figures(p.cost.comm_time_s * size),
            f"of it exposed, {unit}": round_figures(p.cost.exposed_comm_time_s * size),
            "memory, GiB": round_figures(p.cost.memory_bytes["peak"] / units.GIB),
            "fits": "yes" if p.fits else "no",
            "sent, GB": round_figures(sent_per_gpu(p) / 1e9),
            "minimises": objective_of(p),
            "tokens/s per GPU": round_figures(speeds[n].tokens_per_s_per_gpu),
            "MFU, %": round_figures(100 * speeds[n].mfu),
            **_budget_columns(speeds[n], result),
            "tie": "ties" if n in tied else "",
        }
        for n, p in listed.items()
    ]
    key = f"plans_table_{chosen}_{'-'.join(listed)}"

    def pick() -> None:
        selected = st.session_state[key]["selection"]["rows"]
        if selected:
            state.change(plan=list(listed)[selected[0]])

    st.dataframe(
        rows,
        hide_index=True,
        on_select=pick,
        selection_mode="single-row",
        key=key,
        row_height=34,
        selection_default={"selection": {"rows": [list(listed).index(chosen)] if chosen in listed else []}},
        column_config=_columns(unit),
        alt="The plans as a table",
    )
    _offer_files(result, listed, homes)


def objective_of(plan: Plan) -> str:
    """What the search of a plan made least: the papers' methods do not count seconds of a step."""
    method = ALL.get(plan.method)
    if method is not None and method.by_volume:
        return "bytes"
    return {"time": "step", "communication": "communication"}.get(plan.objective, plan.objective)


def _budget_columns(speed: Speed, result: Result) -> dict[str, float]:
    """Days and money for all tokens, where the address says how many, and what a GPU hour costs."""
    asked = state.training_budget()
    run = asked.to_json(speed, result.cluster.num_gpus) if asked else {}
    return {name: round_figures(amount) for name in ("days", "cost") if (amount := run.get(name)) is not None}


def _offer_files(result: Result, listed: Plans, homes: dict[str, Result]) -> None:
    """The rows as data, and a notebook that makes them. These files are made when there is no session to read any more."""
    with st.container(horizontal=True):
        frame.offer_data("the plans", "plans", lambda: table_rows.plan_rows(listed, homes))
        st.download_button(
            "Notebook",
            lambda: build_notebook(result.request),
            file_name="plans.ipynb",
            mime="application/x-ipynb+json",
            on_click="ignore",
            key="plans_notebook",
            type="tertiary",
            icon=":material/code:",
            help="Makes these plans and both charts from the library",
        )


def _columns(unit: str) -> dict[str, Any]:
    text, number = st.column_config.TextColumn, st.column_config.NumberColumn
    return {
        "plan": text(width=200, help=glossary.PLAN_WORDS),
        "what": text(width=225),
        "fits": text(width=50),
        f"communication, {unit}": number(help="Time of all collectives of a step, hidden or not"),
        "memory, GiB": number(help="The most that one GPU holds at once"),
        "MFU, %": number(
            help="Model FLOPs utilisation: the model’s work, without what is computed again, over the GPUs’ peak"
        ),
        "tie": text(
            width=50,
            help="As fast as the fastest plan that fits, as far as the prediction can tell (by published runs of their kinds)",
        ),
        f"of it exposed, {unit}": number(help=glossary.GLOSSARY["exposed"]),
        "minimises": text(help="TAP counts bytes, TAPS and ATP communication; the exact search the step"),
    }


def round_figures(value: float) -> float:
    """Three significant figures, still a number so that the column sorts."""
    return float(f"{value:.3g}")


# --- pins ------------------------------------------------------------------------------------------------


def show_pins(plans: Plans, chosen: str) -> None:
    """Up to four plans to compare, kept while settings of this model change."""
    held = list(state.value("compare"))
    everything = state.with_pinned(plans)
    mine = chosen if chosen == setups.PLAN_ID else pins.format_pin(chosen, state.values())  # a setup is of no settings
    is_held = mine in held or chosen in held
    with st.container(horizontal=True, vertical_alignment="bottom"):
        if is_held:
            st.button(
                "Unpin this plan",
                icon=":material/keep_off:",
                on_click=_set_pins,
                key="pin",
                args=([p for p in held if p not in (mine, chosen)],),
            )
        else:
            st.button(
                "Pin this plan",
                icon=":material/keep:",
                on_click=_set_pins,
                args=([*held, mine],),
                key="pin",
                disabled=len(held) >= settings.MAX_COMPARED,
                help=f"Keep it beside others on Compare, up to {settings.MAX_COMPARED}, also when you change the settings",
            )
        for k, text in enumerate(held):
            if text in everything:
                label = frame.escape(words.plan_title(everything[text]))
                st.button(
                    f"{label} ✕",
                    key=f"unpin_{k}",
                    type="tertiary",
                    help="Unpin",
                    on_click=_set_pins,
                    args=([p for p in held if p != text],),
                )
        if len(held) > 1:
            st.page_link("explorer/pages/compare.py", label="Compare them", icon=":material/compare_arrows:")


def _set_pins(held: list[str]) -> None:
    state.change(compare=tuple(held))
