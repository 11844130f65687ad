"""Every candidate of a unique block: the scatter, and a list of its front."""

from __future__ import annotations

import html
import math
from typing import Any

import streamlit as st

from explorer.analysis import candidate_marks as marks
from explorer.analysis import rows as table_rows
from explorer.analysis import step_parts
from explorer.analysis.candidate_marks import PLACEMENTS
from explorer.components import frame
from explorer.figures import scatter
from explorer.session import shared_plans, state
from explorer.text import units
from planner_core.core import Plan
from planner_core.planning import Result
from planner_core.search.candidates import Candidates


def show_candidates(result: Result, plan: Plan) -> None:
    """Draw every assignment of one unique block."""
    block = current_block(result)
    if block is None:
        st.caption(
            "No block of this model repeats, so there is no block to enumerate; the search covers the whole graph."
        )
        return
    names = [c.block for c in result.candidates]
    frame.warn_missing(
        "block", [b for b in (state.value("block"),) if b], names, f"Showing {frame.escape(block.block)}"
    )
    _show_head(result, block, names)
    limit = step_parts.memory_limit_bytes(result)
    if not _may_fit(block, limit):
        return
    index = current_candidate(block)
    if index is None and state.value("candidate") is not None:
        st.warning(
            f"There is no candidate {state.value('candidate')} of this block, which has {units.whole(block.space)}; none is chosen."
        )
    key = f"candidates_{block.block}_{chart_generation()}"

    def choose() -> None:
        points = st.session_state[key]["selection"]["points"]
        if points:
            state.change(candidate=int(frame.point_data(points[0])), block=block.block)

    figure = scatter.candidates_scatter(
        block,
        index,
        limit,
        frame.theme(),
        same=marks.candidate_of_plan(block, plan),
    )
    frame.show_chart(
        figure,
        key,
        f"All candidates of {block.block} by communication and memory",
        on_select=choose,
        selection_mode="points",
    )
    choose_from_front(block, index)
    frame.offer_data(
        f"every candidate of {block.block}", f"candidates-{block.block}", lambda: table_rows.candidate_rows(block)
    )
    describe_candidate(block, index)


def _may_fit(block: Candidates, limit: int) -> bool:
    """Tell whether a candidate fits; say so where none does: of points that all lie above the line of memory none could be run."""
    least = float(block.model_memory_bytes.min(initial=math.inf))
    if least > limit:
        st.info(
            f"No candidate fits: each keeps every weight where it is used, and the least takes {units.memory(least)} where a plan may take "
            f"{units.memory(limit)}."
        )
    return least <= limit


def _show_head(result: Result, block: Candidates, names: list[str]) -> None:
    """Draw the chart's title with the list of blocks."""
    titles = shared_plans.model_drawing(result.request).titles
    with st.container(horizontal=True, vertical_alignment="center", height=56, border=False, key="chart_head_block"):
        title = "" if len(names) > 1 else titles.get(block.block, block.block)
        points = (
            f"Each point puts every one of {len(block.weights)} weight matrices whole (R), split along dim 0, S(0), or along dim 1, S(1), "
            f"over {block.axis_size} GPUs, in all {block.repeats} copies; the other GPUs split the batch, weights are kept, and the rest "
            "of the model is chosen best. Choose one for its placements."
        )
        st.markdown(f"**Every candidate of** {frame.escape(title)}", width="content", help=points)
        if len(names) > 1:
            widget = state.widget_key("w_block", block.block)
            st.selectbox(
                "Block",
                names,
                index=names.index(block.block),
                key=widget,
                format_func=lambda n: titles.get(n, n),
                width=150,
                on_change=lambda: clear_marks(block=st.session_state[widget], candidate=None),
                label_visibility="collapsed",
            )


def current_block(result: Result) -> Candidates | None:
    """Return the block in the address, else the first."""
    blocks = {c.block: c for c in result.candidates}
    return blocks.get(state.value("block")) or next(iter(blocks.values()), None)


def current_candidate(block: Candidates) -> int | None:
    """Return the candidate in the address, if the block has it."""
    index = state.value("candidate")
    return index if index is not None and index < block.space else None


def choose_from_front(block: Candidates, index: int | None) -> None:
    """Draw the candidates of the front as a list, for those who use no mouse."""
    front = sorted(block.on_front.nonzero()[0].tolist(), key=lambda i: float(block.model_comm_s[i]))
    options = [*front, *([index] if index is not None and index not in front else [])]
    if not options:
        return
    # A key for each choice: the browser, a moment late, would send the choice before as if it had just been made.
    widget = f"w_candidate:{block.block}:{index}"
    st.selectbox(
        "Candidate",
        options,
        index=options.index(index) if index is not None else None,
        key=widget,
        label_visibility="collapsed",
        placeholder="Click a point, or choose one of the front here",
        format_func=lambda i: _candidate_name(block, i) + ("" if i in front else ", off the front"),
        on_change=lambda: state.change(candidate=st.session_state[widget], block=block.block),
    )


def _candidate_name(block: Candidates, i: int) -> str:
    if not math.isfinite(float(block.comm_s[i])):
        return f"candidate {i}, which cannot run"
    return f"{units.seconds(float(block.model_comm_s[i]))}, {units.memory(float(block.model_memory_bytes[i]))}"


def describe_candidate(block: Candidates, index: int | None) -> None:
    """Describe the clicked candidate."""
    if index is None:
        return
    chips = (
        f"{html.escape(marks.short_weight_name(w))} {frame.chip(PLACEMENTS[int(c)])}"
        for w, c in zip(block.weights, block.choice[index], strict=True)
    )
    st.html(" ".join(chips))
    st.caption(_describe_cost(block, index))
    st.button(
        "Let go of this candidate", on_click=clear_marks, kwargs={"candidate": None}, key="unpick", type="tertiary"
    )


def _describe_cost(block: Candidates, index: int) -> str:
    if not math.isfinite(float(block.comm_s[index])):
        return f"It would split unevenly over {block.axis_size} GPUs, so it cannot run and has no cost."
    equal = len(marks.find_equal_cost(block, index))
    return (
        f"{units.seconds(float(block.model_comm_s[index]))} of communication = {block.repeats} × "
        f"{units.seconds(float(block.comm_s[index]))} in the copies + {units.seconds(block.rest_comm_s)} in the rest; "
        f"{units.memory(float(block.model_memory_bytes[index]))} = {block.repeats} × "
        f"{units.memory(float(block.memory_bytes[index]))} + {units.memory(block.rest_memory_bytes)}, at the end of forward."
        + (f" {units.whole(equal)} candidates cost the same." if equal > 1 else "")
    )


def describe_dropped(result: Result) -> None:
    """Say how many candidates there were, and why most are not shown as choices."""
    space = sum(c.space for c in result.candidates)
    reasons = {
        "uneven": "would split unevenly",
        "memory": "take too much memory",
        "dominated": "are beaten in both",
    }
    why = [f"{units.whole(result.dropped[k])} {text}" for k, text in reasons.items() if result.dropped.get(k)]
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
    """Tell whether a plan gathers weights of repeated blocks at use, which no candidate does."""
    return any(p.gathered for label, block in plan.blocks.items() if label for p in block.params.values())


def chart_generation() -> int:
    """Count how often marks were cleared: a chart under a new key shows none of those that the browser remembers."""
    return int(st.session_state.get("marked_generation", 0))


def clear_marks(**changes: Any) -> None:
    """Change settings, and forget what is marked in the chart."""
    st.session_state["marked_generation"] = chart_generation() + 1
    state.change(**changes)
