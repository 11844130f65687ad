"""The parts of the Compare page: each takes the plans shown by their names in the address."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import replace

import streamlit as st

from explorer import components
from explorer.address import settings
from explorer.analysis import differences, rows, step_parts
from explorer.components import frame
from explorer.figures import compare as charts
from explorer.figures import topology
from explorer.figures.palette import MEMORY_KINDS, MEMORY_NAMES
from explorer.session import state
from explorer.text import glossary, recipe, spending, units, words
from planner_core.core import Plan
from planner_core.cost import cost_model_of
from planner_core.cost.communication import sent_per_gpu
from planner_core.cost.memory import tensors_at_peak
from planner_core.planning import Request, Result, prepare
from planner_core.planning.analysis import AblationStep, ablation_steps
from planner_core.planning.pricing import count_model_flops, measure_speed

PlansById = Mapping[str, Plan]


STEPS, ROW = 63, 41
"""Pixels of the table of steps: its first and last row, and one between."""
HEAD, SPEED_ROW = 34, 37
"""Pixels of the table of speeds: its head, and a row."""


def explain(shown: PlansById, homes: Mapping[str, Result], against: str) -> None:
    """What the difference between the first plan and the one that it is measured against comes from, part by part; nothing where the
    plans do not the same work in a step."""
    if len({(p.workload["batch"], p.workload["seq"]) for p in shown.values()}) > 1:
        return
    first = next(iter(shown))
    found = step_parts.round_steps({n: step_parts.split_step(p, homes[n].graph) for n, p in shown.items()}, first)
    if found.total(first) != found.total(against):
        st.markdown(
            frame.escape(f"{words.plan_title(shown[first])} {step_parts.explain_difference(found, first, against)}.")
        )
    with st.container(
        key="room_steps", height=STEPS + ROW * len(shown), border=False
    ):  # its markup comes a moment later
        st.html(steps_table(found, shown, list(shown), against, {}))


PART_WORDS = {
    step_parts.COMPUTE: "The GPU computes",
    step_parts.RECOMPUTATION: "The GPU computes again, in backward, what it did not keep",
    step_parts.WAITS: "The next operation needs data of other GPUs",
    step_parts.WEIGHTS: "Weights and gradients on their way slow the GPU down or hold it up",
    step_parts.OPTIMIZER: "Gradients are clipped and weights updated",
    step_parts.BUBBLE: "A stage waits for another, in the mean over the ranks of the pipeline",
    step_parts.OUTSIDE: "The GPU has no work: loader, logging",
}


def steps_table(
    found: step_parts.RoundedSteps,
    plans: Mapping[str, Plan],
    names: list[str],
    rival: str | None,
    called: Mapping[str, str],
) -> str:
    """Every step as a bar and in numbers, under the plans' titles or as `called`; below them how the rival's differs from the first
    one's, part by part."""
    parts = [p for p in step_parts.PARTS if any(found.parts[n][p] for n in names)]
    longest = max(found.total(n) for n in names)
    head = "".join(
        f"<th scope='col' title='{PART_WORDS[p]}'><i class='key p{step_parts.PARTS.index(p)}'></i>{p}</th>"
        for p in parts
    )
    rows = [_step_row(found, plans[n], n, parts, longest, called.get(n)) for n in names]
    if rival is not None:
        first = called[names[0]].lower() if names[0] in called else words.plan_title(plans[names[0]])
        title = html.escape(f"{words.plan_title(plans[rival])} against {first}")
        differences = [found.parts[rival][p] - found.parts[names[0]][p] for p in parts]
        told = "".join(
            f"<td>{found.text(d, sign=True)}</td>" for d in (*differences, found.total(rival) - found.total(names[0]))
        )
        rows.append(f"<tr class='difference'><th scope='row' colspan='2'>{title}</th>{told}<td></td></tr>")
    return (
        "<table class='steps' aria-label='The step of each plan by what its time goes to'><thead><tr><th scope='col'>plan</th>"
        f"<th scope='col' class='wide'>step</th>{head}<th scope='col'>step</th><th scope='col'>memory</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _step_row(
    found: step_parts.RoundedSteps, plan: Plan, name: str, parts: list[str], longest: int, called: str | None
) -> str:
    title = html.escape(called or words.plan_title(plan))
    bars = "".join(
        f"<i class='p{step_parts.PARTS.index(p)}' style='width:{found.parts[name][p] / longest:.2%}' "
        f"title='{p}: {found.text(found.parts[name][p])}'></i>"
        for p in parts
    )
    cells = "".join(f"<td>{found.text(found.parts[name][p])}</td>" for p in parts)
    held = units.memory(plan.cost.memory_bytes["peak"]) + ("" if plan.fits else "<small>does not fit</small>")
    kind = "" if plan.fits else "unfit"
    aside = "" if called else f"<small>{html.escape(recipe.describe_layout(plan))}</small>"
    return (
        f"<tr class='{kind}'><th scope='row'>{title}{aside}</th><td class='wide'><span class='bar'>{bars}</span></td>{cells}"
        f"<td><b>{found.text(found.total(name))}</b></td><td>{held}</td></tr>"
    )


