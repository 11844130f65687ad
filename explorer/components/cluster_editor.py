"""The editor of a cluster: every figure of its GPU and of its links with its source, and a form for the visitor's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import streamlit as st

from explorer.address import cluster_sources, own_cluster, settings
from explorer.address.cluster_sources import MINE
from explorer.session import state
from explorer.text import units
from planner_core.core import Cluster

UNITS = ("GPU", "node", "group of nodes")
GPU = (
    ("peak_flops", "half_tflops", "Products in bf16 (or fp16), TFLOP/s, without sparsity"),
    ("memory_bytes", "memory_gib", "Memory, GiB"),
    ("memory_bytes_per_s", "memory_gb_per_s", "Memory bandwidth, GB/s"),
)
"""For each figure of a GPU: its name in the file, in `own_cluster.Figures`, and on the page."""


def form(cluster: Cluster) -> None:
    """The figures with their sources, each to be changed; what is left empty stays."""
    now, sources = own_cluster.figures(cluster), cluster_sources.of(state.values(), cluster)
    with st.form("own_gpu", border=False):
        st.markdown("**A GPU and links by their figures**")
        st.text_input("Name of the GPU", placeholder=now.name, max_chars=40, key="w_gpu_name")
        for key, field, label in GPU:
            _figure(label, f"w_gpu_{field}", getattr(now, field), sources.gpu[key])
        for k, (level, (rate, latency)) in enumerate(zip(cluster.levels, now.links, strict=True)):
            unit = UNITS[min(k, len(UNITS) - 1)]
            told = sources.levels[k]
            _figure(f"{level.name}: GB/s out of a {unit}, one way", f"w_link_{k}_rate", rate, told["unit_bytes_per_s"])
            _figure(f"{level.name}: latency of a message, µs", f"w_link_{k}_latency", latency, told["latency_s"])
        st.text_input("Source of what you give here", placeholder=MINE, max_chars=120, key="w_figures_source")
        st.caption(
            f"The share of the peaks that {now.name} reaches stays, for no data sheet says it: {sources.gpu['efficiency']}"
        )
        st.form_submit_button("Plan on these figures", on_click=_take, args=(cluster, sources))


def file(cluster: Cluster) -> str:
    """The cluster as a file, each figure with its source."""
    data, sources = cluster.to_json(), cluster_sources.of(state.values(), cluster)
    data["gpu"]["sources"] = dict(sources.gpu)
    for level, told in zip(data["levels"], sources.levels, strict=True):
        level["sources"] = dict(told)
    return json.dumps(data, indent=1)


def _figure(label: str, key: str, value: float, source: str) -> None:
    st.number_input(label, min_value=0.001, max_value=1e7, value=None, key=key, placeholder=units.significant(value))
    st.caption(f"{units.significant(value)}: {source}")


def _take(cluster: Cluster, sources: cluster_sources.Sources) -> None:
    """Callback: keep the cluster with these figures, and plan on it."""
    s, now = st.session_state, own_cluster.figures(cluster)
    own = s["w_figures_source"].strip() or MINE
    gpu = {k: own if s[f"w_gpu_{field}"] else sources.gpu[k] for k, field, _ in GPU}
    levels: list[Mapping[str, str]] = []
    links = []
    for k, (rate, latency) in enumerate(now.links):
        given = s[f"w_link_{k}_rate"], s[f"w_link_{k}_latency"]
        links.append((given[0] or rate, given[1] or latency))
        told = sources.levels[k]
        levels.append({key: own if one else told[key] for key, one in zip(cluster_sources.LEVEL, given, strict=True)})
    given_gpu = {field: s[f"w_gpu_{field}"] for _, field, _ in GPU if s[f"w_gpu_{field}"]}
    wanted = replace(now, name=s["w_gpu_name"] or "", links=tuple(links), **given_gpu)
    name = own_cluster.keep(own_cluster.with_figures(cluster, wanted, {**sources.gpu, **gpu}, levels))
    state.change(cluster=name, **dict.fromkeys(settings.CLUSTER_KEYS))
