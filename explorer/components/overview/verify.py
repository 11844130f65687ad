"""What verification finds of a plan, depth by depth, when it is asked for."""

from __future__ import annotations

from typing import Any

import streamlit as st

from explorer.components import frame
from explorer.jobs import export as exporting
from explorer.session import state
from explorer.text import units
from planner_core.core import Graph, Plan, PlannerError
from planner_core.planning import Request
from planner_core.verification import check_rules

# the depths of verification: key, title, options on the command line, and how
DEPTHS = (
    (
        "rules",
        "Keeps the rules",
        (),
        "names, ties, even splits, and that every op runs in one of its ways; at once, without a run",
    ),
    (
        "numbers",
        "Same numbers as one GPU",
        ("--ranks", "4"),
        "loss, every gradient and a step of AdamW, a small model of the same architecture on 4 real processes",
    ),
    (
        "traffic",
        "Same traffic and memory as predicted",
        ("--fake",),
        "the whole model on a fake process group of the plan’s own size",
    ),
)


def stored_outcomes(name: str) -> dict[str, dict[str, Any]]:
    """What verification found about this plan in this session, by depth."""
    found: dict[tuple[Request, str], dict[str, dict[str, Any]]] = st.session_state.setdefault("verified", {})
    return found.setdefault((state.current_request(), f"{name} {state.edit_of(name)} {state.value('setup')}"), {})


def show_verification(plan: Plan, name: str, graph: Graph) -> None:
    """The verification state of this plan, with the buttons that run it."""
    found = stored_outcomes(name)
    for key, title, options, how in DEPTHS:
        left, right = st.columns([5, 1], vertical_alignment="center")
        left.markdown(f"{title}: {_describe_outcome(found.get(key))}  \n:gray[{how}]")
        stop = "Takes a moment" if key == "rules" else "Runs in a process of its own; Stop at the top right ends it"
        if right.button("Run", key=f"verify_{key}", help=stop):
            found[key] = _run(plan, list(options)) if options else _check_rules(plan, graph)
            st.rerun()


def _check_rules(plan: Plan, graph: Graph) -> dict[str, Any]:
    findings = check_rules(plan, graph)
    return {"ok": not findings, "findings": findings}


def _run(plan: Plan, options: list[str]) -> dict[str, Any]:
    place = st.empty()

    def tick(waited: float) -> None:
        place.caption(f"running, {waited:.0f} s")

    try:
        return exporting.run_verification(plan, *options, tick=tick)
    except PlannerError as error:
        return {"ok": False, "problem": str(error)}


def _describe_outcome(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return "not run yet"
    if "problem" in outcome:
        return f"could not run: {frame.escape(str(outcome['problem']))}"
    if "findings" in outcome:
        told = outcome["findings"]
        more = f" and {len(told) - 1} more" if len(told) > 1 else ""
        return f"**broken**: {frame.escape(told[0])}{more}" if told else "**confirmed**"
    parts = ["**confirmed**" if outcome.get("ok") else "**differs**"]
    if outcome.get("loss"):
        parts.append(f"loss differs by {outcome['loss']['abs_error']:.2g}")
    if outcome.get("grad"):
        parts.append(f"largest relative gradient error {outcome['grad']['max_rel_error']:.2g}")
    if outcome.get("memory_bytes"):
        off = abs(outcome["memory_bytes"]["rel_error"])
        parts.append("the same collectives and bytes")
        parts.append("the same memory" if off < 0.0005 else f"memory off by {units.percent(off)}")
    return ", ".join(parts)
