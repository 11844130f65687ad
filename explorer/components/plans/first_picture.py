"""A chart whose first picture does not wait for the plotting library.

A cold browser loads 4.7 MB of plotly before it draws anything. Until then a picture of the same points stands in the chart's place: marks
and lines as SVG, names and ticks as text over it, all at shares of the box, so that it fits every width. It goes when plotly has drawn.
"""

from __future__ import annotations

import html
import itertools
import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from explorer.figures import scatter

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
TICKS = 6
GRAIN = 0.5
"""Marks closer than this share of the picture, in percent, are one mark of the sketch."""

Range = tuple[float, float]


def begin() -> None:
    """Forget what a run that was ended left; call at the head of a page."""
    st.session_state["unsketched"] = {}


def chart(figure: go.Figure, key: str, **how: Any) -> None:
    """`st.plotly_chart`; at its first run in a visit the sketch stands there, and plotly is asked for by `rest`."""
    waiting: dict[str, Callable[[], object]] = st.session_state["unsketched"]
    known: set[str] = st.session_state.setdefault("sketched", set())
    with st.container(key=f"first_{key}"):
        before, after = st.empty(), st.container()  # at later runs too: the chart stays where it is
    draw = partial(after.plotly_chart, figure, key=key, **how)
    if key in known:
        draw()
        return
    before.html(sketch(figure))
    waiting[key] = draw


def rest() -> None:
    """Draw by plotly what was only sketched; call once the page stands, since a browser that unpacks plotly does nothing else."""
    waiting: dict[str, Callable[[], object]] = st.session_state.pop("unsketched", {})
    for draw in waiting.values():
        draw()
    st.session_state.setdefault("sketched", set()).update(waiting)


def sketch(figure: go.Figure) -> str:
    """The figure's points, lines, names, ticks and legend as markup of any width; `figure` has two linear axes and scatter traces."""
    layout = figure.layout.to_plotly_json()
    traces = [t for t in figure.data if t.x is not None and len(t.x) and t.x[0] is not None]
    x = _range(layout["xaxis"], [t.x for t in traces])
    y = _range(layout["yaxis"], [t.y for t in traces])
    grid = layout["yaxis"]["gridcolor"]
    drawn = [_line(at, 0, at, 100, grid, 1) for at in (_share(v, x) for v in _ticks(x))]
    drawn += [_line(0, at, 100, at, grid, 1) for at in (100 - _share(v, y) for v in _ticks(y))]
    for trace in traces:
        drawn += _trace(trace, x, y)
    for shape in layout.get("shapes", ()):
        at = 100 - _share(shape["y0"], y)
        drawn.append(_line(0, at, 100, at, shape["line"]["color"], shape["line"]["width"], "7 5"))
    words = [_text(_share(v, x), 100, f"{v:g}", "x") for v in _ticks(x)]
    words += [_text(0, 100 - _share(v, y), f"{v:g}", "y") for v in _ticks(y)]
    words += [_note(note, x, y) for note in layout.get("annotations", ())]
    across, up = (html.escape(layout[axis]["title"]["text"]) for axis in ("xaxis", "yaxis"))
    return (
        f"<div class='sketch' aria-hidden='true'><div class='plot'><img alt='' src='{_image(''.join(drawn))}'>{''.join(words)}</div>"
        f"<b class='across'>{across}</b><b class='up'>{up}</b><p>{''.join(_legend(traces))}</p></div>"
    )


def _image(drawn: str) -> str:
    """A drawing as the address of an image: the page takes no SVG in its markup."""
    text = f"<svg xmlns='http://www.w3.org/2000/svg' width='100%' height='100%'>{drawn}</svg>"
    return f"data:image/svg+xml;base64,{b64encode(text.encode()).decode()}"


def _range(axis: dict[str, Any], values: Sequence[Any]) -> Range:
    if axis.get("range"):
        low, high = axis["range"]
        return float(low), float(high)
    return 0.0, 1.05 * max((float(max(v)) for v in values), default=1.0) or 1.0


