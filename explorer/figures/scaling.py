"""Figures and words of sweeps: over the number of GPUs, and over any one quantity. Pure: values in, plotly and sentences out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from explorer.address.settings import MEASURES
from explorer.analysis.sweep import Point
from explorer.figures.palette import COMMUNICATION, COMPUTE, Theme
from explorer.figures.style import LIMIT, style
from explorer.text import recipe, units
from planner_core.core import Cluster
from planner_core.planning.analysis import Size

COLOURS = (COMPUTE, COMMUNICATION, "#009E73", "#CC79A7", "#8C8C8C", "#56B4E9")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "x")
UNORDERED = ("cluster", "model")
"""Quantities whose values have no order, so that no line joins them."""
WIDE = 30.0
"""Small multiples whose numbers differ by more than this factor have a logarithmic axis."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def degrees(sizes: Mapping[str, Sequence[Size]], theme: Theme) -> go.Figure:
    """The largest tensor-parallel degree that pays against the number of GPUs; a line per interconnect."""
    figure = go.Figure()
    for i, (name, row) in enumerate(sizes.items()):
        points = [(s.num_gpus, s.last_paying) for s in row]
        known = [(n, o) for n, o in points if o is not None]
        _line(
            figure,
            i,
            name,
            [(n, o.degree, f"{n} GPUs: degree {o.degree}, {units.seconds(o.step_time_s)} a step") for n, o in known],
        )
    ticks = _ticks([o.degree for row in sizes.values() for s in row if (o := s.last_paying)])
    figure.update_yaxes(
        title="tensor-parallel degree",
        type="log",
        tickvals=ticks,
        ticktext=[str(t) for t in ticks],
        range=[-0.15, math.log10(max(ticks)) + 0.1],
    )
    return _across(figure, sizes, theme)


def steps(sizes: Mapping[str, Sequence[Size]], theme: Theme) -> go.Figure:
    """Step time of the best plan against the number of GPUs."""
    figure = go.Figure()
    for i, (name, row) in enumerate(sizes.items()):
        known = [(s.num_gpus, o) for s in row if (o := s.best)]
        _line(
            figure,
            i,
            name,
            [(n, o.step_time_s * 1e3, f"{n} GPUs, mesh {o.mesh}: {units.seconds(o.step_time_s)}") for n, o in known],
        )
    times = [o.step_time_s * 1e3 for row in sizes.values() for s in row if (o := s.best)]
    ticks = _decades(min(times, default=1.0), max(times, default=1.0))
    figure.update_yaxes(
        title="step time, ms", type="log", tickvals=ticks, ticktext=[units.significant(t, 1) for t in ticks]
    )
    return _across(figure, sizes, theme)


def _line(figure: go.Figure, i: int, name: str, points: Sequence[tuple[int, float, str]]) -> None:
    colour = COLOURS[i % len(COLOURS)]
    figure.add_scatter(
        x=[p[0] for p in points],
        y=[p[1] for p in points],
        name=name,
        mode="lines+markers",
        marker={"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 10, "color": colour},
        line={"dash": DASHES[i % len(DASHES)], "width": 2, "color": colour},
        hovertext=[p[2] for p in points],
        hovertemplate="%{hovertext}<extra>" + name + "</extra>",
    )


def _across(figure: go.Figure, sizes: Mapping[str, Sequence[Size]], theme: Theme) -> go.Figure:
    counts = sorted({s.num_gpus for row in sizes.values() for s in row})
    figure.update_xaxes(
        title="GPUs", type="log", tickvals=counts, ticktext=[units.whole(n) for n in counts], tickangle=0
    )
    style(figure, theme, 360)
    figure.update_layout(showlegend=True)
    return figure


def _ticks(values: Sequence[int]) -> list[int]:
    most = max(values, default=1)
    return [2**k for k in range(most.bit_length() + 1) if 2**k <= 2 * most]


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten around a range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**k for k in powers for m in (1, 2, 5)]
    return [t for t in ticks if low / 2 <= t <= high * 2]


def stop_words(name: str, sizes: Sequence[Size], cluster: Cluster) -> str:
    """Where tensor parallelism should stop on one interconnect, in a sentence or two."""
    known = [(s.num_gpus, o.degree) for s in sizes if (o := s.last_paying)]
    if not known:
        return f"{name}: no plan fits the memory at any of these sizes."
    runs: list[tuple[int, int, int]] = []
    for n, degree in known:
        if runs and runs[-1][2] == degree:
            runs[-1] = (runs[-1][0], n, degree)
        else:
            runs.append((n, n, degree))
    parts = [f"{f'{degree} ways' if degree > 1 else 'not at all'} {_range(a, b)}" for a, b, degree in runs]
    missing = [s.num_gpus for s in sizes if s.last_paying is None]
    tail = f" Nothing fits on {', '.join(units.whole(n) for n in missing)}." if missing else ""
    most, node = max(degree for _, degree in known), cluster.levels[0].size
    beyond = f" It never pays beyond a node of {node} GPUs."
    if most > node:
        forced = all(
            s.last_paying == next(iter(s.by_degree.values())) for s in sizes if (o := s.last_paying) and o.degree > node
        )
        beyond = f" Beyond a node of {node} GPUs it pays here."
        if forced:
            beyond = f" Beyond a node of {node} GPUs it is the only way here: a smaller degree does not fit or cannot split the batch."
    if most == 1:
        return f"{name}: tensor parallelism does not pay at any of these sizes.{tail}"
    return f"{name}: tensor parallelism pays {', '.join(parts)} GPUs.{beyond}{tail}"


