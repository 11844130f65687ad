"""Measured: how far are the predictions off? Published runs, predicted against measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import streamlit as st

from explorer.address import uploaded_cluster
from explorer.address.settings import FITTED_RUNS
from explorer.components import frame
from explorer.figures import scatter
from explorer.session import state
from explorer.text import units, words
from planner_core.planning.pricing import (
    FITS,
    RUNS_WITH_STAGES,
    PublishedRun,
    count_runs,
    load_own_runs,
    load_published_runs,
)

# settings that leave runs out, and what of a run they ask for (a string here would be shown on the page)
FILTERS: Mapping[str, tuple[str, Callable[[PublishedRun], str | int]]] = {
    "from_source": ("Source", lambda r: r.source),
    "on_gpu": ("GPU", lambda r: r.gpu),
    "of_kind": ("Layout", lambda r: r.kind),
    "on_nodes": ("Nodes", lambda r: r.nodes),
}

FIRST_ROWS = 8  # runs that are listed at once (a string here would be shown on the page)


def filter_runs(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Draw the filters; return the runs that pass them all."""
    passing = list(runs)
    with st.container(horizontal=True, key="run_filters"):
        for key, (label, of) in FILTERS.items():
            values = sorted({of(r) for r in runs}, key=lambda v: (0, v) if isinstance(v, int) else (1, v))
            named = {frame.slug(v): words.gpu_title(str(v)) if key == "on_gpu" else str(v) for v in values}
            frame.warn_missing(label.lower(), state.value(key), list(named), "It is left out")
            frame.choose_several(label, key, named, placeholder="all", width=260)
            chosen = {v for v in state.value(key) if v in named}
            passing = [r for r in passing if not chosen or frame.slug(of(r)) in chosen]
    return passing


def choose_fit() -> str:
    """Draw the control for the runs that the constants of a prediction have not seen."""
    widget = state.widget_key("w_left_out", state.value("left_out"))
    st.segmented_control(
        "Constants fitted to",
        list(FITTED_RUNS),
        default=state.value("left_out"),
        format_func=FITTED_RUNS.__getitem__,
        key=widget,
        required=True,
        wrap=True,
        on_change=state.take_widget_value,
        args=("left_out", widget),
        help="A prediction is honest where the constants have not seen the run. A group: the same source, model, GPU, layout and "
        "recomputation.",
    )
    return FITS[list(FITTED_RUNS).index(state.value("left_out"))]


def describe_errors(runs: Sequence[PublishedRun], out: str) -> str:
    """Say how far predictions are off; this project's own steps of one rank apart, since they say nothing of a network."""
    ours = {r.id for r in load_own_runs()}
    published, own_steps = ([r for r in runs if (r.id in ours) is is_own] for is_own in (False, True))
    sentences = []
    if published:
        errors = np.abs([r.error(out) for r in published])
        sources = len({r.source for r in published})
        sentences.append(
            f"**{len(published)} published runs** of {sources} source{'s' * (sources > 1)}: half are within "
            f"**{units.percent(float(np.median(errors)))}** of what was measured, nine in ten within "
            f"**{units.percent(float(np.quantile(errors, 0.9)))}**."
        )
    if own_steps:
        errors = np.abs([r.error(out) for r in own_steps])
        sentences.append(
            f"**{len(own_steps)} step{'s' * (len(own_steps) > 1)} of one rank**, measured by this project: "
            f"half within **{units.percent(float(np.median(errors)))}**, all within {units.percent(float(errors.max()))}."
        )
    return " ".join(sentences).replace(" %", "\u00a0%")  # on a phone a line began with the sign


def draw_errors(runs: Sequence[PublishedRun], out: str) -> None:
    """Draw the error of every run; a click on a point shows its source below."""
    frame.show_chart(
        scatter.errors_by_gpus(runs, out, frame.theme()),
        "runs_errors",
        f"Errors of {len(runs)} runs by their number of GPUs; the table below holds the numbers",
        selection_mode="points",
        on_select=_pick,
    )


def _pick() -> None:
    if points := st.session_state["runs_errors"]["selection"]["points"]:
        st.session_state["run_picked"] = frame.point_data(points[0])


