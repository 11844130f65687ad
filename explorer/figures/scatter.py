"""Scatters: every candidate of one block, and published runs. Pure: values in, plotly out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from explorer.analysis import candidate_marks as marks
from explorer.figures.palette import COMMUNICATION, COMPUTE, Theme
from explorer.figures.scale import axis_range
from explorer.figures.style import GIB, apply_style, draw_limit_line, draw_open_marks, escape
from explorer.text import units
from explorer.text.words import gpu_title
from planner_core.planning.pricing import PublishedRun, load_own_runs, load_published_runs
from planner_core.search.candidates import Candidates

BORDERLESS_FROM = 20_000
"""More marks than this are drawn without a border, for speed."""


def candidates_scatter(
    block: Candidates,
    picked: int | None,
    capacity_bytes: int,
    theme: Theme,
    *,
    same: int | None = None,
) -> go.Figure:
    """Draw every assignment of a block's matrices as a plan of the whole model, their Pareto front, and the GPU's memory.

    `same` is the candidate that the chosen plan equals.
    """
    drawn = marks.can_run(block)
    x, y = block.model_comm_s * 1e3, block.model_memory_bytes / GIB
    front = np.flatnonzero(block.on_front & drawn)
    front = front[np.argsort(x[front])]
    figure = go.Figure()
    _draw_marks(figure, marks.group_by_cost(block), theme)
    figure.add_scattergl(
        x=x[front].astype(np.float32),  # finer than a pixel, in half the bytes that the browser is sent
        y=y[front].astype(np.float32),
        mode="lines+markers",
        name="front: none is better in both",
        customdata=front.astype(np.int32),
        marker={"size": 9, "color": COMPUTE},
        line={"width": 1.2, "color": COMPUTE},
        hovertemplate="communication %{x:.3g} ms<br>memory %{y:.3g} GiB<extra>on the front</extra>",
    )
    if same is not None and drawn[same]:
        draw_open_marks(figure, [(x[same], y[same])], "as the chosen plan does", "diamond", (14, 2), theme.text)
    if picked is not None and 0 <= picked < len(x) and drawn[picked]:
        draw_open_marks(figure, [(x[picked], y[picked])], "chosen candidate", "circle", (20, 2), theme.text)
    draw_limit_line(figure, capacity_bytes, theme)
    low, high = axis_range(y[drawn].tolist())
    if high < capacity_bytes / GIB < MAX_LIMIT_RATIO * high:
        high = 1.08 * capacity_bytes / GIB
    figure.update_xaxes(title="communication per step, ms", range=axis_range(x[drawn].tolist()))
    figure.update_yaxes(title="memory per GPU, GiB", range=(low, high))
    return apply_style(figure, theme, 430)


MAX_LIMIT_RATIO = 2.0
"""The line of memory is left out where it lies this many times as high as the highest candidate: all that differs would be a blot."""


def _draw_marks(figure: go.Figure, drawn: marks.CandidateMarks, theme: Theme) -> None:
    """Draw a mark for each cost of the candidates that can run."""
    several = drawn.count.max(initial=1) > 1
    figure.add_scattergl(
        x=drawn.x_ms,
        y=drawn.y_gib,
        mode="markers",
        name=f"{units.whole(drawn.count.sum())} candidates",
        customdata=drawn.first,
        text=drawn.count if several else None,
        marker={
            "size": 5 if len(drawn.first) <= BORDERLESS_FROM else 4,
            "color": theme.faint,
            "opacity": 0.4,
            "line": {"width": 0},
        },
        hovertemplate="communication %{x:.3g} ms<br>memory %{y:.3g} GiB<extra>"
        + ("%{text} cost this" if several else "candidate")
        + "</extra>",
    )


# --- published runs -----------------------------------------------------------------------------------

FAMILY_COLOURS = {
    "FSDP": COMPUTE,
    "data parallel or ZeRO-1": COMMUNICATION,
    "tensor parallel": "#009E73",
    "one rank": "#CC79A7",
}
KINDS_OF_FAMILY = {
    "FSDP": ("FSDP, one node", "FSDP, to 128 GPUs", "FSDP, more"),
    "data parallel or ZeRO-1": ("data parallel or ZeRO-1, to 64 ranks", "data parallel or ZeRO-1, more ranks"),
    "tensor parallel": ("tensor parallel in a node",),
    "one rank": ("one rank, no network",),
}
"""The kinds of published runs (`PublishedRun.kind`) that have one colour."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")
TOLERANCE = 0.1
"""The band: predicted this share more or less than measured."""


