"""Figures that compare plans: memory and traffic. Pure: values in, plotly out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from explorer.figures.palette import (
    KIND_COLOURS,
    MEMORY_COLOURS,
    MEMORY_KINDS,
    MEMORY_NAMES,
    Theme,
)
from explorer.figures.style import LIMIT_WORDS, apply_style, escape
from explorer.text import units
from explorer.text.words import plan_title
from planner_core.core import PHASES, Plan

GIB = units.GIB
MIN_NAMED_SHARE = 0.005
"""A collective of a smaller share of the largest is a bar of less than a pixel or two, which the legend does not name."""
PATTERNS = (("", ""), ("/", "slanted"), (".", "dotted"))
"""One per mesh axis, so that axes differ without colour; the innermost is plain. As Plotly and as css/parts.css name it."""

Key = tuple[str, str, str]
"""An entry of a legend: words, colour, and class of its pattern (css/parts.css)."""


def memory_bars(plans: Mapping[str, Plan], theme: Theme, limits: Mapping[str, int]) -> go.Figure:
    """Draw memory per GPU stacked by kind; `limits` is what each plan may take, in bytes: one line for all, or one for each."""
    figure = go.Figure()
    names = [_plan_label(p) for p in plans.values()]
    for kind in MEMORY_KINDS:
        sizes = [p.cost.memory_bytes.get(kind, 0) for p in plans.values()]
        figure.add_bar(
            y=names,
            x=[s / GIB for s in sizes],
            name=MEMORY_NAMES[kind],
            orientation="h",
            marker_color=MEMORY_COLOURS[kind],
            marker_line={"width": 1, "color": theme.surface},
            hovertext=[units.memory(s) for s in sizes],
            hovertemplate="%{y}: " + MEMORY_NAMES[kind] + " %{hovertext}<extra></extra>",
        )
    totals = [p.cost.memory_bytes["peak"] for p in plans.values()]
    parts = [sum(p.cost.memory_bytes.get(k, 0) for k in MEMORY_KINDS) for p in plans.values()]
    ends = [max(t, s) / GIB for t, s in zip(totals, parts, strict=True)]
    figure.add_scatter(
        x=[t / GIB for t in totals],
        y=names,
        mode="markers",
        name="peak",
        hoverinfo="skip",
        marker={"symbol": "line-ns", "size": 20, "line": {"width": 2.5, "color": theme.text}},
    )
    for name, total, end in zip(names, totals, ends, strict=True):
        figure.add_annotation(
            x=end, y=name, text=units.memory(total), xanchor="left", xshift=8, showarrow=False, bgcolor=theme.surface
        )
    capacities = [limits[n] for n in plans]
    _draw_limits(figure, capacities, theme)
    figure.update_xaxes(range=[0, max(*(c / GIB for c in capacities), *ends) * 1.16], nticks=5)
    return _apply_style(figure, theme, len(names))


def memory_keys(plans: Mapping[str, Plan]) -> list[Key]:
    """Return the legend of `memory_bars`."""
    kinds = [k for k in MEMORY_KINDS if any(p.cost.memory_bytes.get(k) for p in plans.values())]
    return [*((MEMORY_NAMES[k], MEMORY_COLOURS[k], "") for k in kinds), ("peak", "currentColor", "upright")]


def _apply_style(figure: go.Figure, theme: Theme, num_plans: int) -> go.Figure:
    """Stack bars, a row a plan: charts beside each other have their rows at one height. Their legends are the page's."""
    figure.update_layout(barmode="stack", bargap=0.5)
    figure.update_yaxes(autorange="reversed")
    return apply_style(figure, theme, 100 + 50 * num_plans).update_layout(showlegend=False, margin_b=30)


def _draw_limits(figure: go.Figure, capacities: Sequence[int], theme: Theme) -> None:
    """Draw a dashed line at the memory that plans may take across all bars; where bars are for other GPUs, across each of them."""
    line = {"color": theme.text, "width": 1.5, "dash": "dash"}
    if len(set(capacities)) == 1:
        label = {
            "text": f"{LIMIT_WORDS} {units.memory(capacities[0])}",
            "xanchor": "right",
        }  # a narrow window cuts off what stands right of it
        figure.add_vline(x=capacities[0] / GIB, line=line, annotation=label, annotation_position="top")
        return
    for k, size in enumerate(capacities):
        figure.add_shape(type="line", x0=size / GIB, x1=size / GIB, y0=k - 0.46, y1=k + 0.46, line=line)
        figure.add_annotation(
            x=size / GIB,
            y=k - 0.46,
            text=f"{LIMIT_WORDS} {units.memory(size)}",
            yanchor="bottom",
            yshift=-3,
            showarrow=False,
            font={"size": 12.5},
        )


