"""Plans page: what is marked in one drawing is marked in the others. A weight, candidates of a block, plans, nodes of the graph.

Each mark is a setting of the address: `node` (a click in the graph, or the list of weights here), `candidate` and `lasso` (the chart
of candidates), `plan` and `among` (the chart of plans).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import streamlit as st

from explorer.analysis import filters as choosing
from explorer.analysis.filters import LETTERS
from explorer.graph import diff as graph_diff
from explorer.graph import weight_table
from explorer.session import state
from explorer.text import words
from planner_core.core import Plan
from planner_core.planning import Result
from planner_core.search.candidates import Candidates


@dataclass(frozen=True, slots=True)
class LinkedMarks:
    """Nodes of the graph that lie otherwise than in the chosen plan, each with how; and what they lie so in."""

    nodes: Mapping[str, str]
    otherwise: str
    told: str = ""
    """Says in a sentence what the graph marks; empty where the page says it elsewhere."""


def coloured(result: Result, found: Candidates) -> str:
    """The control that colours candidates by one weight, the one selected in the graph; returns the weight or nothing."""
    homes = weight_table.by_weight(state.drawing(result.request))
    nodes = {w: homes[found.block, w] for w in found.weights if (found.block, w) in homes}
    current = next((w for w, node in nodes.items() if node == state.value("node")), None)
    widget = state.seed("w_coloured", current)
    st.selectbox(
        "Coloured by", list(nodes), key=widget, index=None, format_func=choosing.short, width=190, label_visibility="collapsed",
        placeholder="coloured by a weight", help="How each candidate places it; a click in the graph below chooses it too",
        on_change=lambda: state.change(node=nodes.get(st.session_state[widget] or "", "")),
    )  # fmt: skip
    return current or ""


def common(found: Candidates, marked: Sequence[int]) -> str:
    """The placements that all marked candidates have in common: `all place q_proj R, up_proj S(1)`."""
    alike = [f"{choosing.short(w)} {ways[0]}" for w, ways in choosing.given(found, marked).items() if len(ways) == 1]
    return f"All place {', '.join(alike)}." if alike else "They place no weight all alike."


def of_candidates(result: Result, plan: Plan, found: Candidates, marked: Sequence[int]) -> LinkedMarks:
    """Weights that marked candidates do not all place as the plan does."""
    theirs = choosing.letters(found, plan)
    homes = weight_table.by_weight(state.drawing(result.request))
    nodes = {
        homes[found.block, w]: f"weight {' or '.join(ways)}"
        for w, ways in choosing.given(found, marked).items()
        if (found.block, w) in homes and ways != (LETTERS[theirs.get(w, 0)],)
    }
    count = len(marked)
    if count == 1:
        return LinkedMarks(nodes, "the chosen candidate")
    return LinkedMarks(
        nodes, f"the {count} marked candidates", f"≠ in the graph: {count} marked candidates place it otherwise."
    )


def of_plans(result: Result, plans: Mapping[str, Plan], chosen: str, marked: Sequence[str]) -> LinkedMarks:
    """Nodes that do not lie in all marked plans as they do in the chosen one."""
    drawing, ways = state.drawing(result.request), dict[str, list[str]]()
    others = [n for n in marked if n != chosen]
    for name in others:
        for d in graph_diff.of_plans(drawing, plans[chosen], plans[name]).differences:
            ways.setdefault(d.left, []).append(d.there)
    nodes = {node: " or ".join(dict.fromkeys(lies)) for node, lies in ways.items()}
    titles = words.join([words.title(plans[n]) for n in others])
    return LinkedMarks(nodes, titles, f"≠ in the graph: {titles} place it otherwise than {words.title(plans[chosen])}.")
