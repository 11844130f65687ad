"""What all figures share: their look, and the line at the memory that a plan may take. Pure."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from explorer.figures.palette import Theme
from explorer.text import units

GIB = units.GIB
FONT = '"Source Sans", "Source Sans 3", sans-serif'

LIMIT_WORDS = "a plan may take"
"""The words at the line of memory in every figure."""


def apply_style(figure: go.Figure, theme: Theme, height: int) -> go.Figure:
    """Give a figure the page's font and colours, with the legend below."""
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
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": theme.muted, "activecolor": theme.text},
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


def escape(text: str) -> str:
    """Escape a text that Plotly reads as markup."""
    return html.escape(text, quote=False)


def draw_open_marks(
    figure: go.Figure, ends: Sequence[tuple[Any, Any]], name: str, symbol: str, size: tuple[float, float], colour: str
) -> None:
    """Draw open marks around points (x, y); `size` is the diameter and the line's width."""
    figure.add_scatter(
        x=[x for x, _ in ends],
        y=[y for _, y in ends],
        mode="markers",
        name=name,
        hoverinfo="skip",
        marker={"symbol": f"{symbol}-open", "size": size[0], "color": colour, "line": {"width": size[1]}},
        showlegend=bool(ends),
    )


def draw_limit_line(figure: go.Figure, limit_bytes: int, theme: Theme) -> None:
    """Draw a dashed line at the memory of one GPU that a plan may take: what lies above does not fit."""
    figure.add_hline(
        y=limit_bytes / GIB,
        line={"color": theme.text, "width": 1.5, "dash": "dash"},
        annotation={"text": f"{LIMIT_WORDS} {units.memory(limit_bytes)}", "font": {"color": theme.text, "size": 13}},
        annotation_position="top left",
    )