def collectives_bars(plans: Mapping[str, Plan], theme: Theme) -> go.Figure:
    """Draw the bytes that one GPU sends per step: a panel a phase, colours by collective, patterns by mesh axis."""
    phases = [
        ph for ph in PHASES if any(t.phase == ph and t.wire_bytes for p in plans.values() for t in p.cost.traffic)
    ] or ["forward"]
    # One scale for all phases: bars beside each other are compared by their length.
    figure = make_subplots(
        cols=len(phases), shared_xaxes="all", shared_yaxes=True, subplot_titles=phases, horizontal_spacing=0.04
    )
    names = [_plan_label(p) for p in plans.values()]
    patterns = _patterns(plans)
    for kind, axis in _most_sent(plans):
        for col, phase in enumerate(phases, 1):
            rows = [_sent_bytes_and_calls(p, phase, kind, axis) for p in plans.values()]
            figure.add_bar(
                y=names,
                x=[r[0] / 1e9 for r in rows],
                orientation="h",
                name=f"{kind} on {axis}",
                row=1,
                col=col,
                customdata=[f"{phase},{kind},{axis}"] * len(names),
                hovertemplate="%{hovertext}<extra></extra>",
                hovertext=[
                    f"{n}: {k} {kind} on {axis}, {units.traffic(b)} sent" for n, (b, k) in zip(names, rows, strict=True)
                ],
                marker={
                    "color": KIND_COLOURS.get(kind, theme.faint),
                    "line": {"width": 1, "color": theme.surface},
                    "pattern": {
                        "shape": patterns[axis][0],
                        "fillmode": "overlay",
                        "fgcolor": theme.surface,
                        "size": 7,
                        "solidity": 0.35,
                    },
                },
            )
    figure.update_xaxes(rangemode="tozero", nticks=4, tickangle=0)  # panels of a phone are narrow
    return _apply_style(figure, theme, len(names))


def collective_keys(plans: Mapping[str, Plan], theme: Theme) -> list[Key]:
    """Return the legend of `collectives_bars`: of the bars that can be seen."""
    most, patterns = _most_sent(plans), _patterns(plans)
    named = [key for key, size in most.items() if size >= MIN_NAMED_SHARE * max(most.values())]
    return [(f"{kind} on {axis}", KIND_COLOURS.get(kind, theme.faint), patterns[axis][1]) for kind, axis in named]


def _most_sent(plans: Mapping[str, Plan]) -> dict[tuple[str, str], int]:
    """Return by collective and mesh axis the most bytes that a plan sends so in a phase."""
    keys = dict.fromkeys(
        (t.kind, p.mesh.name_of(t.axes)) for p in plans.values() for t in p.cost.traffic if t.wire_bytes
    )
    return {
        (kind, axis): max(_sent_bytes_and_calls(p, phase, kind, axis)[0] for p in plans.values() for phase in PHASES)
        for kind, axis in keys
    }


def _patterns(plans: Mapping[str, Plan]) -> dict[str, tuple[str, str]]:
    axes = sorted({axis for _, axis in _most_sent(plans)}, key=lambda axis: (axis == "data", axis))
    return {axis: PATTERNS[k % len(PATTERNS)] for k, axis in enumerate(axes)}


def _sent_bytes_and_calls(plan: Plan, phase: str, kind: str, axis: str) -> tuple[int, int]:
    traffic = [t for t in plan.cost.traffic if (t.phase, t.kind, plan.mesh.name_of(t.axes)) == (phase, kind, axis)]
    return sum(t.wire_bytes for t in traffic), sum(t.count for t in traffic)


def _plan_label(plan: Plan) -> str:
    """Return a plan's label of a bar; what its settings have of their own takes a second line."""
    return escape(plan_title(plan)).replace(" (", "<br>(", 1)