def errors_by_gpus(runs: Sequence[PublishedRun], left_out: str, theme: Theme) -> go.Figure:
    """Draw the error of each run against its number of GPUs."""
    figure = go.Figure()
    figure.add_hrect(y0=-100 * TOLERANCE, y1=100 * TOLERANCE, fillcolor=theme.muted, opacity=0.12, line_width=0)
    figure.add_hline(y=0, line={"color": theme.muted, "width": 1.2})
    _draw_runs(figure, runs, left_out, theme)
    _draw_legend(figure, runs, theme)
    counts = sorted({r.gpus for r in runs})
    figure.update_xaxes(title="GPUs", type="log", tickvals=counts, ticktext=[str(n) for n in counts], tickangle=0)
    figure.update_yaxes(title="predicted over measured, %", zeroline=False)
    return apply_style(figure, theme, 460)


def _gpu_names() -> list[str]:
    """Return the GPUs of all runs: a filter changes no symbol."""
    return sorted({r.gpu for r in (*load_published_runs(), *load_own_runs())})


def _draw_runs(figure: go.Figure, runs: Sequence[PublishedRun], left_out: str, theme: Theme) -> None:
    gpus = _gpu_names()
    for family, colour in FAMILY_COLOURS.items():
        of_family = [r for r in runs if r.kind in KINDS_OF_FAMILY[family]]
        figure.add_scatter(
            x=[r.gpus for r in of_family],
            y=[100 * r.error(left_out) for r in of_family],
            mode="markers",
            name=family,
            showlegend=False,
            customdata=[r.id for r in of_family],
            hovertemplate="%{hovertext}<extra></extra>",
            hovertext=[_run_hover(r, left_out) for r in of_family],
            marker={
                "symbol": [SYMBOLS[gpus.index(r.gpu) % len(SYMBOLS)] for r in of_family],
                "size": 9,
                "color": colour,
                "opacity": 0.85,
                "line": {"width": 1, "color": theme.surface},
            },
        )


def _draw_legend(figure: go.Figure, runs: Sequence[PublishedRun], theme: Theme) -> None:
    """Draw the legend: what colours and symbols mean."""
    gpus = _gpu_names()
    families = [f for f, kinds in KINDS_OF_FAMILY.items() if any(r.kind in kinds for r in runs)]
    shown_gpus = {r.gpu for r in runs}
    keys = [(f, "circle", FAMILY_COLOURS[f]) for f in families]
    keys += [(gpu_title(g), SYMBOLS[i % len(SYMBOLS)], theme.muted) for i, g in enumerate(gpus) if g in shown_gpus]
    for name, symbol, colour in keys:
        marker = {"symbol": symbol, "size": 9, "color": colour}
        figure.add_scatter(x=[None], y=[None], mode="markers", name=name, marker=marker)


def _run_hover(r: PublishedRun, left_out: str) -> str:
    lines = (
        f"<b>{escape(r.model)} on {r.gpus} × {escape(gpu_title(r.gpu))}</b>",
        f"{escape(r.layout)}; {escape(r.workload)}",
        f"measured {units.seconds(r.measured_s)}, predicted {units.seconds(r.seconds[left_out])} ({units.change(r.error(left_out))})",
        escape(r.source),
    )
    return "<br>".join(lines)
