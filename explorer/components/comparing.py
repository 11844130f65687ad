"""The parts of the Compare page: each takes the plans shown, by their names in the address."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import replace

import streamlit as st

from explorer import components
from explorer.address import settings
from explorer.analysis import differences, rows, step_parts
from explorer.components import frame
from explorer.figures import compare as charts
from explorer.figures import topology
from explorer.session import shared_plans, state
from explorer.text import glossary, recipe, spending, units, words
from planner_core.core import Plan
from planner_core.cost.communication import sent_per_gpu
from planner_core.planning import Request, Result, prepare_planner
from planner_core.planning.analysis import AblationStep, ablation_steps, exact_step, fits_mark
from planner_core.planning.pricing import count_model_flops, measure_speed, name_throughput

PlansById = Mapping[str, Plan]

STEPS, ROW = 63, 41
"""Pixels of the table of steps: its first and last row, and one between."""


def show_step_parts(shown: PlansById, homes: Mapping[str, Result], against: str) -> None:
    """Draw the steps by their parts, and how that of the first plan differs from that of `against`."""
    first = next(iter(shown))
    rounded = step_parts.round_steps({n: step_parts.split_step(p, homes[n].graph) for n, p in shown.items()}, first)
    same_work = len({(p.workload.batch, p.workload.seq) for p in shown.values()}) == 1
    # The room is reserved: the markup comes a moment later, and what is below would jump.
    with st.container(key="room_steps", height=STEPS + ROW * len(shown), border=False):
        st.html(steps_table(rounded, shown, homes, against if same_work else ""))


def steps_table(rounded: step_parts.RoundedSteps, plans: PlansById, homes: Mapping[str, Result], against: str) -> str:
    """Return every step as a bar and in numbers, with what it trains in it.

    Below them stands how the step of `against` differs from the first one's, part by part, where there is an `against`.
    """
    first, budget = next(iter(plans)), state.training_budget()
    parts = [p for p in step_parts.ALL_PARTS if any(rounded.parts[n][p] for n in plans)]
    longest = max(map(rounded.total, plans))
    head = "".join(
        f"<th scope='col' title='{step_parts.MEANINGS[p]}'><i class='key {frame.part_class(p)}'></i>{p}</th>"
        for p in parts
    )
    speeds = (f"{name_throughput(plans[first])} per GPU", "utilisation", *spending.budget_columns(budget))
    body = [
        _step_row(rounded, plan, plan_id, parts, longest, homes[plan_id], speeds) for plan_id, plan in plans.items()
    ]
    if against:
        title = html.escape(f"{words.plan_title(plans[against])} against {words.plan_title(plans[first])}")
        differences = rounded.subtract(first, against)
        gaps = [differences[p] for p in parts]
        cells, total = _part_cells([rounded.text(gap, sign=True) for gap in (*gaps, sum(gaps))])
        head_cell = f"<th scope='row' colspan='2'>{title}</th>"
        body.append(f"<tr class='difference'>{head_cell}{cells}<td>{total}</td>{'<td></td>' * (1 + len(speeds))}</tr>")
    ends = "".join(f"<th scope='col'>{name}</th>" for name in ("step", "memory", *speeds))
    return (
        "<table class='steps' aria-label='The step of each plan by what its time goes to'><thead><tr><th scope='col'>plan</th>"
        f"<th scope='col' class='wide'>step</th>{head}{ends}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def _step_row(
    rounded: step_parts.RoundedSteps,
    plan: Plan,
    plan_id: str,
    parts: list[str],
    longest: int,
    home: Result,
    speed_names: Sequence[str],
) -> str:
    sizes = {p: rounded.parts[plan_id][p] for p in parts}
    bars = "".join(
        f"<i class='{frame.part_class(p)}' style='width:{size / longest:.2%}' title='{p}: {rounded.text(size)}'></i>"
        for p, size in sizes.items()
    )
    cells, total = _part_cells([rounded.text(size) for size in (*sizes.values(), rounded.total(plan_id))])
    memory = units.memory(plan.cost.memory_bytes["peak"]) + ("" if plan.fits else "<small>does not fit</small>")
    is_best = words.plan_title(plan) == words.BEST_PLAN
    gap = recipe.describe_gap(plan) if is_best else "proven" * recipe.has_proven_step(plan)
    proof = f"<small>{gap}</small>" if gap else ""
    title, layout = (html.escape(text) for text in (words.plan_title(plan), recipe.layout_name(plan)))
    name = f"{layout if layout.startswith(title) else f'{title}<small>{layout}</small>'}{proof}"
    speed = measure_speed(plan, count_model_flops(home.graph), home.cluster)
    band = units.span(*speed.between(units.seconds)).removesuffix(f" {total.rpartition(' ')[2]}")
    trained = (
        units.whole(speed.tokens_per_s_per_gpu),
        units.percent(speed.mfu),
        *spending.budget_cells(state.training_budget(), speed, home.cluster.num_gpus),
    )
    ends = "".join(
        f"<td class='more' data-label='{name}'>{cell}</td>" for name, cell in zip(speed_names, trained, strict=True)
    )
    return (
        f"<tr class='{'' if plan.fits else 'unfit'}'><th scope='row'>{name}</th>"
        f"<td class='wide'><span class='bar'>{bars}</span></td>{cells}"
        f"<td class='main'><b>{total}</b><small>{band}</small></td><td class='main'>{memory}</td>{ends}</tr>"
    )


def _part_cells(texts: Sequence[str]) -> tuple[str, str]:
    """Return the cells of a row's parts, and its sum, the last of `texts`, which has the unit of all if they share one."""
    bare, _ = units.share_unit(texts)
    return "".join(f"<td>{text}</td>" for text in bare[:-1]), texts[-1]