def _range(low: int, high: int) -> str:
    return f"at {units.whole(low)}" if low == high else f"from {units.whole(low)} to {units.whole(high)}"


def sweep(
    quantity: str, points: Sequence[Point], limits: Mapping[str, int], here: str, theme: Theme
) -> dict[str, go.Figure]:
    """Step time, tokens per second and memory of the best plan at each value of one quantity, by title. `limits`: bytes per GPU that a plan
    may take, by value; `here`: the value that stands, which has a ring. A plan that does not fit is a cross."""
    figures = {}
    for measure in MEASURES:
        title, ys = measured(measure, {"": points})
        figures[title] = _swept(quantity, points, ys[""], here, theme)
        if measure == "memory":
            _limits(figures[title], points, limits, theme)
    return figures


def measured(measure: str, panels: Mapping[str, Sequence[Point]]) -> tuple[str, dict[str, list[float]]]:
    """One measure of `settings.MEASURES` in words with its unit, and its numbers by panel, of the points that have a plan."""
    plans = {name: [(p, p.plan) for p in points if p.plan is not None] for name, points in panels.items()}
    if measure == "tokens":
        return "Tokens a second", {n: [p.tokens_per_s for p, _ in known] for n, known in plans.items()}
    if measure == "memory":
        return "Memory per GPU, GiB", {
            n: [plan.cost.memory_bytes["peak"] / units.GIB for _, plan in known] for n, known in plans.items()
        }
    times = {n: [plan.cost.step_time_s for _, plan in known] for n, known in plans.items()}
    unit, factor = ("s", 1.0) if any(t >= 1 for ts in times.values() for t in ts) else ("ms", 1e3)
    return f"Step time, {unit}", {n: [t * factor for t in ts] for n, ts in times.items()}


def small_multiples(
    quantity: str, panels: Mapping[str, Sequence[Point]], measure: str, here: tuple[str, str], theme: Theme
) -> dict[str, go.Figure]:
    """One measure of the best plan at each value of a quantity, a figure for each value of another one; all have the same axes.
    `here`: the values that stand, of the quantity and of the other one."""
    _, heights = measured(measure, panels)
    every = [y for ys in heights.values() for y in ys]
    wide = max(every, default=1.0) > WIDE * min(every, default=1.0)
    figures = {}
    for name, points in panels.items():
        figure = _swept(quantity, points, heights[name], here[0] if name == here[1] else "", theme)
        figure.update_layout(height=210, margin={"b": 54, "t": 6})
        if wide:
            figure.update_yaxes(type="log", range=[math.log10(min(every) / 1.6), math.log10(max(every) * 1.6)], dtick=1)
        else:
            figure.update_yaxes(range=[0, max(every, default=1.0) * 1.12])
        figures[name] = figure
    return figures


def _limits(figure: go.Figure, points: Sequence[Point], limits: Mapping[str, int], theme: Theme) -> None:
    """A dashed line at the memory that plans may take."""
    names = [p.name for p in points if p.plan is not None]
    figure.add_scatter(
        x=names, y=[limits[n] / units.GIB for n in names], mode="lines", hovertemplate=f"{LIMIT} %{{y:.4g}} GiB<extra></extra>",
        line={"color": theme.text, "width": 1.5, "dash": "dash", "shape": "hvh"},
    )  # fmt: skip


def _swept(quantity: str, points: Sequence[Point], ys: Sequence[float], here: str, theme: Theme) -> go.Figure:
    known = [(p, p.plan) for p in points if p.plan is not None]
    figure = go.Figure()
    figure.add_scatter(
        x=[p.name for p, _ in known], y=ys, mode="markers" if quantity in UNORDERED else "lines+markers",
        hovertext=[f"{p.name}: {recipe.recipe(plan)}" + ("" if plan.fits else ", does not fit") for p, plan in known],
        hovertemplate="%{hovertext}<br>%{y:.4g}<extra></extra>", line={"color": theme.muted, "width": 1.5},
        marker={
            "size": 10, "color": [COMPUTE if p.fits else COMMUNICATION for p, _ in known],
            "symbol": ["circle" if p.fits else "x" for p, _ in known],
        },
    )  # fmt: skip
    at = [(p.name, y) for (p, _), y in zip(known, ys, strict=True) if p.name == here]
    figure.add_scatter(
        x=[n for n, _ in at], y=[y for _, y in at], mode="markers", hoverinfo="skip",
        marker={"size": 18, "symbol": "circle-open", "color": theme.text, "line": {"width": 2}},
    )  # fmt: skip
    style(figure, theme, 270)
    figure.update_xaxes(
        type="category", categoryorder="array", categoryarray=[p.name for p in points], title_text=quantity
    )
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(showlegend=False, margin={"b": 60, "t": 10})
    return figure
