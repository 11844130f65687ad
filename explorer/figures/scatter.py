"""Scatters: whole-model plans, every candidate of one block, and published runs. Pure: values in, plotly out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from explorer.analysis import candidate_marks as marks
from explorer.analysis.step_parts import STATED_METHOD
from explorer.figures import name_placement
from explorer.figures.palette import COMMUNICATION, COMPUTE, Theme
from explorer.figures.style import GIB, apply_style, draw_limit_line, draw_open_marks, escape
from explorer.text import units
from explorer.text.words import plan_title
from planner_core.core import Plan
from planner_core.planning import is_trade_off
from planner_core.planning.methods import BASELINES, EXACT, METHODS
from planner_core.planning.pricing import PublishedRun, load_own_runs, load_published_runs
from planner_core.search.candidates import Candidates

PLOT_WIDTHS, NARROW_WIDTHS, PLOT_HEIGHT = (260.0, 424.0, 620.0), (256.0, 296.0, 396.0), 302.0
"""Pixels of a scatter's axes in windows of 1 024, 1 440 and 1 920, on phones of 360, 400 and 500, and down: they place the names."""
LIMIT_WIDTH = 150.0
"""Pixels of the words at the line of memory."""
WIDE, NARROW = 0.999, 0.99
"""Opacities that mark the names for wide windows and for narrow ones (see app.css): plotly writes no other mark of ours."""
TIMES = {
    "communication": "communication per step, ms",
    "exposed": "communication that the step waits for, ms",
    "step": "step time, ms",
}
METHOD_COLOUR = "#CC79A7"
"""The colour of the plans of the papers' methods."""
STATED_COLOUR = "#009E73"
"""The colour of what the visitor runs now."""
BORDERLESS_FROM = 20_000
"""More marks than this are drawn without a border, for speed."""


def plans_scatter(
    plans: Mapping[str, Plan],
    chosen: str,
    capacity_bytes: int,
    theme: Theme,
    axis: str = "communication",
) -> go.Figure:
    """Draw whole-model plans: time against memory per GPU, the GPU's memory as a line.

    The chosen plan has a ring, those that tie with the best a thin one.
    """
    figure = go.Figure()
    ends = {n: _point_of(p, axis) for n, p in plans.items()}
    stated = {n: p for n, p in plans.items() if p.method == STATED_METHOD}
    # of other methods no line can be drawn: their plans are no front
    methods = {n: p for n, p in plans.items() if p.method in METHODS and p.method != EXACT.name}
    baselines = {n: p for n, p in plans.items() if p.method in BASELINES}
    front = sorted((n for n in plans if n not in {**baselines, **stated, **methods}), key=lambda n: ends[n])
    _draw_plans(figure, {n: plans[n] for n in front}, ends, "best, trade-offs", "circle", COMPUTE, theme)
    _draw_plans(figure, methods, ends, "other methods", "triangle-up", METHOD_COLOUR, theme)
    _draw_plans(figure, baselines, ends, "baselines", "diamond", COMMUNICATION, theme)
    _draw_plans(figure, stated, ends, "our current setup", "square", STATED_COLOUR, theme)
    ties = [ends[n] for n in marks.find_ties(plans)]
    draw_open_marks(figure, ties, "tie with the best", "circle", (19, 1.2), theme.muted)
    draw_open_marks(figure, [ends[chosen]], "chosen", "circle", (25, 2.0), theme.text)
    left, right = _axis_range(np.array([x for x, _ in ends.values()]))
    right += 0.28 * (right - left)  # room for the name of the rightmost plan
    left -= 0.02 * (right - left)
    high = max(capacity_bytes / GIB, *(y for _, y in ends.values())) * 1.12
    draw_limit_line(figure, capacity_bytes, theme)
    # Trade-offs lie on one line, near each other: their names crowd out those of the others, and the table and a hover say them.
    named = {n: p for n, p in plans.items() if n == chosen or n not in front or not is_trade_off(p)}
    _draw_names(figure, named, ends, capacity_bytes / GIB, (left, right), high, theme)
    figure.update_xaxes(title=TIMES[axis], range=[left, right], nticks=5)
    figure.update_yaxes(title="memory per GPU, GiB", range=[0, high], nticks=5)
    return apply_style(figure, theme, 430)


def _point_of(plan: Plan, axis: str) -> tuple[float, float]:
    c = plan.cost
    times = {"communication": c.comm_time_s, "exposed": c.exposed_comm_time_s, "step": c.step_time_s}
    return times[axis] * 1e3, c.memory_bytes["peak"] / GIB


def _draw_plans(
    figure: go.Figure,
    plans: Mapping[str, Plan],
    ends: Mapping[str, tuple[float, float]],
    name: str,
    symbol: str,
    colour: str,
    theme: Theme,
) -> None:
    figure.add_scatter(
        x=[ends[n][0] for n in plans],
        y=[ends[n][1] for n in plans],
        mode="lines+markers" if symbol == "circle" and len(plans) > 1 else "markers",
        name=name,
        customdata=list(plans),
        marker={"symbol": symbol, "size": 12, "color": colour, "line": {"width": 1.5, "color": theme.surface}},
        line={"width": 1, "color": colour},
        cliponaxis=False,
        hovertext=[plan_hover(p) for p in plans.values()],
        hovertemplate="%{hovertext}<extra></extra>",
        showlegend=bool(plans),
    )