def show_memory_and_traffic(shown: PlansById, homes: Mapping[str, Result]) -> None:
    """Draw memory stacked by kind, and the bytes sent by collective."""
    look = frame.theme()
    with st.container(key="wide"):
        left, right = st.columns(2, gap="large")
    with left:
        st.markdown(
            "**Memory per GPU**, GiB",
            help="The mark is the peak: the most that is held at once. Parts need not all meet there.",
        )
        limits = {n: step_parts.memory_limit_bytes(homes[n]) for n in shown}
        alt = "Memory per GPU of each plan by kind"
        frame.show_chart(charts.memory_bars(shown, look, limits), "memory", alt)
        _show_keys(charts.memory_keys(shown))
    with right:
        kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
        st.markdown(
            "**Sent per GPU**, GB",
            help=f"In a step. {'; '.join(f'{k}: {glossary.GLOSSARY[k]}' for k in kinds)}",
        )
        frame.show_chart(
            charts.collectives_bars(shown, look),
            "collectives",
            "Bytes sent by each plan, by phase, collective and mesh axis",
        )
        _show_keys(charts.collective_keys(shown, look))


def _show_keys(keys: Sequence[charts.Key]) -> None:
    """Draw the legend of a chart."""
    marks = (
        f"<span><i class='{pattern}' style='background-color: {colour}'></i>{html.escape(name)}</span>"
        for name, colour, pattern in keys
    )
    st.html(f"<p class='bar-keys'>{''.join(marks)}</p>")


def show_links(shown: PlansById) -> None:
    """Draw the cluster of each plan, with what its GPUs send each other."""
    st.markdown(
        "**Who sends to whom**",
        help="By the algorithm that is cheapest for each collective: a ring, rings of rings, or pairwise",
    )
    with st.container(key="wide_links"):
        columns = st.columns(2, gap="large")
    for k, plan in enumerate(shown.values()):
        with columns[k % 2]:
            # with stages the ranks hand different bytes to the next
            most_sent = f"{'at most ' * bool(plan.pipeline)}{units.traffic(sent_per_gpu(plan))}"
            st.markdown(frame.escape(f"{words.plan_title(plan)}: {most_sent} per GPU"))
            drawing = topology.cluster_svg(plan, frame.theme(), list(shown.values()), per_row=2)
            components.draw_svg(drawing, key=f"drawing_{k}")


# --- weights -----------------------------------------------------------------------------------------


def show_weights(shown: PlansById, homes: Mapping[str, Result]) -> None:
    """Draw an expander with the placement of every weight in each plan, and how long the step waits there."""
    with st.expander(
        "How every weight lies", key="every_weight", on_change="rerun", expanded=state.value("rows") == "all"
    ) as box:
        if box.open:
            _show_weights(shown, homes)


