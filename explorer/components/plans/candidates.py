"""Every candidate of a unique block: the scatter, a list of its front, and the table of what is marked."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import streamlit as st

from explorer.analysis import filters as choosing
from explorer.analysis import rows, step_parts
from explorer.analysis.filters import PLACEMENTS
from explorer.components import frame
from explorer.components.plans.choice import (
    CHART_OPTIONS,
    chart_generation,
    clear_marks,
    current_filter,
    point_data,
    round_figures,
)
from explorer.figures import scatter
from explorer.session import state
from explorer.text import units
from planner_core.core import Plan
from planner_core.planning import Result
from planner_core.search.candidates import Candidates

ROWS_SHOWN = 500
"""Rows of the table of what is marked."""


def show_candidates(result: Result, plan: Plan, reference: Plan | None) -> None:
    """Every assignment of one unique block."""
    one = current_block(result)
    if one is None:
        st.caption(
            "No block of this model repeats, so there is no block to enumerate; the search covers the whole graph."
        )
        return
    names = [c.block for c in result.candidates]
    frame.warn_missing("block", [b for b in (state.value("block"),) if b], names, f"Showing {frame.escape(one.block)}")
    by = _show_head(result, one, names)
    keep = current_filter().candidates(one, limit := step_parts.memory_limit_bytes(result), reference)
    index = current_candidate(one)
    if index is None and state.value("candidate") is not None:
        st.warning(
            f"There is no candidate {state.value('candidate')} of this block, which has {units.whole(one.space)}; none is chosen."
        )
    key = f"candidates_{one.block}_{chart_generation()}"

    def pick() -> None:
        selection = st.session_state[key]["selection"]
        region = choosing.selected_region(selection)
        if region:
            state.change(lasso=region, block=one.block)
        elif selection["points"]:
            state.change(candidate=int(point_data(selection["points"][0])), block=one.block)

    st.plotly_chart(
        scatter.candidates_scatter(
            one,
            index,
            limit,
            frame.theme(),
            keep=keep,
            region=state.value("lasso"),
            same=choosing.candidate_of_plan(one, plan),
            by=by,
        ),
        key=key,
        theme=None,
        on_select=pick,
        selection_mode=("points", "box", "lasso"),
        config=CHART_OPTIONS,
        alt=f"All candidates of {one.block} by communication and memory",
    )
    choose_from_front(one, keep, index)
    frame.offer_data(f"every candidate of {one.block}", f"candidates-{one.block}", lambda: rows.candidate_rows(one))
    describe_candidate(one, index, index is None or bool(keep[index]))
    show_candidate_table(one, keep, index, limit)


def _show_head(result: Result, one: Candidates, names: list[str]) -> str:
    """What the chart shows, with the list of blocks; returns the weight that colours it, or nothing."""
    titles = state.model_drawing(result.request).titles
    with st.container(horizontal=True, vertical_alignment="center", height=56, border=False, key="chart_head_block"):
        st.markdown(
            "**Every candidate of** " + frame.escape("" if len(names) > 1 else titles.get(one.block, one.block)),
            width="content",
        )
        if len(names) > 1:
            widget = state.widget_key("w_block", one.block)
            st.selectbox(
                "Block",
                names,
                index=names.index(one.block),
                key=widget,
                format_func=lambda n: titles.get(n, n),
                width=150,
                on_change=lambda: clear_marks(block=st.session_state[widget], candidate=None, lasso=()),
                label_visibility="collapsed",
            )
        return choose_colour(one)


def choose_colour(found: Candidates) -> str:
    """The control that colours candidates by one weight; returns the weight or nothing."""
    return (
        st.selectbox(
            "Coloured by",
            list(found.weights),
            key=f"coloured_{found.block}",
            index=None,
            format_func=choosing.short_weight_name,
            width=190,
            label_visibility="collapsed",
            placeholder="coloured by a weight",
            help="How each candidate places it",
        )
        or ""
    )


def describe_common(found: Candidates, marked: Sequence[int]) -> str:
    """The placements that all marked candidates have in common: `all place q_proj R, up_proj S(1)`."""
    alike = [
        f"{choosing.short_weight_name(w)} {ways[0]}"
        for w, ways in choosing.placements_by_weight(found, marked).items()
        if len(ways) == 1
    ]
    return f"All place {', '.join(alike)}." if alike else "They place no weight all alike."


def current_block(result: Result) -> Candidates | None:
    """The block in the address, else the first."""
    found = {c.block: c for c in result.candidates}
    return found.get(state.value("block")) or next(iter(found.values()), None)


def current_candidate(found: Candidates) -> int | None:
    """The candidate in the address."""
    index = state.value("candidate")
    return index if index is not None and index < found.space else None


def choose_from_front(found: Candidates, keep: choosing.BoolArray, index: int | None) -> None:
    """The candidates of the front in a list, for those who use no mouse."""
    front = sorted((found.on_front & keep).nonzero()[0].tolist(), key=lambda i: float(found.model_comm_s[i]))
    options = [*front, *([index] if index is not None and index not in front else [])]
    if not options:
        return
    widget = f"w_candidate:{found.block}:{index}"  # of each choice its own, as in `frame.follower`
    st.selectbox(
        "Candidate",
        options,
        index=options.index(index) if index is not None else None,
        key=widget,
        label_visibility="collapsed",
        placeholder="Click a point, or choose one of the front here",
        format_func=lambda i: _front_name(found, i) + ("" if i in front else ", off the front"),
        on_change=lambda: state.change(candidate=st.session_state[widget], block=found.block),
    )


def _front_name(found: Candidates, i: int) -> str:
    if not math.isfinite(float(found.comm_s[i])):
        return f"candidate {i}, which cannot run"
    return f"{units.seconds(float(found.model_comm_s[i]))}, {units.memory(float(found.model_memory_bytes[i]))}"


def describe_candidate(found: Candidates, index: int | None, shown: bool) -> None:
    """Which point was clicked, and whether the filter leaves it `shown`; or what the points are."""
    if index is None:
        st.caption(
            f"Each point puts every one of {len(found.weights)} weight matrices whole (R), split by rows S(0) or "
            "by columns S(1) over "
            f"{found.axis_size} GPUs, in all {found.repeats} copies; the other GPUs split the batch, weights are kept, "
            "and the rest of the model is chosen best. Choose one for its placements, or mark several with the lasso."
        )
        return
    chips = zip(found.weights, found.choice[index], strict=True)
    st.html(
        " ".join(f"{html.escape(choosing.short_weight_name(w))} {frame.chip(PLACEMENTS[int(c)])}" for w, c in chips)
    )
    st.caption(_cost_words(found, index, shown))
    st.button(
        "Let go of this candidate", on_click=clear_marks, kwargs={"candidate": None}, key="unpick", type="tertiary"
    )


def _cost_words(found: Candidates, index: int, shown: bool) -> str:
    if not math.isfinite(float(found.comm_s[index])):
        return f"It would split unevenly over {found.axis_size} GPUs, so it cannot run and has no cost."
    alike = len(choosing.find_equal_cost(found, index))
    return (
        f"{units.seconds(float(found.model_comm_s[index]))} of communication = {found.repeats} × "
        f"{units.seconds(float(found.comm_s[index]))} in the copies + {units.seconds(found.rest_comm_s)} in the rest; "
        f"{units.memory(float(found.model_memory_bytes[index]))} = {found.repeats} × "
        f"{units.memory(float(found.memory_bytes[index]))} + {units.memory(found.rest_memory_bytes)}, at the end of forward."
        + (f" {units.whole(alike)} candidates cost the same." if alike > 1 else "")
        + ("" if shown else " The filter leaves it out of the chart.")
    )


def show_candidate_table(found: Candidates, keep: choosing.BoolArray, index: int | None, capacity: int) -> None:
    """What the lasso marked, or what costs the same as the chosen candidate; a row chooses."""
    region = state.value("lasso")
    if region:
        rows = choosing.find_marked(found, keep, region)
    elif index is not None and math.isfinite(float(found.comm_s[index])):
        rows = choosing.find_equal_cost(found, index)
    else:
        return
    if len(rows) < 2 and not region:
        return
    rows = rows[found.model_comm_s[rows].argsort(kind="stable")]
    with st.container(horizontal=True, vertical_alignment="center"):
        more = f", the first {ROWS_SHOWN} listed" if len(rows) > ROWS_SHOWN else ""
        what = "marked" if region else "of equal cost"
        st.caption(f"{units.whole(len(rows))} candidate{'s' * (len(rows) != 1)} {what}{more}", width="content")
        if region and len(rows):
            st.caption(frame.escape(describe_common(found, rows.tolist())), width="content")
        if region:
            st.button("Clear the mark", on_click=clear_marks, kwargs={"lasso": ()}, key="unmark", type="tertiary")
    rows = rows[:ROWS_SHOWN]
    if not len(rows):
        return
    table = {
        "communication, ms": [round_figures(float(v) * 1e3) for v in found.model_comm_s[rows]],
        "memory, GiB": [round_figures(float(v) / units.GIB) for v in found.model_memory_bytes[rows]],
        "fits": ["yes" if v <= capacity else "no" for v in found.model_memory_bytes[rows]],
        **{
            choosing.short_weight_name(w): [PLACEMENTS[int(c)] for c in found.choice[rows, k]]
            for k, w in enumerate(found.weights)
        },
    }
    key = f"candidate_rows_{found.block}_{hash(region)}_{'' if region else index}"

    def pick() -> None:
        selected = st.session_state[key]["selection"]["rows"]
        if selected:
            state.change(candidate=int(rows[selected[0]]), block=found.block)

    st.dataframe(
        table,
        hide_index=True,
        on_select=pick,
        selection_mode="single-row",
        key=key,
        height=min(220, 38 + 35 * len(rows)),
        alt="The marked candidates: costs and the placement of every weight",
    )


def describe_dropped(result: Result) -> None:
    """How many candidates there were, and why most are not shown as choices."""
    space = sum(c.space for c in result.candidates)
    d = result.dropped
    why = [
        f"{units.whole(d[k])} {text}"
        for k, text in (
            ("uneven", "would split unevenly"),
            ("memory", "take too much memory"),
            ("dominated", "are beaten in both"),
        )
        if d.get(k)
    ]
    if space:
        st.caption(
            f"{units.whole(space)} candidates, which keep every weight where it is used; of them "
            f"{', '.join(why) or 'none were dropped'}."
            + (
                " The chosen plan gathers weights at use, so it is not one of them."
                if gathers_weights(result.best)
                else ""
            )
        )


def gathers_weights(plan: Plan) -> bool:
    """Whether a plan gathers weights of repeated blocks at use, which no candidate does."""
    return any(p.gathered for label, block in plan.blocks.items() if label for p in block.params.values())
