"""Plans: what are my choices? All plans by communication and memory, the chosen one weight by weight."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import streamlit as st

from explorer import charts, overlay, state, units, words
from explorer.components import frame
from explorer.palette import MEMORY_KINDS, MEMORY_NAMES
from planner_core.candidates import Candidates
from planner_core.pipeline import Result
from planner_core.plan import Plan, glob_name
from planner_core.planner import Request
from planner_core.price import Message

LETTERS = ("R", "S(0)", "S(1)")


def baselines(plans: dict[str, Plan]) -> list[str]:
    """Names of the plans that stand for somebody's usual way."""
    methods = {"exact", "tap", "taps", "atp"}
    return [n for n, p in plans.items() if p.method not in methods]


def scatter(result: Result, plans: dict[str, Plan], chosen: str) -> None:
    """Whole-model plans; a click chooses."""
    figure = charts.plans_scatter(plans, chosen, baselines(plans), result.cluster.gpu.memory_bytes, frame.theme())

    def pick() -> None:
        points = st.session_state["plans_chart"]["selection"]["points"]
        name = points[0].get("customdata") if points else None
        name = name[0] if isinstance(name, list) else name
        if name in plans:
            state.change(plan=name)

    st.plotly_chart(
        figure,
        theme=None,
        key="plans_chart",
        on_select=pick,
        selection_mode="points",
        config=frame.CHART,
        alt="Plans by communication per step and memory per GPU",
    )


def table(plans: dict[str, Plan], chosen: str) -> None:
    """Every plan a row, words first; a click chooses."""
    rows = [
        {
            "plan": words.title(p),
            "what it does": words.describe(p),
            "mesh": words.mesh_words(p.mesh),
            "step, ms": _figure(p.cost.step_time_s * 1e3),
            "communication, ms": _figure(p.cost.comm_time_s * 1e3),
            "of it exposed, ms": _figure(p.cost.exposed_comm_time_s * 1e3),
            "memory, GiB": _figure(p.cost.memory_bytes["peak"] / units.GIB),
            "fits": "yes" if p.fits else "no",
            "proof": "optimal" if p.optimal else "best found",
        }
        for p in plans.values()
    ]

    def pick() -> None:
        selected = st.session_state[f"plans_table_{chosen}"]["selection"]["rows"]
        if selected:
            state.change(plan=list(plans)[selected[0]])

    st.dataframe(
        rows,
        hide_index=True,
        on_select=pick,
        selection_mode="single-row",
        key=f"plans_table_{chosen}",
        row_height=34,
        selection_default={"selection": {"rows": [list(plans).index(chosen)]}},
        column_config={
            "plan": st.column_config.TextColumn(width=200),
            "what it does": st.column_config.TextColumn(width=380),
            "fits": st.column_config.TextColumn(width=60),
            "of it exposed, ms": st.column_config.NumberColumn(help=words.GLOSSARY["exposed"]),
            "proof": st.column_config.TextColumn(
                help="optimal: proven the best of its kind under the stated cost model; best found: a small gap is left"
            ),
        },
        alt="The plans as a table",
    )


def _figure(value: float) -> float:
    """Three significant figures, still a number so that the column sorts."""
    return float(f"{value:.3g}")


def ties(plans: dict[str, Plan]) -> None:
    """Plans within the model's error of the fastest that fits are told as ties."""
    fitting = {n: p for n, p in plans.items() if p.fits} or plans
    best = min(fitting.values(), key=lambda p: p.cost.step_time_s)
    near = [
        words.title(p)
        for p in fitting.values()
        if p is not best and p.cost.step_time_s <= best.cost.step_time_s * (1 + words.MODEL_ERROR)
    ]
    if near:
        st.caption(
            frame.text(
                f"Within {units.percent(words.MODEL_ERROR)} of {words.title(best)} in step time, which is the "
                f"error of such estimates: {', '.join(near)}. Choose among these by memory."
            )
        )