def show_memory_and_traffic(shown: PlansById, homes: Mapping[str, Result]) -> None:
    """Memory stacked by kind, and bytes sent by collective; below them what a chosen bar of memory is made of."""
    look = frame.theme()
    held = state.value("held")
    if len(held) != 2 or held[0] not in shown or held[1] not in MEMORY_KINDS:
        held = ()
    with st.container(key="wide"):
        left, right = st.columns(2, gap="large")
    with left:
        st.markdown(
            "**Memory per GPU**",
            help="The mark is the peak: the most that is held at once. Parts need not all meet at the peak.",
        )
        st.plotly_chart(
            charts.memory_bars(
                shown, look, {n: step_parts.memory_limit_bytes(homes[n]) for n in shown}, held[1] if held else ""
            ),
            theme=None,
            config=frame.CHART,
            key=_memory_key(),
            on_select=_hold,
            selection_mode="points",
            alt="Memory per GPU of each plan by kind",
        )
        st.caption("A click on a part of a bar lists what it is made of.")
    with right:
        kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
        st.markdown(
            "**What each GPU sends in a step**",
            help="; ".join(f"{k}: {glossary.GLOSSARY[k]}" for k in kinds),
        )
        st.plotly_chart(
            charts.collectives_bars(shown, look),
            theme=None,
            config=frame.CHART,
            key="collectives",
            on_select=_light,
            selection_mode="points",
            alt="Bytes sent by each plan, by phase, collective and mesh axis",
        )
        st.caption("A click on a bar lets its collective stand out in the step above.")
    if held:
        name, kind = held
        made_of(homes[name], shown[name], kind)


def _memory_key() -> str:
    """Another key forgets which bar the browser shows as chosen."""
    return f"memory{st.session_state.get('memory_generation', 0)}"


def _hold() -> None:
    """A part of a bar of memory was clicked, or let go."""
    state.change(held=_clicked(_memory_key()))


def _let_go() -> None:
    st.session_state["memory_generation"] = st.session_state.get("memory_generation", 0) + 1
    state.change(held=())


def _clicked(chart: str) -> tuple[str, ...]:
    """The text that a figure gave to the point that was clicked; empty if the choice was undone."""
    points = st.session_state[chart]["selection"]["points"]
    data = points[0].get("customdata") if points else ""
    text = str(data[0] if isinstance(data, list) else data)
    return tuple(text.rsplit(",", 1) if chart != "collectives" else text.split(",")) if text else ()


def show_speeds(shown: PlansById, homes: Mapping[str, Result]) -> None:
    """How fast each plan trains: its step with the band, tokens per second, utilisation, and what all tokens take; their number and the
    price are set here."""
    asked = state.training_budget()
    body = []
    for name, plan in shown.items():
        home = homes[name]
        s = measure_speed(plan, count_model_flops(home.graph), home.cluster)
        times = [units.seconds(s.step_time_s), " to ".join(filter(None, s.between(units.seconds)))]
        body.append(
            [
                html.escape(words.plan_title(plan)),
                f"{times[0]} <span class='aside'>{times[1]}</span>",
                units.whole(s.tokens_per_s_per_gpu),
                units.percent(s.mfu),
                *spending.budget_cells(asked, s, home.cluster.num_gpus),
            ]
        )
    with st.container(key="room_speeds", height=HEAD + SPEED_ROW * len(shown), border=False):
        head = ["plan", "step, with its band", "tokens/s per GPU", "utilisation", *spending.budget_columns(asked)]
        frame.show_table(head, body, "how fast each plan trains")


