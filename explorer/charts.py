"""Figures: the scatters of choices, memory, collectives and the step's timeline. Pure: values in, plotly out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from explorer import labels, units
from explorer.palette import COMMUNICATION, COMPUTE, KIND_COLOURS, MEMORY_COLOURS, MEMORY_KINDS, MEMORY_NAMES, Theme
from explorer.words import title
from planner_core.candidates import Candidates
from planner_core.plan import PHASES, Plan

GIB = units.GIB
PLOT_WIDTH, PLOT_HEIGHT = 480.0, 300.0
"""About the pixels of a scatter's axes, to keep names apart."""
FONT = '"Source Sans", "Source Sans 3", sans-serif'
PATTERNS = ("", "/", ".")
"""One per mesh axis, so that axes differ without colour; the innermost is plain."""


def _style(figure: go.Figure, theme: Theme, height: int) -> go.Figure:
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 16, "t": 30, "b": 92},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 14, "color": theme.text},
        hoverlabel={"font": {"family": FONT, "size": 13}},
        legend={
            "orientation": "h",
            "x": 0,
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "font": {"size": 13},
            "traceorder": "normal",
        },
        dragmode="pan",
    )
    axes = {
        "gridcolor": theme.grid,
        "zerolinecolor": theme.grid,
        "linecolor": theme.grid,
        "automargin": True,
        "title_standoff": 8,
        "title_font_size": 13.5,
    }
    figure.update_xaxes(**axes)
    figure.update_yaxes(**axes)
    return figure


# --- choices ------------------------------------------------------------------------------------------


def plans_scatter(
    plans: Mapping[str, Plan], chosen: str, baselines: Sequence[str], capacity_bytes: int, theme: Theme
) -> go.Figure:
    """Whole-model plans: communication per step against memory per GPU, the GPU's memory as a line."""
    figure = go.Figure()
    front = sorted((n for n in plans if n not in baselines), key=lambda n: plans[n].cost.comm_time_s)
    _plan_points(figure, {n: plans[n] for n in front}, "best and trade-offs", "circle", COMPUTE, theme)
    _plan_points(figure, {n: plans[n] for n in baselines if n in plans}, "baselines", "diamond", COMMUNICATION, theme)
    x, y = _where(plans[chosen])
    figure.add_scatter(
        x=[x],
        y=[y],
        mode="markers",
        name="chosen",
        hoverinfo="skip",
        marker={"symbol": "circle-open", "size": 24, "color": theme.text, "line": {"width": 2}},
        showlegend=False,
    )
    ends = [_where(p) for p in plans.values()]
    wide = max(x for x, _ in ends) * 1.28 or 1.0
    high = max(capacity_bytes / GIB, *(y for _, y in ends)) * 1.12
    _capacity(figure, capacity_bytes, theme)
    _names(figure, plans, wide, high, theme)
    figure.update_xaxes(title="communication per step, ms", range=[-0.02 * wide, wide])
    figure.update_yaxes(title="memory per GPU, GiB", range=[0, high])
    return _style(figure, theme, 430)


def _where(plan: Plan) -> tuple[float, float]:
    return plan.cost.comm_time_s * 1e3, plan.cost.memory_bytes["peak"] / GIB


def _plan_points(
    figure: go.Figure, plans: Mapping[str, Plan], name: str, symbol: str, colour: str, theme: Theme
) -> None:
    if not plans:
        return
    ends = [_where(p) for p in plans.values()]
    figure.add_scatter(
        x=[x for x, _ in ends],
        y=[y for _, y in ends],
        mode="lines+markers" if symbol == "circle" and len(plans) > 1 else "markers",
        name=name,
        customdata=list(plans),
        marker={"symbol": symbol, "size": 12, "color": colour, "line": {"width": 1.5, "color": theme.surface}},
        line={"width": 1, "color": colour},
        cliponaxis=False,
        hovertext=[plan_hover(p) for p in plans.values()],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _names(figure: go.Figure, plans: Mapping[str, Plan], wide: float, high: float, theme: Theme) -> None:
    """The plans' names beside their marks."""
    ends = [_where(p) for p in plans.values()]
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


def _capacity(figure: go.Figure, capacity_bytes: int, theme: Theme) -> None:
    figure.add_hline(
        y=capacity_bytes / GIB,
        line={"color": theme.text, "width": 1.5, "dash": "dash"},
        annotation={"text": f"GPU memory {units.memory(capacity_bytes)}", "font": {"color": theme.text, "size": 13}},
        annotation_position="top left",
    )


def candidates_scatter(found: Candidates, picked: int | None, capacity_bytes: int, theme: Theme) -> go.Figure:
    """Every assignment of a block's matrices as a plan of the whole model, the front of those that no other beats in both,
    and the GPU's memory."""
    x, y = found.model_comm_s * 1e3, found.model_memory_bytes / GIB
    shown = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    front = shown[found.on_front[shown]]
    front = front[np.argsort(x[front])]
    figure = go.Figure()
    figure.add_scattergl(
        x=x[shown].astype(np.float32),
        y=y[shown].astype(np.float32),
        mode="markers",
        name=f"{units.whole(len(shown))} candidates",
        customdata=shown.astype(np.int32),
        marker={"size": 5, "color": theme.faint, "opacity": 0.35},
        hovertemplate="communication %{x:.3g} ms<br>memory %{y:.3g} GiB<extra>candidate</extra>",
    )
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
    if picked is not None and 0 <= picked < len(x) and np.isfinite(x[picked]):
        figure.add_scatter(
            x=[x[picked]],
            y=[y[picked]],
            mode="markers",
            showlegend=False,
            hoverinfo="skip",
            marker={"symbol": "circle-open", "size": 20, "color": theme.text, "line": {"width": 2}},
        )
    _capacity(figure, capacity_bytes, theme)
    figure.update_xaxes(title="communication per step, ms", rangemode="tozero")
    figure.update_yaxes(title="memory per GPU, GiB", rangemode="tozero")
    return _style(figure, theme, 430)


# --- comparison ---------------------------------------------------------------------------------------


def memory_bars(plans: Mapping[str, Plan], capacity_bytes: int, theme: Theme) -> go.Figure:
    """Memory per GPU stacked by kind, with the capacity as a line."""
    figure = go.Figure()
    names = [title(p) for p in plans.values()]
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
    figure.add_vline(
        x=capacity_bytes / GIB,
        line={"color": theme.text, "width": 1.5, "dash": "dash"},
        annotation={"text": f"GPU memory {units.memory(capacity_bytes)}"},
        annotation_position="top",
    )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title="memory per GPU, GiB", range=[0, max(capacity_bytes / GIB, *ends) * 1.16])
    figure.update_yaxes(autorange="reversed")
    return _style(figure, theme, 190 + 46 * len(names))


