"""Scatters of choices: whole-model plans, and every candidate of one block. Pure: values in, plotly out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from explorer.analysis import filters as choosing
from explorer.analysis.filters import Bools
from explorer.figures import label_placement as labels
from explorer.figures.palette import COMMUNICATION, COMPUTE, Theme
from explorer.figures.style import GIB, capacity_line, style
from explorer.text import units
from explorer.text.words import MODEL_ERROR, title
from planner_core.core import Plan
from planner_core.search.candidates import Candidates

PLOT_WIDTH, PLOT_HEIGHT = 480.0, 300.0
"""About the pixels of a scatter's axes, to keep names apart."""
TIMES = {
    "communication": "communication per step, ms",
    "exposed": "communication that the step waits for, ms",
    "step": "step time, ms",
}
MANY = 20_000
"""More marks than this are drawn without a border, for speed."""


def plans_scatter(
    plans: Mapping[str, Plan], chosen: str, baselines: Sequence[str], capacity_bytes: int, theme: Theme,
    axis: str = "communication", all_plans: Mapping[str, Plan] | None = None,
) -> go.Figure:  # fmt: skip
    """Whole-model plans: time against memory per GPU, the GPU's memory as a line. The chosen one has a ring, those that
    tie with the fastest a dotted one. `all_plans` sets the axes, so that they stand still while plans are filtered."""
    figure = go.Figure()
    ends = {n: _where(p, axis) for n, p in plans.items()}
    front = sorted((n for n in plans if n not in baselines), key=lambda n: ends[n])
    _plan_points(figure, {n: plans[n] for n in front}, ends, "best and trade-offs", "circle", COMPUTE, theme)
    others = {n: plans[n] for n in baselines if n in plans}
    _plan_points(figure, others, ends, "baselines", "diamond", COMMUNICATION, theme)
    tied = [n for n in choosing.ties(plans) if n in plans]
    _rings(
        figure,
        [ends[n] for n in tied],
        f"tie: within {units.percent(MODEL_ERROR)} of the fastest",
        (19, 1.2),
        theme.muted,
    )
    _rings(figure, [ends[chosen]] if chosen in plans else [], "chosen", (25, 2.0), theme.text)
    reach = [_where(p, axis) for p in (all_plans or plans).values()]
    wide = max((x for x, _ in reach), default=1.0) * 1.28 or 1.0
    high = max(capacity_bytes / GIB, *(y for _, y in reach), 0) * 1.12
    capacity_line(figure, capacity_bytes, theme)
    _names(figure, plans, list(ends.values()), (wide, high), theme)
    figure.update_xaxes(title=TIMES[axis], range=[-0.02 * wide, wide])
    figure.update_yaxes(title="memory per GPU, GiB", range=[0, high])
    return style(figure, theme, 430)


def _where(plan: Plan, axis: str) -> tuple[float, float]:
    c = plan.cost
    times = {"communication": c.comm_time_s, "exposed": c.exposed_comm_time_s, "step": c.step_time_s}
    return times[axis] * 1e3, c.memory_bytes["peak"] / GIB


def _plan_points(
    figure: go.Figure, plans: Mapping[str, Plan], ends: Mapping[str, tuple[float, float]], name: str, symbol: str,
    colour: str, theme: Theme,
) -> None:  # fmt: skip
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


def _rings(
    figure: go.Figure, ends: Sequence[tuple[float, float]], name: str, size: tuple[float, float], colour: str
) -> None:
    """Open circles around points, of a diameter and a width: what is chosen, what ties."""
    figure.add_scatter(
        x=[x for x, _ in ends],
        y=[y for _, y in ends],
        mode="markers",
        name=name,
        hoverinfo="skip",
        marker={"symbol": "circle-open", "size": size[0], "color": colour, "line": {"width": size[1]}},
        showlegend=bool(ends),
    )


