"""Figures of sweeps over any one quantity. Pure: values in, plotly out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from explorer.analysis.sweep import SweepPoint
from explorer.figures.palette import COMMUNICATION, COMPUTE, Theme
from explorer.figures.style import LIMIT_WORDS, apply_style, draw_open_marks
from explorer.text import recipe, units

UNORDERED = ("cluster", "model")
"""Quantities whose values have no order, so that no line joins them."""


def sweep_figures(
    quantity: str, points: Sequence[SweepPoint], limits: Mapping[str, int], here: str, theme: Theme
) -> dict[str, go.Figure]:
    """Draw step time, tokens per second and memory of the best plan at each value of one quantity, by title.

    `limits`: bytes per GPU that a plan may take, by value. `here`: the current value, which has a ring. A plan that does not fit is
    a cross.
    """
    plans = [(p, p.plan) for p in points if p.plan is not None]
    times = [plan.cost.step_time_s for _, plan in plans]
    unit, factor = ("s", 1.0) if any(t >= 1 for t in times) else ("ms", 1e3)
    memory = "Memory per GPU, GiB"
    measures = {
        f"Step time, {unit}": [t * factor for t in times],
        "Tokens a second": [p.tokens_per_s for p, _ in plans],
        memory: [plan.cost.memory_bytes["peak"] / units.GIB for _, plan in plans],
    }
    figures = {title: _draw_points(quantity, points, ys, here, theme) for title, ys in measures.items()}
    _draw_limits(figures[memory], points, limits, theme)
    return figures


def _draw_limits(figure: go.Figure, points: Sequence[SweepPoint], limits: Mapping[str, int], theme: Theme) -> None:
    """Draw a dashed line at the memory that plans may take."""
    names = [p.name for p in points if p.plan is not None]
    figure.add_scatter(
        x=names,
        y=[limits[n] / units.GIB for n in names],
        mode="lines",
        hovertemplate=f"{LIMIT_WORDS} %{{y:.4g}} GiB<extra></extra>",
        # Values are other clusters or settings, each with its own limit: between two of them the line is a step, not a slope.
        line={"color": theme.text, "width": 1.5, "dash": "dash", "shape": "hvh"},
    )


def _draw_points(
    quantity: str, points: Sequence[SweepPoint], ys: Sequence[float], here: str, theme: Theme
) -> go.Figure:
    known = [(p, p.plan) for p in points if p.plan is not None]
    figure = go.Figure()
    figure.add_scatter(
        x=[p.name for p, _ in known],
        y=ys,
        mode="markers" if quantity in UNORDERED else "lines+markers",
        hovertext=[
            f"{p.name}: {recipe.describe_plan(plan)}" + ("" if plan.fits else ", does not fit") for p, plan in known
        ],
        hovertemplate="%{hovertext}<br>%{y:.4g}<extra></extra>",
        line={"color": theme.muted, "width": 1.5},
        marker={
            "size": 10,
            "color": [COMPUTE if p.fits else COMMUNICATION for p, _ in known],
            "symbol": ["circle" if p.fits else "x" for p, _ in known],
        },
    )
    at = [(p.name, y) for (p, _), y in zip(known, ys, strict=True) if p.name == here]
    draw_open_marks(figure, at, "current value", "circle", (18, 2), theme.text)
    apply_style(figure, theme, 270)
    figure.update_xaxes(
        type="category", categoryorder="array", categoryarray=[p.name for p in points], title_text=quantity
    )
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(showlegend=False, margin={"b": 60, "t": 10})
    return figure
