"""Every method and usual layout in one table, each with its own search; made when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from explorer.address import settings
from explorer.analysis import rows
from explorer.components import frame
from explorer.components.plans.choice import figure
from explorer.session import state
from explorer.text import units, words
from planner_core.core import PlannerError
from planner_core.planning import METHODS, Request, Result
from planner_core.planning.analysis import space_sizes

GOALS = {"time": "step time", "communication": "time of communication", "volume": "bytes sent"}


def panel(result: Result) -> None:
    """A button, then the table and its data."""
    asked = {m: settings.request({**state.values(), "method": m, "objective": "time", "tool": ""}) for m in METHODS}
    with st.expander(
        "Every method side by side: exact, TAP, TAPS, ATP, Alpa-like and the usual layouts", key="methods"
    ):
        if st.session_state.get("methods_wanted") != asked["exact"]:
            st.caption(
                "Each method searches its own space for what it minimises. A few seconds for each; what has been found is kept."
            )
            st.button(
                "Plan by every method", key="plan_methods", on_click=lambda: st.session_state.update(methods_wanted=asked["exact"])
            )  # fmt: skip
            return
        found: dict[str, Result | str] = {}
        with st.spinner("Planning by every method", show_time=True):
            for name, request in asked.items():
                try:
                    found[name] = state.plan(request)
                except PlannerError as error:
                    found[name] = state.in_words(str(error))
            sizes = {m: n for m, result in reversed(found.items()) for m, n in _sizes(asked[m], result).items()}
        _show(rows.compared(found, sizes), found)


def _sizes(asked: Request, result: Result | str) -> Mapping[str, float]:
    """The sizes of the spaces of a result's plans, kept for this visit."""
    known: dict[Request, Mapping[str, float]] = st.session_state.setdefault("space_sizes", {})
    if asked not in known and isinstance(result, Result):
        known[asked] = space_sizes(result)
    return known.get(asked, {})


def _show(made: list[rows.Compared], found: dict[str, Result | str]) -> None:
    exact = made[0].plan
    unit, size = ("s", 1.0) if any(c.plan and c.plan.cost.step_time_s >= 1 for c in made) else ("ms", 1e3)
    table = [
        {
            "method": c.method.shown,
            "minimises": GOALS[c.minimises],
            f"step, {unit}": figure(c.plan.cost.step_time_s * size) if c.plan else None,
            "above exact, %": None if (more := c.above(exact)) is None else figure(100 * more),
            f"communication, {unit}": figure(c.plan.cost.comm_time_s * size) if c.plan else None,
            "memory, GiB": figure(c.plan.cost.memory_bytes["peak"] / units.GIB) if c.plan else None,
            "fits": ("yes" if c.plan.fits else "no") if c.plan else c.why,
            "search": units.seconds(c.search_s) if c.search_s is not None else "together" if c.plan else "",
            "plans": "" if c.size is None else f"10^{c.size:.0f}",
            "proof": c.proof,
            "mesh": words.mesh_words(c.plan.mesh) if c.plan else "",
            "space": c.method.words,
        }
        for c in made
    ]
    st.dataframe(
        table, hide_index=True, key="methods_table", row_height=34, column_config=_columns(),
        alt="Every method's best plan as a table",
    )  # fmt: skip
    frame.data("the methods", "methods", lambda: rows.methods(made))
    free = found["exact"]
    together = free.timings_s.get(rows.TOGETHER) if isinstance(free, Result) else None
    usual = f" The usual layouts were searched together, in {units.seconds(together)}." if together else ""
    st.caption(
        "Each row is what the sentence above gives by that method: only the exact search chooses micro-batches and recomputation too. "
        f"Searches are timed without reading the model and building its network.{usual}"
    )


def _columns() -> dict[str, Any]:
    text, number = st.column_config.TextColumn, st.column_config.NumberColumn
    return {
        "method": text(width=225),
        "above exact, %": number(help="How much longer its step is than the exact plan’s"),
        "search": text(
            help="Time of this method’s own search when it was run; that of the usual layouts together stands below"
        ),
        "proof": text(
            width=250,
            help="optimal: proven the best of its own space by what it minimises; else how much better another may be",
        ),
        "plans": text(
            help="How many plans its space holds at most on this mesh: strategies of operators, and placements of tensors and weights"
        ),
        "space": text(width=420, help="What a plan of this method may be"),
    }