def _names(
    figure: go.Figure,
    plans: Mapping[str, Plan],
    ends: Sequence[tuple[float, float]],
    size: tuple[float, float],
    theme: Theme,
) -> None:
    """The plans' names beside their marks."""
    wide, high = size
    names = [title(p) for p in plans.values()]
    pixels = [(x / wide * PLOT_WIDTH, (1 - y / high) * PLOT_HEIGHT) for x, y in ends]
    for (x, y), name, (dx, dy) in zip(ends, names, labels.place(pixels, names, PLOT_WIDTH, PLOT_HEIGHT), strict=True):
        figure.add_annotation(
            x=x,
            y=y,
            ax=dx,
            ay=dy,
            text=_escape(name),
            xanchor="left",
            align="left",
            font={"size": 12.5, "color": theme.text},
            bgcolor=theme.surface,
            showarrow=True,
            arrowhead=0,
            arrowwidth=1,
            arrowcolor=theme.faint if dy else "rgba(0,0,0,0)",
        )


def plan_hover(plan: Plan) -> str:
    """What a point says."""
    c = plan.cost
    lines = [
        f"<b>{_escape(title(plan))}</b>",
        f"mesh {_escape(str(plan.mesh))}",
        f"step {units.seconds(c.step_time_s)}",
        f"communication {units.seconds(c.comm_time_s)}, of which {units.seconds(c.exposed_comm_time_s)} exposed",
        f"memory {units.memory(c.memory_bytes['peak'])}" + ("" if plan.fits else ", does not fit"),
    ]
    return "<br>".join(lines)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def candidates_scatter(
    found: Candidates, picked: int | None, capacity_bytes: int, theme: Theme, *, keep: Bools | None = None,
    region: Sequence[str] = (), same: int | None = None,
) -> go.Figure:  # fmt: skip
    """Every assignment of a block's matrices as a plan of the whole model (those in `keep`), the front of those that no
    other beats in both, and the GPU's memory. `region` is the marked one, `same` what the chosen plan does."""
    keep = np.isfinite(found.comm_s) & np.isfinite(found.memory_bytes) if keep is None else keep
    x, y = found.model_comm_s * 1e3, found.model_memory_bytes / GIB
    drawn = choosing.marks(found, keep)
    front = np.flatnonzero(found.on_front & keep)
    front = front[np.argsort(x[front])]
    figure = go.Figure()
    figure.add_scattergl(
        x=drawn.x_ms, y=drawn.y_gib, mode="markers", name=f"{units.whole(keep.sum())} candidates",
        customdata=drawn.first, text=drawn.count if drawn.count.max(initial=1) > 1 else None,
        marker={"size": 5 if len(drawn.first) <= MANY else 4, "color": theme.faint, "opacity": 0.4, "line": {"width": 0}},
        hovertemplate="communication %{x:.3g} ms<br>memory %{y:.3g} GiB<extra>"
        + ("%{text} cost this" if drawn.count.max(initial=1) > 1 else "candidate") + "</extra>",
    )  # fmt: skip
    figure.add_scattergl(
        x=x[front].astype(np.float32), y=y[front].astype(np.float32), mode="lines+markers",
        name="front: none is better in both", customdata=front.astype(np.int32),
        marker={"size": 9, "color": COMPUTE}, line={"width": 1.2, "color": COMPUTE},
        hovertemplate="communication %{x:.3g} ms<br>memory %{y:.3g} GiB<extra>on the front</extra>",
    )  # fmt: skip
    if same is not None and keep[same]:
        _mark(figure, (x[same], y[same]), "as the chosen plan does", {"symbol": "diamond-open", "size": 14}, theme)
    if picked is not None and 0 <= picked < len(x) and keep[picked]:
        _mark(figure, (x[picked], y[picked]), "chosen candidate", {"symbol": "circle-open", "size": 20}, theme)
    if region:
        ends = [float(v) for v in (*region, *region[:2])]
        figure.add_scatter(
            x=ends[::2], y=ends[1::2], mode="lines", name="marked", hoverinfo="skip",
            line={"width": 1.5, "dash": "dot", "color": theme.text},
        )  # fmt: skip
    capacity_line(figure, capacity_bytes, theme)
    figure.update_xaxes(title="communication per step, ms", rangemode="tozero")
    figure.update_yaxes(title="memory per GPU, GiB", rangemode="tozero")
    return style(figure, theme, 430)


def _mark(figure: go.Figure, at: tuple[float, float], name: str, marker: dict[str, object], theme: Theme) -> None:
    figure.add_scatter(
        x=[at[0]], y=[at[1]], mode="markers", name=name, hoverinfo="skip",
        marker={**marker, "color": theme.text, "line": {"width": 2}},
    )  # fmt: skip