def _draw_names(
    figure: go.Figure,
    plans: Mapping[str, Plan],
    ends: Mapping[str, tuple[float, float]],
    limit: float,
    times: tuple[float, float],
    high: float,
    theme: Theme,
) -> None:
    """Write the plans' names twice, for wide windows and for narrow ones; the style sheet shows one set.

    `ends`: where all marks lie, which no name may cover. `limit`: GiB that a plan may take, where a line lies with its words.
    `times`: the ends of the axis of times; that of memory goes from 0 to `high`.
    """
    names = [plan_title(p) for p in plans.values()]
    # a plan that has a name comes first: a place is given for each of those
    shares = {n: ((ends[n][0] - times[0]) / (times[1] - times[0]), 1 - ends[n][1] / high) for n in (*plans, *ends)}
    line = (1 - limit / high) * PLOT_HEIGHT
    for widths, mark in ((PLOT_WIDTHS, WIDE), (NARROW_WIDTHS, NARROW)):
        plots = [
            name_placement.Plot(
                width,
                PLOT_HEIGHT,
                [(x * width, y * PLOT_HEIGHT) for x, y in shares.values()],
                [(0.0, line - 2, width, line + 2), (0.0, line - 20, LIMIT_WIDTH, line)],
            )
            for width in widths
        ]
        places = name_placement.place_names(plots, names)
        for plan_id, name, place in zip(plans, names, places, strict=True):
            _draw_name(figure, ends[plan_id], name, place, mark, theme)


def _draw_name(
    figure: go.Figure, end: tuple[float, float], name: str, place: name_placement.Place, mark: float, theme: Theme
) -> None:
    side = "left" if place.right > 0 else "right"
    figure.add_annotation(
        x=end[0],
        y=end[1],
        ax=place.right,
        ay=place.down,
        text=escape(name),
        xanchor=side,
        align=side,
        opacity=mark,
        font={"size": 12.5, "color": theme.text},
        bgcolor=theme.surface,
        borderpad=0,
        showarrow=True,
        # a dot at the point itself: marks and rings hide where a bare line ends
        arrowhead=6,
        arrowwidth=1,
        arrowcolor=theme.text if place.leader else "rgba(0,0,0,0)",
    )


def plan_hover(plan: Plan) -> str:
    """Return the words of a point."""
    c = plan.cost
    lines = [
        f"<b>{escape(plan_title(plan))}</b>",
        f"mesh {escape(str(plan.mesh))}",
        f"step {units.seconds(c.step_time_s)}",
        f"communication {units.seconds(c.comm_time_s)}, of which {units.seconds(c.exposed_comm_time_s)} exposed",
        f"memory {units.memory(c.memory_bytes['peak'])}" + ("" if plan.fits else ", does not fit"),
    ]
    return "<br>".join(lines)


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
        x=x[front].astype(np.float32),
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
    low, high = _axis_range(y[drawn])
    if high < capacity_bytes / GIB < MAX_LIMIT_RATIO * high:
        high = 1.08 * capacity_bytes / GIB
    figure.update_xaxes(title="communication per step, ms", range=_axis_range(x[drawn]))
    figure.update_yaxes(title="memory per GPU, GiB", range=(low, high))
    return apply_style(figure, theme, 430)


MAX_LIMIT_RATIO = 2.0
"""The line of memory is left out where it lies this many times as high as the highest candidate: all that differs would be a blot."""


def _axis_range(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the ends of an axis around values: from zero, unless they fill less than half of it then."""
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    if not low <= high:
        return 0.0, 1.0
    margin = 0.06 * (high - low or high or 1.0)
    return (low - margin if low > 0.5 * high else 0.0), high + margin


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
    figure.update_xaxes(title="GPUs", type="log", tickvals=counts, ticktext=[str(n) for n in counts])
    figure.update_yaxes(title="predicted over measured, %", zeroline=False)
    return apply_style(figure, theme, 460)


def _gpu_names() -> list[str]:
    """Return the GPUs of all runs: a filter changes no symbol."""
    return sorted({r.gpu for r in (*load_published_runs(), *load_own_runs())})


def _draw_runs(figure: go.Figure, runs: Sequence[PublishedRun], left_out: str, theme: Theme) -> None:
    gpus = _gpu_names()
    for family, colour in FAMILY_COLOURS.items():
        of_family = [r for r in runs if r.kind.startswith(family)]
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
    families = [f for f in FAMILY_COLOURS if any(r.kind.startswith(f) for r in runs)]
    shown_gpus = {r.gpu for r in runs}
    keys = [(f, "circle", FAMILY_COLOURS[f]) for f in families]
    keys += [(g, SYMBOLS[i % len(SYMBOLS)], theme.muted) for i, g in enumerate(gpus) if g in shown_gpus]
    for name, symbol, colour in keys:
        marker = {"symbol": symbol, "size": 9, "color": colour}
        figure.add_scatter(x=[None], y=[None], mode="markers", name=name, marker=marker)


def _run_hover(r: PublishedRun, left_out: str) -> str:
    lines = (
        f"<b>{escape(r.model)} on {r.gpus} × {escape(r.gpu)}</b>",
        f"{escape(r.layout)}; {escape(r.workload)}",
        f"measured {units.seconds(r.measured_s)}, predicted {units.seconds(r.seconds[left_out])} ({units.change(r.error(left_out))})",
        escape(r.source),
    )
    return "<br>".join(lines)