def candidates(result: Result) -> None:
    """Every assignment of one unique block."""
    found = {c.block: c for c in result.candidates}
    if not found:
        st.caption(
            "No block of this model repeats, so there is no block to enumerate; the search covers the whole graph."
        )
        return
    name = state.value("block") if state.value("block") in found else next(iter(found))
    if len(found) > 1:
        widget = state.seed("w_block", name)
        st.selectbox(
            "Block",
            list(found),
            key=widget,
            format_func=lambda n: state.drawing(result.request).titles.get(n, n),
            on_change=state.from_widget,
            args=("block", widget),
        )
    one = found[name]
    index = st.session_state.get("candidate", {}).get(name)

    def pick() -> None:
        points = st.session_state[f"candidates_{name}"]["selection"]["points"]
        data = points[0].get("customdata") if points else None
        if data is not None:
            st.session_state["candidate"] = {name: int(data[0] if isinstance(data, list) else data)}

    st.plotly_chart(
        charts.candidates_scatter(one, index, result.cluster.gpu.memory_bytes, frame.theme()),
        theme=None,
        key=f"candidates_{name}",
        on_select=pick,
        selection_mode="points",
        config=frame.CHART,
        alt=f"All candidates of {name} by communication and memory",
    )
    candidate_words(one, index)


def candidate_words(found: Candidates, index: int | None) -> None:
    """Which point was clicked, or what the points are."""
    if index is None or not 0 <= index < found.space:
        st.caption(
            f"Each point puts every one of {len(found.weights)} weight matrices whole (R), split by rows S(0) or "
            "by columns S(1) over "
            f"{found.axis_size} GPUs, in all {found.repeats} copies; the other GPUs split the batch, weights are kept, "
            "and the rest of the model is chosen best. Click a point for its placements."
        )
        return
    parts = " ".join(
        f"{html.escape(w.removesuffix('.weight'))} {frame.chip(LETTERS[int(c)])}"
        for w, c in zip(found.weights, found.choice[index], strict=True)
    )
    st.html(parts)


def dropped(result: Result) -> None:
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
        st.caption(f"{units.whole(space)} candidates; of them {', '.join(why) or 'none were dropped'}.")


def weights(result: Result, plan: Plan) -> None:
    """Placement of every weight, by name pattern."""
    rows = []
    axes = [(i, n) for i, n in enumerate(plan.mesh.axis_names) if plan.mesh.axis_sizes[i] > 1]
    for label, block in plan.blocks.items():
        name = label.partition("#")[0]
        values = (result.coarse.blocks[name] if name else result.coarse.top).block.values
        shapes = {v.name: v.meta for v in values if v.kind == "parameter"}
        pattern = glob_name(block.prefixes)
        for weight, p in block.params.items():
            meta = shapes.get(weight)
            cells = [frame.chip(str(p.stored[i])) + (" gathered at use" if i in p.gathered else "") for i, _ in axes]
            full = f"{pattern}.{weight}" if pattern else weight
            copies = f" ×{len(block.prefixes)}" if len(block.prefixes) > 1 else ""
            rows.append(
                [
                    html.escape(full) + copies,
                    html.escape(units.shape(meta.shape)) if meta else "",
                    *cells,
                    _per_gpu(plan, p.stored, meta, len(block.prefixes)),
                ]
            )
    frame.table(
        ["weight", "shape", *(f"on {n} ({plan.mesh.axis_sizes[i]})" for i, n in axes), "per GPU"],
        rows,
        "placement of every weight",
    )


def _per_gpu(plan: Plan, stored: Sequence[object], meta: object, copies: int) -> str:
    if meta is None:
        return ""
    parts = math.prod(n for p, n in zip(stored, plan.mesh.axis_sizes, strict=True) if str(p).startswith("S"))
    return units.memory(meta.num_bytes * copies / parts)  # type: ignore[attr-defined]


