"""Compare: why is this one better? Two to four plans side by side."""

from __future__ import annotations

import html

import streamlit as st

from explorer import charts, settings, state, words
from explorer.components import frame
from planner_core.plan import Plan

WEIGHTS_SHOWN = 60


def chosen_plans(plans: dict[str, Plan]) -> dict[str, Plan]:
    """The plans in the address, else the chosen one beside Megatron-LM or what there is."""
    asked = [n for n in state.value("compare") if n in plans]
    missing = [n for n in state.value("compare") if n not in plans]
    if missing:
        st.warning(f"There is no plan “{frame.text(missing[0][:40])}” here; plans here: {', '.join(plans)}.")
    if len(asked) < 2:
        first = asked[0] if asked else (state.value("plan") if state.value("plan") in plans else next(iter(plans)))
        rest = sorted((n for n in plans if n != first), key=lambda n: "megatron" not in n)
        asked = [first, *rest[:1]]
    return {n: plans[n] for n in asked[: settings.MAX_COMPARED]}


def choose(plans: dict[str, Plan], current: dict[str, Plan]) -> None:
    """The control: two to four plans."""
    widget = state.seed("w_compare", list(current))
    st.multiselect(
        "Plans",
        list(plans),
        format_func=lambda n: frame.option(plans[n]),
        key=widget,
        max_selections=settings.MAX_COMPARED,
        on_change=lambda: state.change(compare=tuple(st.session_state[widget])),
    )


def differences(shown: dict[str, Plan]) -> None:
    """Weight by weight, what is not the same."""
    rows = words.differing(shown.items())
    st.markdown("**Weights that differ**")
    if not rows:
        st.caption("All weights lie the same way; these plans differ in their mesh or in how activations move.")
        return
    body = [[html.escape(r["weight"]), *(_chips(r[n]) for n in shown)] for r in rows[:WEIGHTS_SHOWN]]
    frame.table(["weight", *(words.title(p) for p in shown.values())], body, "weights that differ")
    if len(rows) > WEIGHTS_SHOWN:
        st.caption(f"and {len(rows) - WEIGHTS_SHOWN} more")


def _chips(cell: str) -> str:
    if cell == words.WHOLE:
        return frame.chip("R")
    marks = []
    for part in cell.split(" · "):
        axis, _, rest = part.partition(" ")
        letter, _, gathered = rest.partition(",")
        marks.append(frame.chip(letter, axis) + (" gathered at use " if gathered else ""))
    return "".join(marks)


def figures(shown: dict[str, Plan], capacity: int) -> None:
    """Time, memory and traffic of each plan."""
    look = frame.theme()
    with st.container(key="wide"):
        left, right = st.columns(2, gap="large")
        with left:
            st.markdown("**One training step**", help=f"Exposed: {words.GLOSSARY['exposed']}")
            st.plotly_chart(
                charts.timeline(shown, look),
                theme=None,
                config=frame.CHART,
                key="timeline",
                alt="Step time of each plan",
            )
        with right:
            st.markdown(
                "**Memory per GPU**",
                help="The mark is the peak: the most that is held at once. Parts need not all meet at the peak.",
            )
            st.plotly_chart(
                charts.memory_bars(shown, capacity, look),
                theme=None,
                config=frame.CHART,
                key="memory",
                alt="Memory per GPU of each plan by kind",
            )
    st.markdown(
        "**What each GPU sends in a step**, by collective and mesh axis",
        help="; ".join(
            f"{k}: {words.GLOSSARY[k]}" for k in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        ),
    )
    st.plotly_chart(
        charts.collectives_bars(shown, look),
        theme=None,
        config=frame.CHART,
        key="collectives",
        alt="Bytes sent by each plan, by phase, collective and mesh axis",
    )


def page() -> None:
    """The page."""
    result = frame.open_page("compare")
    plans = state.plan_ids(result.plans)
    if len(plans) < 2:
        st.info(
            "Only one plan suits these settings, so there is nothing to compare it with. Try another cluster, mesh or batch."
        )
        return
    current = chosen_plans(plans)
    names = list(current)
    st.markdown(f"### {frame.text(words.headline(current[names[0]], current[names[1]]))}")
    choose(plans, current)
    st.markdown(
        "  \n".join(f"**{frame.text(words.title(p))}**: {frame.text(words.describe(p))}." for p in current.values())
    )
    figures(current, result.cluster.gpu.memory_bytes)
    differences(current)
    st.caption("Times are estimates from published peaks and assumed efficiencies; plans within 5 % are told as ties.")


page()
