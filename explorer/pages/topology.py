"""Topology: what does my network do to it? The cluster with a plan's traffic on its links, and what other links would do."""

from __future__ import annotations

import html
from functools import partial

import streamlit as st

from explorer import components
from explorer.address import setups
from explorer.analysis import other_links as linked
from explorer.components import frame, growing, opened
from explorer.figures import topology
from explorer.session import state, stated
from explorer.text import units, words
from planner_core.core import PHASES, Cluster, Graph, Plan, PlannerError
from planner_core.planning import Request, Result

# factors of bandwidth and of latency by level, as in the address (a string here would be shown on the page)
OUT_OF = (" per GPU", " out of each node", " out of each group of nodes")
Links = tuple[tuple[str, ...], tuple[str, ...]]


@st.cache_resource(max_entries=state.CACHED_RESULTS, show_spinner=False)
def replanned(request: Request, name: str, links: Links) -> Plan | None:
    """The best plan on other links, kept; `name` is the cluster's."""
    return linked.best_there(request, linked.changed(state.plan(request).cluster, *links), state.own_graph(request))


@st.cache_resource(max_entries=state.CACHED_RESULTS, show_spinner=False)
def by_goal(request: Request, links: Links) -> linked.Goals | str:
    """The best plans by each goal, kept; a sentence where there are none."""
    try:
        return linked.goals(request, linked.changed(state.plan(request).cluster, *links), state.own_graph(request))
    except PlannerError as error:
        return str(error)


def sliders(cluster: Cluster) -> Links:
    """Bandwidth and latency of every level; returns the factors."""
    levels = cluster.levels
    found = []
    with st.container(key="wide_links"):
        columns = st.columns(len(levels), gap="large")
    for key, words_of in (("bandwidth", linked.bandwidth_words), ("latency", linked.latency_words)):
        current = [*state.value(key)[: len(levels)], *["1"] * (len(levels) - len(state.value(key)))]
        for factor in dict.fromkeys(f for f in current if f not in linked.FACTORS):
            st.warning(
                f"“{frame.text(factor)}” for {key} in the address is not one of {', '.join(linked.FACTORS)}; using 1 instead."
            )
        current = [f if f in linked.FACTORS else "1" for f in current]
        for i, level in enumerate(levels):
            widget = state.seed(f"w_{key}_{i}", current[i])
            with columns[i]:
                st.select_slider(
                    f"{level.name}: {key}" + OUT_OF[min(i, 2)] * (key == "bandwidth"),
                    linked.FACTORS,
                    format_func=partial(words_of, level),
                    key=widget,
                    on_change=_slid,
                    args=(key, len(levels)),
                )
        found.append(tuple(current) if set(current) != {"1"} else ())
    return found[0], found[1]


def _slid(key: str, count: int) -> None:
    chosen = tuple(str(st.session_state[f"w_{key}_{i}"]) for i in range(count))
    state.change(**{key: chosen if set(chosen) != {"1"} else ()})


def links_table(plan: Plan, shown: tuple[str, ...]) -> None:
    """Load of every level by mesh axis and phase."""
    cluster = topology.cluster_of(plan)
    found = [x for x in topology.loads(plan) if x.phase in shown]
    rows = []
    for x in sorted(found, key=lambda x: (x.level, x.axis, PHASES.index(x.phase))):
        level = cluster.levels[x.level]
        rows.append(
            [
                html.escape(level.name),
                html.escape(x.axis),
                x.phase,
                units.traffic(x.num_bytes),
                f"{units.significant(level.bytes_per_s / 1e9)} GB/s",
                units.seconds(x.time_s),
            ]
        )
    if rows:
        frame.table(
            ["link", "mesh axis", "phase", "sent out of one unit", "reachable bandwidth", "time on the wire"],
            rows,
            "load of the links",
        )
    else:
        silent = " The optimizer updates what each GPU holds and sends nothing." if "optimizer" in shown else ""
        st.caption(f"Nothing is sent in this part of the step.{silent}")


# what the drawing and the table of links count
UNITS = (
    "A unit of the first level is a GPU, of the next a node, then a group of nodes; the busiest one is told. Below the GPUs an "
    "arc joins each pair that talks. Who sends to whom follows the algorithm that is cheapest for each collective: ring, tree, "
    "rings of rings, pairwise."
)


def cluster_and_links(plan: Plan, shown: tuple[str, ...], other: Plan | None) -> None:
    """The drawing, and the table of the links: beside it where the cluster is narrow. Where there is an `other` plan, both stand
    beside each other."""
    if other is not None:
        with st.container(key="wide_cluster"):
            columns = st.columns(2, gap="large")
        for k, (column, one) in enumerate(zip(columns, (plan, other), strict=True)):
            with column:
                sent = sum(t.wire_bytes for t in one.cost.traffic if t.phase in shown)
                st.markdown(f"**{frame.text(words.title(one))}**: {units.traffic(sent)} sent per GPU")
                components.svg(topology.drawing(one, shown, frame.theme(), (plan, other), per_row=2), key=f"beside_{k}")
                links_table(one, shown)
        st.caption(UNITS)
        return
    if topology.cluster_of(plan).num_gpus > 2 * topology.cluster_of(plan).levels[0].size:
        components.svg(topology.drawing(plan, shown, frame.theme()), key="cluster_drawing")
        links_table(plan, shown)
        st.caption(UNITS)
        return
    with st.container(key="wide_cluster"):
        left, right = st.columns(2, gap="medium")
    with left:
        components.svg(topology.drawing(plan, shown, frame.theme()), key="cluster_drawing")
    with right:
        links_table(plan, shown)
        st.caption(UNITS)