@st.cache_data(max_entries=64, show_spinner=False)
def parts(request: Request, name: str) -> list[Message]:
    """Every collective of one plan."""
    result = state.plan(request)
    plan = state.plan_ids(result.plans)[name]
    return list(overlay.itemised(plan, result.graph, result.cluster, result.workload))


def opened(result: Result, name: str, plan: Plan) -> None:
    """The numbers of the chosen plan, each with its parts and formula."""
    c = plan.cost
    with st.expander(f"Step time {units.seconds(c.step_time_s)}: how it adds up"):
        st.markdown(
            f"compute {units.seconds(c.compute_time_s)} + exposed communication "
            f"{units.seconds(c.exposed_comm_time_s)}. All communication takes "
            f"{units.seconds(c.comm_time_s)}; gradient sums and weight gathers hide behind up to 80 % of compute, "
            "what an operation waits for does not hide. "
            "Compute is, for each operation, the greatest of work ÷ reachable FLOP/s, bytes ÷ reachable memory "
            "bandwidth, and the time to launch a kernel."
        )
    sent(result, name, plan)
    memory = c.memory_bytes
    with st.expander(f"Memory {units.memory(memory['peak'])} per GPU at its peak: by kind"):
        rows = [[MEMORY_NAMES[k], units.memory(memory.get(k, 0)), units.whole(memory.get(k, 0))] for k in MEMORY_KINDS]
        frame.table(["kind", "size", "bytes"], rows, "memory by kind")
        st.caption(
            "The peak is the most that is held at once, found by walking forward and backward; it is not the sum "
            "where kinds do not meet."
        )


def sent(result: Result, name: str, plan: Plan) -> None:
    """Traffic of the chosen plan, down to every collective."""
    c = plan.cost
    with st.expander(
        f"Communication {units.traffic(sum(t.wire_bytes for t in c.traffic))} sent per GPU: by phase, collective and axis"
    ):
        rows = [
            [
                t.phase,
                html.escape(t.kind),
                plan.mesh.axis_names[t.axis],
                units.whole(t.count),
                units.traffic(t.num_bytes),
                units.traffic(t.wire_bytes),
                units.seconds(t.time_s),
                html.escape(t.algorithm),
            ]
            for t in c.traffic
        ]
        frame.table(
            ["phase", "collective", "axis", "calls", "whole tensors", "sent per GPU", "time", "algorithm"],
            rows,
            "traffic",
        )
        st.caption(
            "A ring of n sends 2 (n – 1) / n of the bytes for all_reduce, (n – 1) / n for all_gather and "
            "reduce_scatter, (n – 1) / n² for all_to_all."
        )
        st.markdown("**Every collective**, those of equal layers together")
        st.dataframe(
            [
                {
                    "where": m.site,
                    "what": m.what,
                    "phase": m.phase,
                    "collective": m.kind,
                    "axis": plan.mesh.axis_names[m.axis],
                    "calls": m.count,
                    "bytes each": m.num_bytes,
                }
                for m in parts(result.request, name)
            ],
            hide_index=True,
            height=260,
        )


def page() -> None:
    """The page."""
    result = frame.open_page("plans")
    plans = state.plan_ids(result.plans)
    chosen, plan = state.chosen(plans)
    with st.container(key="wide"):
        left, right = st.columns(2, gap="large")
        with left:
            st.markdown("**Plans for the whole model**")
            scatter(result, plans, chosen)
        with right:
            st.markdown("**Every candidate of one block**")
            candidates(result)
    table(plans, chosen)
    ties(plans)
    dropped(result)
    st.markdown(f"### {frame.text(words.title(plan))}")
    frame.plan_choice(plans, "Chosen plan")
    st.markdown(f"{frame.text(words.describe(plan))}.")
    for note in plan.notes:
        st.caption(frame.text(note))
    opened(result, chosen, plan)
    with st.expander(
        f"Placement of every weight ({sum(len(b.params) for b in plan.blocks.values())} patterns)", expanded=True
    ):
        weights(result, plan)


page()