def _share(value: float, ends: Range) -> float:
    """Where a value lies between the ends, in percent."""
    return 100 * (value - ends[0]) / (ends[1] - ends[0])


def _ticks(ends: Range) -> Iterable[float]:
    """Round values between the ends, at most `TICKS` steps."""
    rough = (ends[1] - ends[0]) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in STEPS if s * power >= rough)
    return [k * step for k in range(math.ceil(ends[0] / step), math.floor(ends[1] / step) + 1)]


def _trace(trace: Any, x: Range, y: Range) -> Iterator[str]:
    look = trace.to_plotly_json()
    ends = [(_share(a, x), 100 - _share(b, y)) for a, b in zip(map(float, trace.x), map(float, trace.y), strict=True)]
    marker, mode = look.get("marker", {}), look["mode"]
    if "lines" in mode:
        line = look["line"]
        dash = "2 4" if line.get("dash") == "dot" else ""
        for one, other in itertools.pairwise(ends):
            yield _line(*one, *other, line["color"], line.get("width", 1), dash)
    if "markers" in mode:
        alike = {(round(a / GRAIN), round(b / GRAIN)): (a, b) for a, b in ends}
        yield f"<g opacity='{marker.get('opacity', 1)}'>{''.join(_mark(a, b, marker) for a, b in alike.values())}</g>"


def _line(x0: float, y0: float, x1: float, y1: float, colour: str, width: float, dash: str = "") -> str:
    dashed = f" stroke-dasharray='{dash}'" if dash else ""
    return f"<line x1='{x0:.1f}%' y1='{y0:.1f}%' x2='{x1:.1f}%' y2='{y1:.1f}%' stroke='{colour}' stroke-width='{width}'{dashed}/>"


def _mark(x: float, y: float, marker: dict[str, Any]) -> str:
    symbol, radius, colour = marker.get("symbol", "circle"), marker["size"] / 2, marker["color"]
    open_ = symbol.endswith("-open")
    look = f"fill='none' stroke='{colour}' stroke-width='{marker['line']['width']}'" if open_ else f"fill='{colour}'"
    if symbol.startswith("circle"):
        return f"<circle cx='{x:.1f}%' cy='{y:.1f}%' r='{radius:g}' {look}/>"
    size = f"x='-{radius:g}' y='-{radius:g}' width='{2 * radius:g}' height='{2 * radius:g}'"
    turned = " transform='rotate(45)'" if symbol.startswith("diamond") else ""
    return f"<svg x='{x:.1f}%' y='{y:.1f}%' overflow='visible'><rect {size} {look}{turned}/></svg>"


def _text(x: float, y: float, text: str, kind: str, shift: tuple[float, float] = (0, 0)) -> str:
    """Words at a point given in percent, moved by pixels."""
    dx, dy = shift
    return f"<span class='{kind}' style='left:calc({x:.1f}% + {dx:g}px);top:calc({y:.1f}% + {dy:g}px)'>{text}</span>"


def _note(note: dict[str, Any], x: Range, y: Range) -> str:
    """A name beside its mark, or the words at a line across."""
    inside = str(note.get("xref", "x")).endswith("domain")
    left = 100 * note["x"] if inside else _share(note["x"], x)
    kind = {scatter.WIDE: "name wide", scatter.NARROW: "name narrow"}.get(note.get("opacity", 1), "name")
    return _text(left, 100 - _share(note["y"], y), _words(note["text"]), kind, (note.get("ax", 3), note.get("ay", -10)))


def _legend(traces: Iterable[Any]) -> Iterator[str]:
    for trace in traces:
        if trace.showlegend is not False and trace.name:
            colour = trace.marker.color if "markers" in trace.mode else trace.line.color
            yield f"<span><i style='background:{colour}'></i>{_words(trace.name)}</span>"


def _words(text: str) -> str:
    """A text that was escaped for plotly, escaped once."""
    return html.escape(html.unescape(text))