HOLDERS = 10
"""Tensors that are listed."""


def made_of(home: Result, plan: Plan, kind: str) -> None:
    """What a part of a bar of memory is made of: its largest tensors."""
    if plan.pipeline:
        st.caption("Of a plan with stages the tensors of one rank are not listed.")
        return
    found = [h for h in tensors_at_peak(plan.blocks, home.graph, cost_model_of(plan)) if h.kind == kind]
    total = units.memory(plan.cost.memory_bytes.get(kind, 0))
    with st.container(horizontal=True, vertical_alignment="center"):
        told = f"**{MEMORY_NAMES[kind].capitalize()}** of {frame.escape(words.plan_title(plan))}: {total} on one GPU at the peak"
        st.markdown(told, width="content")
        st.button("Show all alike", key="let_go", type="tertiary", on_click=_let_go)
    rows = [
        [html.escape(h.what), html.escape(h.block), str(h.copies), units.memory(h.total_bytes)] for h in found[:HOLDERS]
    ]
    frame.show_table(
        ["tensor", "block", "copies", "together"], rows, f"{MEMORY_NAMES[kind]} of this plan, largest first"
    )
    if len(found) > HOLDERS:
        rest = sum(h.total_bytes for h in found[HOLDERS:])
        st.caption(f"and {units.whole(len(found) - HOLDERS)} more, together {units.memory(rest)}")


def _light() -> None:
    """A bar of the collectives was clicked, or let go."""
    state.change(lit=_clicked("collectives"))


def show_traffic_matrices(shown: PlansById) -> None:
    """The communication matrix of each plan, and the same on the drawing of the cluster."""
    st.markdown(
        "**Who sends to whom**",
        help="By the algorithm that is cheapest for each collective: a ring, a tree, rings of rings, or pairwise.",
    )
    phases = frame.choose_phases()
    look = frame.theme()
    grids = {name: topology.traffic_grid(p, phases) for name, p in shown.items()}
    most = max(float(g.num_bytes.max()) for g in grids.values())
    with st.container(key="wide_matrices"):
        columns = st.columns(2, gap="large")
    for k, (name, plan) in enumerate(shown.items()):
        with columns[k % 2]:
            st.markdown(f"{frame.escape(words.plan_title(plan))}, {frame.escape(words.full_mesh_words(plan))}")
            sent = sum(t.wire_bytes for t in plan.cost.traffic if t.phase in phases)
            trees = any(t.algorithm == "tree" and t.wire_bytes for t in plan.cost.traffic if t.phase in phases)
            st.caption(
                f"Each GPU sends {units.traffic(sent)}"
                + (" on average: in a tree, inner ranks send more than leaves." if trees else ": the sum of a row.")
            )
            st.plotly_chart(
                charts.traffic_matrix(grids[name], most, look),
                theme=None,
                config=frame.CHART,
                key=f"matrix_{k}",
                alt=f"Bytes that each {grids[name].unit} sends each other one under {words.plan_title(plan)}",
            )
            components.draw_svg(
                topology.cluster_svg(plan, phases, look, list(shown.values()), per_row=2), key=f"drawing_{k}"
            )


# --- weights -----------------------------------------------------------------------------------------


def show_weights(shown: PlansById, homes: Mapping[str, Result]) -> None:
    """Weight by weight: placement in each plan, and how long the step waits there."""
    every = differences.compare_weights(shown, {n: homes[n].graph for n in shown})
    some = [r for r in every if not r.same]
    left, right = st.columns([3, 2], vertical_alignment="bottom")
    left.markdown("**Weights that differ**" if state.value("rows") == "differing" else "**All weights**")
    with right:
        widget = state.widget_key("w_rows", state.value("rows"))
        st.segmented_control(
            "Rows",
            ["differing", "all"],
            format_func=lambda r: {"differing": f"differing, {len(some)}", "all": f"all, {len(every) - 1}"}[r],
            key=widget,
            default=state.value("rows"),
            required=True,
            on_change=state.take_widget_value,
            args=("rows", widget),
        )
    if state.value("rows") == "differing" and not some:
        st.caption("All weights lie the same way; these plans differ in their mesh or in how activations move.")
    picked = every[:-1] if state.value("rows") == "all" else some
    others = {n: sum(r.waits_s[n] for r in every if r not in picked) for n in shown}
    body = [[_weight(r), *(_cell(r.placements[n], r.waits_s[n]) for n in shown)] for r in picked]
    body.append(["everything else", *(_waits(others[n]) for n in shown)])
    body.append(["<b>sum</b>", *(f"<b>{_waits(p.cost.exposed_comm_time_s)}</b>" for p in shown.values())])
    frame.show_table(
        ["weight", *(words.plan_title(p) for p in shown.values())],
        body,
        "placement of weights, and waiting at their ops",
    )
    st.caption(
        "Below each placement: how long a step waits for data at the operation that uses the weight, over all its copies."
    )