def _show_weights(shown: PlansById, homes: Mapping[str, Result]) -> None:
    # the last row holds what is waited for at operators without a weight
    *every, without_weight = differences.compare_weights(shown, {n: homes[n].graph for n in shown})
    listed = every
    if len(shown) > 1:
        differing = [r for r in every if not r.same]
        frame.choose_one("Weights", "rows", {"differing": f"differing, {len(differing)}", "all": f"all, {len(every)}"})
        listed = every if state.value("rows") == "all" else differing
        if not listed:
            st.caption("All weights lie the same way; these plans differ in their mesh or in how activations move.")
    unlisted = [r for r in (*every, without_weight) if r not in listed]
    other_s = {n: sum(r.waits_s[n] for r in unlisted) for n in shown}
    body = [[_weight_name(r), *(_weight_cell(r.placements[n], r.waits_s[n]) for n in shown)] for r in listed]
    body.append(["everything else", *(_wait_cell(other_s[n]) for n in shown)])
    body.append(["<b>sum</b>", *(f"<b>{_wait_cell(p.cost.exposed_comm_time_s)}</b>" for p in shown.values())])
    head = ["weight", *map(words.plan_title, shown.values())]
    frame.show_table(head, body, "placement of weights, and waiting at their ops")
    st.caption(
        "Below each placement: how long a step waits for data at the operation that uses the weight, over all its copies."
    )


def _weight_name(row: differences.WeightRow) -> str:
    return html.escape(row.weight) + (f" ×{row.copies}" if row.copies > 1 else "")


def _weight_cell(placement: str, wait_s: float) -> str:
    return f"{frame.placement_chips(placement)}<br>{_wait_cell(wait_s)}".removesuffix("<br>")


def _wait_cell(wait_s: float) -> str:
    return f"<span class='aside'>waits {units.seconds(wait_s)}</span>" if wait_s else ""


# --- what a method's restrictions cost ---------------------------------------------------------------


@st.cache_resource(max_entries=shared_plans.CACHED_RESULTS, show_spinner=False)
def _ablation_steps(request: Request, method: str) -> tuple[AblationStep, ...]:
    return tuple(ablation_steps(prepare_planner(request, shared_plans.uploaded_graph(request)), method))


def show_restrictions(result: Result) -> None:
    """Draw the cost of TAP's, TAPS's or ATP's restrictions against the exact search, one after the other."""
    methods = {m: name for m, name in settings.METHODS.items() if m != "exact"}
    frame.choose_one(
        "What a method’s restrictions cost",
        "rungs",
        methods,
        optional=True,
        help="The papers' methods search a smaller space, or aim at something else than the step time. Each row adds one "
        "restriction to those above and searches exactly again.",
    )
    method = state.value("rungs")
    if not method:
        return
    name = methods[method]
    # a method's space is compared with the free one, whatever tool the page plans for
    asked = replace(result.request, method="exact", objective="time", tool=None, prove=False)
    with st.spinner(f"From the exact search to {name}", show_time=True):
        is_asked = asked == replace(result.request, prove=False)
        best = (result if is_asked else shared_plans.plan_request(asked)).searched
        steps = [exact_step(best), *_ablation_steps(asked, method)]
    st.markdown(frame.escape(words.describe_restrictions(name, [(step.says, step.plan) for step in steps])))
    body = [_ablation_row(step, steps[k - 1] if k else None, asked.memory_gb) for k, step in enumerate(steps)]
    head = ["each row adds", "mesh", "sent per GPU", "communication", "step", "memory", "fits", "proven"]
    frame.show_table(head, body, f"from the exact search to {name}")
    frame.offer_data("these rows", f"restrictions-{method}", lambda: rows.restriction_rows(steps))


def _ablation_row(step: AblationStep, before: AblationStep | None, memory_gb: float | None) -> list[str]:
    says = html.escape(step.says)
    if step.plan is None:
        return [says, "no plan fits", "", "", "", "", "no", ""]
    c, old = step.plan.cost, before.plan.cost if before and before.plan else None
    return [
        says,
        html.escape(words.full_mesh_words(step.plan)),
        units.traffic(sent_per_gpu(step.plan)),
        units.seconds(c.comm_time_s) + _change(c.comm_time_s, old.comm_time_s if old else 0),
        units.seconds(c.step_time_s) + _change(c.step_time_s, old.step_time_s if old else 0),
        units.memory(c.memory_bytes["peak"]),
        fits_mark(step.plan, step.plan.cluster, memory_gb),
        html.escape(words.describe_proof(step.plan)),
    ]


def _change(value: float, before: float) -> str:
    if not before or abs(value / before - 1) < 0.001:
        return ""
    ratio = value / before - 1
    return f" <span class='aside'>{'+' if ratio > 0 else '−'}{units.percent(abs(ratio))}</span>"