def timeline(plans: Mapping[str, Plan], theme: Theme) -> go.Figure:
    """One step per plan: compute, then the communication it waits for; below, what hides behind compute."""
    figure = go.Figure()
    names = [title(p) for p in plans.values()]
    costs = [p.cost for p in plans.values()]
    hidden = [max(0.0, c.comm_time_s - c.exposed_comm_time_s) for c in costs]
    starts = [max(0.0, c.compute_time_s - h) for c, h in zip(costs, hidden, strict=True)]
    computes = [c.compute_time_s for c in costs]
    rows = (
        ("compute", computes, [0.0] * len(costs), COMPUTE, ""),
        ("exposed communication", [c.exposed_comm_time_s for c in costs], computes, COMMUNICATION, ""),
        ("hidden communication", hidden, starts, COMMUNICATION, "/"),
    )
    for name, lengths, bases, colour, pattern in rows:
        _spans(figure, name, names, lengths, bases, (colour, pattern), theme)
    for i, c in enumerate(costs):
        figure.add_annotation(
            x=c.step_time_s * 1e3,
            y=i - 0.15,
            text=units.seconds(c.step_time_s),
            xanchor="left",
            xshift=8,
            showarrow=False,
        )
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title="one step, ms", range=[0, max(c.step_time_s for c in costs) * 1.14e3])
    figure.update_yaxes(tickvals=list(range(len(names))), ticktext=names, range=[len(names) - 0.4, -0.6])
    return _style(figure, theme, 190 + 54 * len(names))


def _spans(
    figure: go.Figure,
    name: str,
    plans: Sequence[str],
    lengths: Sequence[float],
    starts: Sequence[float],
    look: tuple[str, str],
    theme: Theme,
) -> None:
    """Bars of one kind of time, a row a plan; a patterned kind is thin and stands below the others."""
    colour, pattern = look
    figure.add_bar(
        y=list(range(len(plans))),
        x=[v * 1e3 for v in lengths],
        base=[b * 1e3 for b in starts],
        orientation="h",
        name=name,
        width=0.16 if pattern else 0.42,
        offset=0.12 if pattern else -0.36,
        hovertext=[f"{n}: {name} {units.seconds(v)}" for n, v in zip(plans, lengths, strict=True)],
        hovertemplate="%{hovertext}<extra></extra>",
        marker={
            "color": colour,
            "pattern": {"shape": pattern, "fgcolor": colour, "bgcolor": theme.surface, "size": 6},
            "line": {"width": 0},
        },
    )


def collectives_bars(plans: Mapping[str, Plan], theme: Theme) -> go.Figure:
    """Bytes that one GPU sends per step: a panel a phase, colours by collective, patterns by mesh axis."""
    phases = [
        ph for ph in PHASES if any(t.phase == ph and t.wire_bytes for p in plans.values() for t in p.cost.traffic)
    ] or ["forward"]
    figure = make_subplots(cols=len(phases), shared_yaxes=True, subplot_titles=phases, horizontal_spacing=0.04)
    names = [title(p) for p in plans.values()]
    keys = dict.fromkeys((t.kind, p.mesh.axis_names[t.axis]) for p in plans.values() for t in p.cost.traffic)
    axes = sorted({axis for _, axis in keys}, key=lambda axis: (axis == "data", axis))
    for kind, axis in keys:
        for col, phase in enumerate(phases, 1):
            rows = [_row(p, phase, kind, axis) for p in plans.values()]
            figure.add_bar(
                y=names,
                x=[r[0] / 1e9 for r in rows],
                orientation="h",
                name=f"{kind} on {axis}",
                legendgroup=f"{kind}{axis}",
                showlegend=col == 1,
                row=1,
                col=col,
                hovertemplate="%{hovertext}<extra></extra>",
                hovertext=[
                    f"{n}: {k} {kind} on {axis}, {units.traffic(b)} sent" for n, (b, k) in zip(names, rows, strict=True)
                ],
                marker={
                    "color": KIND_COLOURS.get(kind, theme.faint),
                    "line": {"width": 1, "color": theme.surface},
                    "pattern": {
                        "shape": PATTERNS[axes.index(axis) % 3],
                        "fillmode": "overlay",
                        "fgcolor": theme.surface,
                        "size": 7,
                        "solidity": 0.35,
                    },
                },
            )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title="sent per GPU, GB", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", col=1)
    return _style(figure, theme, 200 + 46 * len(names))


def _row(plan: Plan, phase: str, kind: str, axis: str) -> tuple[int, int]:
    found = [t for t in plan.cost.traffic if (t.phase, t.kind, plan.mesh.axis_names[t.axis]) == (phase, kind, axis)]
    return sum(t.wire_bytes for t in found), sum(t.count for t in found)