def _weight(row: differences.WeightRow) -> str:
    return html.escape(row.weight) + (f" ×{row.copies}" if row.copies > 1 else "")


def _cell(placement: str, seconds: float) -> str:
    return f"{frame.placement_chips(placement)}<br>{_waits(seconds)}".removesuffix("<br>")


def _waits(seconds: float) -> str:
    return f"<span class='aside'>waits {units.seconds(seconds)}</span>" if seconds else ""


# --- what a method's restrictions cost ---------------------------------------------------------------


@st.cache_resource(max_entries=state.CACHED_RESULTS, show_spinner=False)
def _ablation_steps(request: Request, method: str) -> tuple[AblationStep, ...]:
    return tuple(ablation_steps(prepare(request, state.uploaded_graph(request)), method))


def show_restrictions(result: Result) -> None:
    """The cost of TAP's, TAPS's or ATP's restrictions against the exact search, one after the other."""
    st.markdown(
        "**What a method’s restrictions cost**",
        help="The papers' methods search a smaller space, or aim at something else than the step time. Each row adds one "
        "restriction to those above and searches exactly again.",
    )
    methods = [m for m in settings.METHODS if m != "exact"]
    widget = state.widget_key("w_rungs", state.value("rungs") or None)
    st.segmented_control(
        "From exact to",
        methods,
        format_func=lambda m: settings.METHODS[m],
        key=widget,
        default=state.value("rungs") or None,
        on_change=lambda: state.change(rungs=st.session_state[widget] or ""),
    )
    method = state.value("rungs")
    if not method:
        st.caption("Choose a method to see what it gives up, and what each part of that costs here.")
        return
    with st.spinner(f"From exact to {settings.METHODS[method]}", show_time=True):
        # a method's space is compared with the free one, whatever tool the page plans for
        found = _ablation_steps(replace(result.request, method="exact", objective="time", tool=None), method)
    name = settings.METHODS[method]
    st.markdown(frame.escape(words.describe_restrictions(name, [(r.says, r.plan) for r in found])))
    table = [_ablation_row(r, found[k - 1] if k else None) for k, r in enumerate(found)]
    head = ["each row adds", "mesh", "sent per GPU", "communication", "step", "memory", "fits"]
    frame.show_table(head, table, f"from exact to {name}")
    frame.offer_data("these rows", f"restrictions-{method}", lambda: rows.restriction_rows(found))


def _ablation_row(step: AblationStep, before: AblationStep | None) -> list[str]:
    says = html.escape(step.says)
    if step.plan is None:
        return [says, "no plan fits", "", "", "", "", "no"]
    c, old = step.plan.cost, before.plan.cost if before and before.plan else None
    return [
        says,
        html.escape(words.full_mesh_words(step.plan)),
        units.traffic(sent_per_gpu(step.plan)),
        units.seconds(c.comm_time_s) + _change(c.comm_time_s, old.comm_time_s if old else 0),
        units.seconds(c.step_time_s) + _change(c.step_time_s, old.step_time_s if old else 0),
        units.memory(c.memory_bytes["peak"]),
        "yes" if step.plan.fits else "no",
    ]


def _change(value: float, before: float) -> str:
    if not before or abs(value / before - 1) < 0.001:
        return ""
    ratio = value / before - 1
    return f" <span class='aside'>{'+' if ratio > 0 else '−'}{units.percent(abs(ratio))}</span>"