def show_picked_run(runs: Sequence[PublishedRun], out: str) -> None:
    """Draw the run that was clicked, with its source."""
    run = next((r for r in runs if r.id == st.session_state.get("run_picked")), None)
    if run is None:
        st.caption("In the band a prediction is at most 10 % off. Click a run for its source.")
        return
    contradiction = (
        f" The source’s own tables contradict each other here: {run.contradicted}." if run.contradicted else ""
    )
    st.markdown(
        f"**{frame.escape(_run_name(run))}**, {frame.escape(run.layout)}; {frame.escape(run.workload)}: "
        f"measured {units.seconds(run.measured_s)}, predicted {units.seconds(run.seconds[out])} ({units.change(run.error(out))}). "
        f"Source: {frame.escape(run.source)}, {frame.escape(run.reference)}.{frame.escape(contradiction)}"
    )


def show_runs(runs: Sequence[PublishedRun], out: str) -> None:
    """Draw every run, the furthest off first; a click shows its source."""
    furthest_first = sorted(runs, key=lambda r: -abs(r.error(out)))
    rows = [
        {
            "model": r.model,
            "GPU": r.gpu,
            "GPUs": r.gpus,
            "layout": r.layout,
            "measured, s": r.measured_s,
            "predicted, s": r.seconds[out],
            "error, %": 100 * r.error(out),
            "work": r.workload,
            "source": f"{r.source}: {r.reference}",
        }
        for r in furthest_first
    ]
    _show_rows("runs_table", furthest_first[:FIRST_ROWS], out)
    if rest := furthest_first[FIRST_ROWS:]:
        with st.expander(f"{len(rest)} more", key="more_runs", on_change="rerun") as box:
            if box.open:
                _show_rows("more_runs_table", rest, out)
    frame.offer_data("these runs", "published-runs", lambda: rows, of_request=False)


def _show_rows(key: str, runs: Sequence[PublishedRun], out: str) -> None:
    frame.choose_row(
        key,
        "Runs, the furthest off first",
        ["run", "measured step", "predicted step", "error"],
        [_table_row(r, out) for r in runs],
        lambda run_id: st.session_state.update(run_picked=run_id),
        chosen=st.session_state.get("run_picked", ""),
    )


def _run_name(run: PublishedRun) -> str:
    return f"{run.model} on {run.gpus} × {words.gpu_title(run.gpu)}"


def _table_row(run: PublishedRun, out: str) -> dict[str, object]:
    """Return a run as a row that can be chosen."""
    figures = (
        (units.seconds(run.measured_s), run.measured_s),
        (units.seconds(run.seconds[out]), run.seconds[out]),
        (units.change(run.error(out)), run.error(out)),
    )
    return {
        "id": run.id,
        "name": _run_name(run),
        "what": f"{run.layout}; {run.workload}",
        "fits": True,
        "cells": [{"figure": figure, "below": "", "order": order} for figure, order in figures],
    }


def show_calibration() -> None:
    """Draw the timings of a calibrated cluster of the visitor, predicted before and after."""
    fits = [f for f in uploaded_cluster.calibration_fits(state.value("cluster")) if f.timings]
    if not fits:
        return
    st.markdown("**Your cluster, before and after its calibration**")
    rows = [
        {
            "what": f.group,
            "timings": f.before.rows,
            "source": f.source,
            "median off before, %": 100 * f.before.median,
            "after, %": 100 * f.after.median,
            "nine in ten before, %": 100 * f.before.nine_in_ten,
            "nine in ten after, %": 100 * f.after.nine_in_ten,
        }
        for f in fits
    ]
    number = st.column_config.NumberColumn(format="%.1f")
    columns = {name: number for name in rows[0] if name.endswith("%")}
    frame.show_records(rows, "The fits of your cluster’s calibration", row_height=34, column_config=columns)


def page() -> None:
    """Draw the page."""
    state.begin_page("measured")
    for problem in state.address_problems():
        st.warning(problem)
    st.markdown(
        "### How far are predicted steps from measured ones?",
        help="Each run is predicted from its model, GPUs, links and layout alone. Only runs are here whose shape, batch, layout and GPU "
        f"their source states in full. The range of a plan with pipeline stages is that of {count_runs(RUNS_WITH_STAGES)} runs, which "
        "docs/PUBLISHED.md lists. The range beside a step time is made of the errors of runs of its kind, each predicted by a fit that did "
        "not see its source.",
    )
    show_calibration()
    out = choose_fit()
    runs = filter_runs([*load_published_runs(), *load_own_runs()])
    if not runs:
        st.info("No run passes these filters. Take one away.")
        return
    st.markdown(describe_errors(runs, out))
    draw_errors(runs, out)
    show_picked_run(runs, out)
    show_runs(runs, out)


page()