def other_links(plan: Plan, graph: Graph, result: Result, there: Cluster, links: Links) -> Plan:
    """The plan (of a step of `graph`) as it was and on the links as set, and the best plan there; returns the plan on the links as set."""
    if links == ((), ()):
        return plan
    moved = linked.repriced(plan, there, graph)
    with st.spinner("Planning on these links"):
        best = replanned(result.request, result.cluster.name, links)
    rows = [_row("this plan, links as published", plan), _row("this plan, links as set", moved)]
    if best is not None:
        rows.append(_row("best plan for the links as set", best))
    frame.table(HEAD, rows, "the plan on other links")
    if best is None:
        st.caption("No plan fits the memory.")
    else:
        st.markdown(frame.text(_verdict(moved, best)))
    return moved


HEAD = ["which", "plan", "mesh", "sent per GPU", "communication", "of that exposed", "step"]


def _row(title: str, p: Plan) -> list[str]:
    c = p.cost
    return [
        f"<span class='title'>{html.escape(title)}</span>",
        html.escape(words.describe(p)) + ("" if p.fits else " (does not fit)"),
        html.escape(words.mesh_words(p.mesh)),
        units.traffic(sum(t.wire_bytes for t in c.traffic)),
        units.seconds(c.comm_time_s),
        units.seconds(c.exposed_comm_time_s),
        units.seconds(c.step_time_s),
    ]


def _verdict(moved: Plan, best: Plan) -> str:
    gain = 1 - best.cost.step_time_s / moved.cost.step_time_s
    if moved.cost.step_time_s > best.cost.step_time_s * (1 + words.doubt(moved, best)):
        return f"Planning anew for these links makes the step {units.percent(gain)} shorter."
    return "Planning anew for these links gains nothing beyond the estimate’s error: the plan still holds."


def volume_beside_topology(result: Result, links: Links) -> None:
    """The plan by bytes beside those by time: what each costs on the real links."""
    st.markdown(
        "**Cost by volume beside cost by topology**",
        help="By volume every byte costs the same on every link, as in TAP. By topology a byte costs what its link takes, "
        "shared among the groups that use it at once, as in TAPS.",
    )
    with st.spinner("Planning by volume and by topology"):
        found = by_goal(result.request, links)
    if isinstance(found, str):
        st.caption(state.in_words(found))
        return
    rows = [
        _row("least bytes, links unseen", found.volume),
        _row("least communication time", found.communication),
        _row("least step time", found.time),
    ]
    frame.table(HEAD, rows, "cost by volume beside cost by topology")
    volume, comm, fast = found.volume.cost, found.communication.cost, found.time.cost
    told = []
    if volume.comm_time_s > comm.comm_time_s * (1 + words.doubt(found.volume, found.communication)):
        told.append(
            "Bytes are not time: the plan of fewest bytes communicates "
            f"{words.times(volume.comm_time_s, comm.comm_time_s)} as long as need be."
        )
    if volume.step_time_s > fast.step_time_s * (1 + words.doubt(found.volume, found.time)):
        told.append(
            f"The step of the plan of fewest bytes takes {words.times(volume.step_time_s, fast.step_time_s)} as long as the best."
        )
    st.markdown(
        " ".join(told)
        or "Here counting bytes and knowing the links lead to the same times within the estimate’s error."
    )


def _beside(plans: dict[str, Plan], name: str, result: Result, there: Cluster) -> Plan | None:
    """What the visitor runs now, on these links, or the recommended plan where that is shown itself; None where no setup is stated."""
    if setups.NAME not in plans:
        return None
    other = setups.NAME if name != setups.NAME else next(iter(plans))
    if there == result.cluster:
        return plans[other]
    return linked.repriced(plans[other], there, stated.home(other, result).graph)


DRAWING = 408  # pixels, with the table beside it, in a wide window; the style sheet keeps more in a narrow one


def page() -> None:
    """The page."""
    if st.session_state.pop("to_plans", False):
        st.switch_page("explorer/pages/plans.py")
    result = frame.open_page("topology")
    plans = stated.plans(result)
    left, right = st.columns(2, vertical_alignment="bottom")
    with left:
        name, plan = frame.plan_choice(plans)
    with right:
        shown = frame.phases()
    st.markdown(f"Mesh {frame.text(words.mesh_words(plan.mesh))}. {frame.text(words.describe(plan))}.")
    drawing = st.container(key="room_of_cluster", height=DRAWING, border=False)
    st.markdown(
        "**Other links**",
        help="What would this plan take on a faster or slower network, and which plan would be best there?",
    )
    links = sliders(result.cluster)
    there = linked.changed(result.cluster, *links)
    home = stated.home(name, result)
    moved = other_links(plan, home.graph, result, there, links)
    with drawing:
        cluster_and_links(moved, shown, _beside(plans, name, result, there))
        opened.elsewhere({"": moved}, {"": home})
        frame.how_sure("How sure are times on these links?")
    volume_beside_topology(result, links)
    growing.section(result)


page()
