"""Plans page: which weights the chosen plan places otherwise than another plan, as a list and marked in a graph."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import streamlit as st

from explorer import components
from explorer.analysis.filters import LETTERS, REFERENCE
from explorer.components import frame, graphs
from explorer.components.plans import candidates, linked
from explorer.graph import diff as graph_diff
from explorer.graph import weight_table as weight_rows
from explorer.session import state
from explorer.text import words
from planner_core.core import Plan
from planner_core.planning import Result

SHOWN = 8
"""Weights of one placement that are named below the scatter; the graph marks all."""
GRAPH_HEIGHT = 720


def other(plans: Mapping[str, Plan], chosen: str) -> str:
    """The plan that the chosen one is held against: the best; for the best itself Megatron-LM's, else the next in the list."""
    rest = [n for n in plans if n != chosen]
    best = next(iter(plans))
    return best if chosen != best else next((n for n in rest if plans[n].method == REFERENCE), rest[0] if rest else "")


def found(result: Result, plans: Mapping[str, Plan], chosen: str) -> tuple[graph_diff.Difference, ...]:
    """The nodes that lie otherwise in the two plans."""
    there = other(plans, chosen)
    return graph_diff.of_plans(state.drawing(result.request), plans[chosen], plans[there]).differences if there else ()


def line(result: Result, plans: Mapping[str, Plan], chosen: str, nodes: Sequence[graph_diff.Difference]) -> None:
    """Which weights change and how they then lie (`nodes` as `found` says), below the scatter in which the plan was chosen."""
    there = other(plans, chosen)
    if not there:
        return
    drawing = state.drawing(result.request)
    mine, theirs = (f"<b>{html.escape(words.title(plans[n]))}</b>" for n in (chosen, there))
    lie: dict[str, list[str]] = {}
    for d in nodes:
        kind, _, how = d.here.partition(" ")
        node = drawing.node(d.left)
        if kind == "weight" and node:
            lie.setdefault(how, []).append(node.name)
    rest = len(nodes) - sum(map(len, lie.values()))
    told = [f"{html.escape(how)}: {html.escape(_some(names))}" for how, names in lie.items()]
    told += [f"{rest} result{'s' * (rest > 1)} otherwise"] if rest else []
    what = f"{'; '.join(told)}." if told else "every node lies alike."
    if told and not marks_of(result, plans, chosen, ()).told:
        what += " The graph beside the weights below marks them ≠."
    st.html(f"<p class='told'>{mine} against {theirs}: {what}</p>")


def _some(names: list[str]) -> str:
    shown = list(dict.fromkeys(names))
    return ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")


def weights(result: Result, plans: Mapping[str, Plan], chosen: str, nodes: Sequence[graph_diff.Difference]) -> None:
    """Placement of every weight, by name pattern, beside the graph: what the pointer is on in one is marked in the other, a
    name opens its node on Fold."""
    drawing = state.drawing(result.request)
    one = candidates.chosen_block(result)
    index = candidates.picked(one) if one else None
    picked = (
        {w: LETTERS[int(c)] for w, c in zip(one.weights, one.choice[index], strict=True)}
        if one and index is not None
        else {}
    )
    marked = {(one.block, w): letter for w, letter in picked.items()} if one else {}

    def open_node() -> None:
        node = str(st.session_state["weights"].get("open") or "")
        run = weight_rows.run_of(drawing, node)
        shown = tuple(dict.fromkeys([*(state.value("open") or ()), run])) if run else state.value("open")
        if node:
            state.change(node=node, open=shown)
            st.session_state["to_fold"] = True

    table = weight_rows.table(plans[chosen], result.coarse, drawing, state.value("node"), marked)
    with st.container(key="wide_weights"):
        left, right = st.columns([3, 2], gap="medium")
    with left:
        components.weights(table, key="weights", on_open=open_node)
    with right:
        found = marks_of(result, plans, chosen, nodes)
        if found.told:
            st.caption(frame.text(found.told))
        _graph(result, chosen, plans[chosen], found)


def marks_of(
    result: Result, plans: Mapping[str, Plan], chosen: str, nodes: Sequence[graph_diff.Difference]
) -> linked.LinkedMarks:
    """What the graph marks: against marked candidates, else against marked plans, else against one other plan (`nodes`)."""
    if held := candidates.marked(result):
        return linked.of_candidates(result, plans[chosen], *held)
    among = [n for n in state.value("among") if n in plans]
    if any(n != chosen for n in among):
        return linked.of_plans(result, plans, chosen, among)
    marks = {d.left: d.there for d in nodes}
    return linked.LinkedMarks(marks, words.title(plans[other(plans, chosen)]) if marks else "")


def _graph(result: Result, chosen: str, plan: Plan, marks: linked.LinkedMarks) -> None:
    """The graph with the plan's placements, and marks on the nodes that lie otherwise somewhere else."""

    def viewed() -> None:
        view = st.session_state["plans_graph"].get("view") or {}
        state.change(node=str(view.get("selected") or ""))

    components.graph(
        {
            **graphs.canvas(result, chosen, plan, state.edit_of(chosen), state.value("way")),
            "selected": state.value("node"), "asked": state.asked(), "show": "placement",
            "open": graphs.default_open(state.drawing(result.request)),
            "marks": dict(marks.nodes), "other": marks.otherwise,
        },
        key="plans_graph", on_view=viewed, height=GRAPH_HEIGHT,
    )  # fmt: skip
