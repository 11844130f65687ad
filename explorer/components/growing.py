"""Lower half of the Topology page: the best mesh for each number of GPUs, and where tensor parallelism stops paying."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import replace

import streamlit as st

from explorer.address import settings
from explorer.components import frame
from explorer.figures import scaling as grow_charts
from explorer.session import state
from explorer.text import units, words
from planner_core.core import InputError, cluster_names, load_cluster
from planner_core.planning import Request, Result
from planner_core.planning.analysis import COUNTS, Size, grow, resized

CACHED_SIZES = 400


@st.cache_resource(max_entries=CACHED_SIZES, show_spinner=False)
def _size(request: Request, cluster: str, num_gpus: int, batch: int | None) -> Size | str:
    """The plans at one number of GPUs, or in a sentence why there are none."""
    own = state.own_graph(request)
    try:
        return grow(request, load_cluster(cluster), num_gpus, batch, own)
    except InputError as error:
        return str(error)


def section(result: Result) -> None:
    """The control, and the figures once interconnects are chosen."""
    st.markdown(
        "**Best mesh as the GPUs grow in number**",
        help="The nodes and links of each cluster stay as they are; only the number of nodes changes. Every mesh of one or "
        "two axes is searched exactly.",
    )
    with st.container(key="wide_grow_controls"):
        left, right = st.columns([3, 2], vertical_alignment="bottom")
    names = interconnects((*state.value("grow"), result.cluster.name))
    with left:
        widget = state.seed("w_grow", [n for n in state.value("grow") if n in names])
        st.multiselect(
            "Interconnects, from 2 to 1 024 GPUs",
            names,
            format_func=_link_words,
            key=widget,
            placeholder="choose one or more",
            on_change=lambda: state.change(grow=tuple(st.session_state[widget])),
        )
    with right:
        own = result.request.model.startswith("own-")
        mode = state.seed("w_grow_batch", "fixed" if own else state.value("grow_batch"))
        st.segmented_control(
            "Batch",
            list(settings.GROW_BATCH),
            format_func=lambda b: settings.GROW_BATCH[b],
            key=mode,
            required=True,
            wrap=True,
            disabled=own,
            help="An uploaded model keeps its batch: another one would have to be captured anew." if own else None,
            on_change=state.from_widget,
            args=("grow_batch", mode),
        )
    chosen = [n for n in state.value("grow") if n in names]
    if not chosen:
        here = next((n for n in names if n == result.cluster.name), names[0])
        st.button(
            f"Work it out for {_link_words(here)}", key="grow_here", on_click=state.change, kwargs={"grow": (here,)},
            icon=":material/trending_up:",
        )  # fmt: skip
        st.caption("Takes seconds to a minute for each interconnect, by model; what has been worked out is kept.")
        return
    found = _sweep(result, chosen, per_gpu=st.session_state[mode] == "per-gpu")
    _show(found, result)


def interconnects(first: Sequence[str]) -> list[str]:
    """Clusters of several levels, one of each kind of nodes and links; of equal kinds the one named `first`."""
    kinds: dict[object, str] = {}
    known = cluster_names()
    for name in (*(n for n in first if n in known), *known):
        cluster = load_cluster(name)
        if len(cluster.levels) > 1:
            there = resized(cluster, max(COUNTS))
            kinds.setdefault((there.gpu, there.levels), name)
    return sorted(kinds.values())


def _link_words(name: str) -> str:
    cluster = load_cluster(name)
    return f"{words.cluster_words(cluster).partition(' × ')[2]}, {' and '.join(level.name for level in cluster.levels)} ({name})"


def _sweep(result: Result, names: Sequence[str], per_gpu: bool) -> dict[str, list[Size | str]]:
    """Every size on every interconnect, with progress and a way to stop; what is done stays in the cache."""
    asked = state.request()
    count = result.workload.accumulate  # where GPUs are fewer, recomputation may be needed that is not here
    request = replace(asked, accumulate=count, method="exact", objective="time", mesh=None, cluster="")
    place = st.empty()
    found: dict[str, list[Size | str]] = {}
    with place.container():
        st.button(
            "Stop the sweep",
            key="stop_grow",
            on_click=state.change,
            kwargs={"grow": ()},
            help="What is worked out is kept",
        )
        bar = st.progress(0.0, "starting")
        for i, name in enumerate(names):
            for k, n in enumerate(COUNTS):
                bar.progress((i * len(COUNTS) + k) / len(names) / len(COUNTS), f"{name}, {n} GPUs")
                batch = max(1, result.workload.batch * n // result.cluster.num_gpus) if per_gpu else request.batch
                found.setdefault(name, []).append(_size(request, name, n, batch))
    place.empty()
    return found


def _show(found: dict[str, list[Size | str]], result: Result) -> None:
    sizes = {name: [s for s in row if isinstance(s, Size)] for name, row in found.items()}
    problems = dict.fromkeys(s for row in found.values() for s in row if isinstance(s, str))
    for name, row in sizes.items():
        st.markdown(frame.text(grow_charts.stop_words(name, row, load_cluster(name))))
    for text in problems:
        st.warning(state.in_words(text))
    with st.container(key="wide_grow"):
        left, right = st.columns(2, gap="large")
    look = frame.theme()
    with left:
        st.markdown("Largest tensor-parallel degree that pays")
        st.plotly_chart(
            grow_charts.degrees(sizes, look), theme=None, config=frame.CHART, key="grow_degrees",
            alt="Largest tensor-parallel degree that pays against the number of GPUs, by interconnect",
        )  # fmt: skip
    with right:
        st.markdown("Step time of the best plan")
        st.plotly_chart(
            grow_charts.steps(sizes, look), theme=None, config=frame.CHART, key="grow_steps",
            alt="Step time of the best plan against the number of GPUs, by interconnect",
        )  # fmt: skip
    head = ["GPUs", "batch", *(name for name in sizes)]
    by_count = {name: {s.num_gpus: s for s in row} for name, row in sizes.items()}
    rows = []
    for n in COUNTS:
        here = [row.get(n) for row in by_count.values()]
        batch = next((units.whole(s.batch) for s in here if s), "")
        rows.append([units.whole(n), batch, *(_cell(s) for s in here)])
    frame.table(head, rows, "best mesh by number of GPUs and interconnect")
    st.caption(
        "Mesh: data axis × tensor axis, the last within a node first. “Weights split t ways”: over how many GPUs the plan "
        f"splits the use of most weights. A larger degree pays if the step gets more than {units.percent(0.05)} shorter."
    )
    _open(sizes)


def _open(sizes: dict[str, list[Size]]) -> None:
    """What stands behind the table: every mesh and degree that was priced; a row is planned with all its numbers on Plans."""
    box = st.expander("Open the numbers: every mesh and degree of every size", key="opened_grow", on_change="rerun")
    if not box.open:
        return
    found = [
        (name, s, o)
        for name, row in sizes.items()
        for s in row
        for o in (*s.meshes, *s.degrees)
        if math.isfinite(o.step_time_s)
    ]
    found = list(dict.fromkeys(found))
    key = f"grow_rows_{'-'.join(sizes)}"

    def pick() -> None:
        rows = st.session_state[key]["selection"]["rows"]
        if rows:
            name, size, option = found[rows[0]]
            node = load_cluster(name).levels[0].size
            inner = min(node, size.num_gpus)
            state.change(
                cluster=name, nodes=size.num_gpus // inner, gpus=inner if inner != node else None, batch=size.batch, intra=None,
                inter=None, mesh="x".join(map(str, option.mesh.axis_sizes)), method="exact", objective="time", plan="",
            )  # fmt: skip
            st.session_state["to_plans"] = True

    with box:
        st.caption(
            "Step = compute + communication that the step waits for. “Split ways”: over how many GPUs the use of most weights is "
            "split. Choose a row to plan it, with every op, tensor and collective, on Plans."
        )
        st.dataframe(
            [
                {
                    "interconnect": name, "GPUs": s.num_gpus, "batch": s.batch, "mesh": " × ".join(map(str, o.mesh.axis_sizes)),
                    "split ways": o.degree, "step, ms": o.step_time_s * 1e3, "compute, ms": (o.step_time_s - o.exposed_s) * 1e3,
                    "waited, ms": o.exposed_s * 1e3, "memory, GiB": o.memory_bytes / units.GIB, "fits": "yes" if o.fits else "no",
                }
                for name, s, o in found
            ],
            hide_index=True, height=300, on_select=pick, selection_mode="single-row", key=key,
            alt="Every mesh and tensor-parallel degree of every size",
            column_config={
                c: st.column_config.NumberColumn(format="%.4g") for c in ("step, ms", "compute, ms", "waited, ms", "memory, GiB")
            },
        )  # fmt: skip


def _cell(size: Size | None) -> str:
    if size is None:
        return "–"
    best = size.best
    if best is None:
        return "no plan fits the memory"
    sizes = best.mesh.axis_sizes
    mesh = " × ".join(map(str, sizes)) if len(sizes) > 1 else f"all {sizes[0]}"
    split = f"weights split {best.degree} ways" if best.degree > 1 else "weights not split at use"
    return html.escape(f"{mesh}, {units.seconds(best.step_time_s)}") + f"<br><span class='aside'>{split}</span>"
