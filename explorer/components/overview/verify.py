"""What verification finds of a plan, depth by depth, when it is asked for."""

from __future__ import annotations

from typing import Any, NamedTuple

import streamlit as st

from explorer.components import frame
from explorer.jobs import export as exporting
from explorer.session import state
from explorer.text import units
from explorer.text.option_words import word_terms
from planner_core.core import Graph, Plan, PlannerError
from planner_core.planning import Request
from planner_core.verification import check_rules


class Depth(NamedTuple):
    """One depth of verification; `options` are those of the command line, none for what runs at once."""

    key: str
    title: str
    options: tuple[str, ...]
    method: str


DEPTHS = (
    Depth(
        "rules",
        "Keeps the rules",
        (),
        "names, ties, even splits, and that every op runs in one of its ways; at once, without a run",
    ),
    Depth(
        "numbers",
        "Same numbers as one GPU",
        ("--ranks", "4"),
        "loss, every gradient and a step of AdamW, a small model of the same architecture on 4 real processes",
    ),
    Depth(
        "traffic",
        "Same traffic and memory as predicted",
        ("--fake",),
        "the whole model on a fake process group of the plan’s own size",
    ),
)


def stored_outcomes(plan_id: str) -> dict[str, dict[str, Any]]:
    """Return what verification found of this plan in this session, by depth."""
    outcomes: dict[tuple[Request, str], dict[str, dict[str, Any]]] = st.session_state.setdefault("verified", {})
    key = f"{plan_id} {state.edit_of(plan_id)} {state.value('setup')}"
    return outcomes.setdefault((state.current_request(), key), {})


def show_verification(plan: Plan, plan_id: str, graph: Graph) -> None:
    """Draw the verification state of this plan, with the buttons that run it."""
    outcomes = stored_outcomes(plan_id)
    for depth in DEPTHS:
        left, right = st.columns([5, 1], vertical_alignment="center")
        left.markdown(f"{depth.title}: {_describe_outcome(outcomes.get(depth.key))}  \n:gray[{depth.method}]")
        help = "Runs in a process of its own; Stop at the top right ends it" if depth.options else "Takes a moment"
        if right.button("Run", key=f"verify_{depth.key}", help=help):
            outcomes[depth.key] = _run(plan, depth.options) if depth.options else _check_rules(plan, graph)
            st.rerun()


def _check_rules(plan: Plan, graph: Graph) -> dict[str, Any]:
    findings = check_rules(plan, graph)
    return {"ok": not findings, "findings": findings}


def _run(plan: Plan, options: tuple[str, ...]) -> dict[str, Any]:
    place = st.empty()

    def tick(seconds: float) -> None:
        place.caption(f"running, {seconds:.0f} s")

    try:
        return exporting.run_verification(plan, *options, tick=tick)
    except PlannerError as error:
        return {"ok": False, "problem": word_terms(error.sentence)}


def _describe_outcome(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return "not run yet"
    if "problem" in outcome:
        return f"could not run: {frame.escape(str(outcome['problem']))}"
    if "findings" in outcome:
        findings = outcome["findings"]
        more = f" and {len(findings) - 1} more" if len(findings) > 1 else ""
        return f"**broken**: {frame.escape(findings[0])}{more}" if findings else "**confirmed**"
    parts = ["**confirmed**" if outcome.get("ok") else "**differs**"]
    if outcome.get("loss"):
        parts.append(f"loss differs by {outcome['loss']['abs_error']:.2g}")
    if outcome.get("grad"):
        parts.append(f"largest relative gradient error {outcome['grad']['max_rel_error']:.2g}")
    if outcome.get("memory_bytes"):
        error = abs(outcome["memory_bytes"]["rel_error"])
        parts.append("the same collectives and bytes")
        parts.append("the same memory" if error < 0.0005 else f"memory off by {units.percent(error)}")
    return ", ".join(parts)
