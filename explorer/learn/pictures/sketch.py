"""A prediction that the learner draws before the truth is shown: bars, spans of time, or points of curves, dragged or moved with keys.

Python draws the frame, where every handle stands at first, and the truth, which stays hidden. `static/js/lessons/pictures/sketch.js` moves the
handles and compares. Who draws a mistake that is expected (`ExpectedMistake`) gets a reply to it.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from explorer.figures.palette import COMPUTE, DEVICES, GREY
from explorer.figures.svg_tensors import PAPER, Drawing, at, svg, text
from explorer.learn.pictures.charts import draw_span, label
from explorer.text import units

WIDTH = 440.0
ROW_HEIGHT, HIGH, LOW = 62.0, 26.0, 14.0
"""Of a row of bars or spans: its height, that of what is drawn, and that of the truth below it."""
INSTRUCTIONS = (
    "Drag the handles. With keys: Tab to a handle, then the arrow keys or Page Up and Page Down. Then compare."
)
LEFT, TOP_Y, LOW_Y = 40.0, 42.0, 230.0
"""Of a curve's frame."""
LINES = ((DEVICES[0], "7 4"), (DEVICES[2], "2 3"))
"""Colour and dashes of the curves, in order."""


@dataclass(frozen=True, slots=True)
class Handle:
    """One thing to predict. `at` is a span's track, or where a point stands along its curve's axis (0 to 1); a span is `long`;
    `line` is a point's curve."""

    name: str
    start: float
    truth: float
    at: float = 0.0
    long: float = 0.0
    line: int = 0
    colour: str = COMPUTE


@dataclass(frozen=True, slots=True)
class ExpectedMistake:
    """What one draws who makes a mistake that is expected, handle by handle (None: whatever it is), and the reply."""

    name: str
    values: tuple[float | None, ...]
    reply: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve to draw: where it begins, if that is before its first handle, and the whole true curve, if it is more than the handles' truths; both as
    (place from 0 to 1, value)."""

    name: str
    begin: tuple[float, float] | None = None
    true: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True)
class Sketch:
    """Handles on a scale from 0 to `most` in `unit`; `why` explains the truth. `key` tells one sketch from others of the page."""

    key: str
    unit: str
    most: float
    handles: tuple[Handle, ...]
    mistakes: tuple[ExpectedMistake, ...] = ()
    why: str = ""

    def said(self, value: float) -> str:
        """Return a value with its unit."""
        return f"{units.significant(value)} {self.unit}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """A sketch whose words come from a lesson's prose. `facts` are what the prose needs; `draw` gives the markup."""

    sketch: Sketch
    draw: Callable[[Sketch], str]
    facts: Mapping[str, Any]

    def markup(self, why: str, replies: Mapping[str, str]) -> str:
        """Return the sketch with an explanation of its truth, and a reply to each expected mistake by its name."""
        mistakes = tuple(replace(m, reply=replies[m.name]) for m in self.sketch.mistakes)
        return self.draw(replace(self.sketch, mistakes=mistakes, why=why))


def bars(sketch: Sketch, known: tuple[str, float], limit: tuple[float, str] | None = None) -> str:
    """Draw horizontal bars whose ends are dragged, below one that is `known`; `limit` is a dashed line with its name."""
    left, right, top = _rows_left([known[0], *(h.name for h in sketch.handles)]), WIDTH - 84, 24.0 if limit else 4.0
    scale = (right - left) / sketch.most
    still, truth, moving = [at(0, top + 4, text(known[0], 14))], [], []
    still.append(
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{known[1] * scale:.1f}" height="{HIGH:.0f}" fill="{GREY}"/>'
    )
    still.append(_draw_label(left + known[1] * scale + 6, top + 18, sketch.said(known[1])))
    top += 40
    for i, h in enumerate(sketch.handles):
        y = top + i * ROW_HEIGHT
        still.append(at(0, y + 4, text(h.name, 14)))
        still.append(f'<path d="M{left:.1f} {y:.1f}v{HIGH + LOW + 4:.0f}" stroke="{GREY}"/>')
        truth.append(
            f'<rect x="{left:.1f}" y="{y + HIGH + 2:.1f}" width="{max(1.0, h.truth * scale):.1f}" height="{LOW:.0f}" fill="none" stroke="currentColor" '
            f'stroke-width="2"/>{_draw_label(left + h.truth * scale + 6, y + HIGH + LOW, f"is {sketch.said(h.truth)}")}'
        )
        x = left + h.start * scale
        fill = f'<rect class="fill" x="{left - x:.1f}" width="{x - left:.1f}" height="{HIGH:.0f}" fill="{h.colour}"/>'
        moving.append(_draw_handle(sketch, i, x, y, fill + _draw_grip(), (10, 18)))
    height = top + len(sketch.handles) * ROW_HEIGHT
    if limit:
        x = left + limit[0] * scale
        still.append(
            f'<path d="M{x:.1f} 18V{height - 12:.1f}" stroke="currentColor" stroke-width="1.5" stroke-dasharray="5 4"/>'
        )
        still.append(_draw_label(x, 13, limit[1], "middle"))
    return _write_markup(sketch, "bar", (left, right), (still, truth, moving), height)


def spans(sketch: Sketch, tracks: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]]) -> str:
    """Draw spans of time on `tracks`, each (name, what stands there from the start as (start, end, words, colour)); a handle's row is its track."""
    left, right, top = _rows_left(name for name, _ in tracks), WIDTH - 8, 4.0
    scale = (right - left) / sketch.most
    still, truth, moving = [], [], []
    for i, (name, fixed) in enumerate(tracks):
        y = top + i * ROW_HEIGHT
        still.append(at(0, y + 4, text(name, 14)))
        still.append(f'<path d="M{left:.1f} {y + HIGH + LOW + 6:.1f}H{right:.1f}" stroke="{GREY}"/>')
        still += [
            _draw_short_span(left + a * scale, y, (b - a) * scale, words, colour) for a, b, words, colour in fixed
        ]
    for i, h in enumerate(sketch.handles):
        y, wide = top + h.at * ROW_HEIGHT, h.long * scale
        x = left + h.truth * scale
        truth.append(
            f'<rect x="{x + 1:.1f}" y="{y + HIGH + 2:.1f}" width="{wide - 2:.1f}" height="{LOW:.0f}" fill="none" stroke="currentColor" stroke-width="2"/>'
            f'<text x="{x + wide / 2:.1f}" y="{y + HIGH + LOW - 1:.1f}" font-size="11" text-anchor="middle" fill="currentColor">{html.escape(_short_name(h.name))}</text>'
        )
        body = f'<g class="held">{_draw_short_span(0, 0, wide, h.name, h.colour)}</g>'
        moving.append(_draw_handle(sketch, i, left + h.start * scale, y, body, wide=wide))
    height = top + len(tracks) * ROW_HEIGHT
    still.append(_draw_label(left, height + 12, "0"))
    still.append(_draw_label(right, height + 12, sketch.said(sketch.most), "end"))
    return _write_markup(sketch, "span", (left, right), (still, truth, moving), height + 16)


def curves(
    sketch: Sketch, lines: Sequence[Curve], ticks: Sequence[tuple[float, str]], y_name: str, still: str = ""
) -> str:
    """Draw curves through points that are dragged up and down; `ticks` are (place from 0 to 1, words) along the axis. `still` is drawn behind, in the
    coordinates of `curve_scales`."""
    px, py = curve_scales(sketch.most)
    frame, truth, moving = [still, _draw_label(0, 14, y_name)], [], []
    frame.append(f'<path d="M{px(0):.1f} {TOP_Y}V{LOW_Y}H{px(1):.1f}" fill="none" stroke="{GREY}"/>')
    frame += [
        _draw_label(px(x), LOW_Y + 18, words, "end" if x > 0.97 else "middle" if x else "start") for x, words in ticks
    ]
    frame += [
        _draw_label(LEFT - 6, LOW_Y + 4, "0", "end"),
        _draw_label(LEFT - 6, TOP_Y + 8, units.significant(sketch.most), "end"),
    ]
    for k, line in enumerate(lines):
        line_handles, look = [h for h in sketch.handles if h.line == k], _stroke_of(k)
        first = [(px(line.begin[0]), py(line.begin[1]))] if line.begin else []
        anchor = f' data-begin="{first[0][0]:.1f} {first[0][1]:.1f}"' if first else ""
        points = _path_through([*first, *((px(h.at), py(h.start)) for h in line_handles)])
        moving.append(f'<path class="drawn" data-line="{k}"{anchor} d="{points}" fill="none" {look}/>')
        true = line.true or [(h.at, h.truth) for h in line_handles]
        truth.append(
            f'<path d="{_path_through([(px(x), py(v)) for x, v in true])}" fill="none" stroke="{LINES[k][0]}" stroke-width="4"/>'
        )
        x = LEFT + 150 * k
        frame += [
            f'<path d="M{x:.0f} {LOW_Y + 38:.0f}h28" {look}/>',
            _draw_label(x + 34, LOW_Y + 42, f"your {line.name}"),
        ]
    for i, h in enumerate(sketch.handles):
        edge = f'fill="{LINES[h.line][0]}" stroke="{PAPER}" stroke-width="2"'
        mark = f'<rect x="-8" y="-8" width="16" height="16" {edge}/>' if h.line else f'<circle r="9" {edge}/>'
        moving.append(
            _draw_handle(
                sketch, i, px(h.at), py(h.start), mark, (0, 25 if h.line else -14), words=units.significant(h.start)
            )
        )
    return _write_markup(sketch, "point", (py(0), py(sketch.most)), (frame, truth, moving), LOW_Y + 46)


def _stroke_of(line: int) -> str:
    return f'stroke="{LINES[line][0]}" stroke-width="2" stroke-dasharray="{LINES[line][1]}"'


def curve_scales(most: float) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Return the coordinates of a curve's frame: of a place from 0 to 1 along its axis, and of a value."""
    return lambda x: LEFT + x * (WIDTH - 20 - LEFT), lambda v: LOW_Y - v / most * (LOW_Y - TOP_Y)


def _path_through(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _rows_left(names: Iterable[str]) -> float:
    """Return where rows begin, behind their names."""
    # 7.6 px is a letter of 14 px type in the mean.
    return 14 + 7.6 * max(map(len, names))


def _draw_label(x: float, y: float, words: str, anchor: str = "start") -> str:
    return label(x, y, words, anchor, halo=3)


def _draw_short_span(x: float, y: float, wide: float, words: str, colour: str) -> str:
    shown = words if 7.0 * len(words) + 4 < wide else _short_name(words)
    return at(x, y, draw_span(wide, shown, colour, HIGH))


def _short_name(name: str) -> str:
    """Return `layer 2` of `gather of layer 2`."""
    return name.rpartition(" of ")[2]


def _draw_grip() -> str:
    return f'<rect class="grip" x="-5" y="-4" width="10" height="{HIGH + 8:.0f}" rx="4" fill="{PAPER}" stroke="currentColor" stroke-width="2"/>'


def _draw_handle(
    sketch: Sketch,
    i: int,
    x: float,
    y: float,
    body: str,
    value_at: tuple[float, float] | None = None,
    wide: float = 0.0,
    words: str = "",
) -> str:
    """Draw handle number i at (x, y): something to grab, as large as a finger, and its value beside it where `value_at` says so."""
    h = sketch.handles[i]
    grab = f'<rect class="hit" x="{-22 if not wide else 0}" y="-22" width="{wide or 44:.1f}" height="{44 + HIGH * bool(wide):.0f}" fill="transparent"/>'
    if value_at:
        grab += _draw_label(
            *value_at, words or sketch.said(h.start), "middle" if value_at[0] == 0 else "start"
        ).replace("<text", '<text class="value"', 1)
    return (
        f'<g class="handle" tabindex="0" role="slider" data-at="{i}" transform="translate({x:.1f} {y:.1f})" aria-label="{html.escape(h.name)}" '
        f'aria-valuemin="0" aria-valuemax="{sketch.most:g}" aria-valuenow="{h.start:g}" aria-valuetext="{html.escape(sketch.said(h.start))}">{body}{grab}</g>'
    )


def _write_markup(
    sketch: Sketch, look: str, scale: tuple[float, float], parts: tuple[list[str], list[str], list[str]], height: float
) -> str:
    still, truth, moving = ("".join(p) for p in parts)
    inside = f'{still}<g class="truth" visibility="hidden">{truth}</g>{moving}'
    picture = svg(Drawing(WIDTH, height, inside), "A prediction to draw").replace('role="img"', 'role="group"', 1)
    # A mistake beyond the scale cannot be drawn, so nobody is told of it.
    drawable = [m for m in sketch.mistakes if all(v is None or 0 <= v <= sketch.most for v in m.values)]
    data = {
        "key": sketch.key,
        "look": look,
        "unit": sketch.unit,
        "most": sketch.most,
        "from": scale[0],
        "to": scale[1],
        "why": sketch.why,
        "handles": [{"name": h.name, "start": h.start, "truth": h.truth, "line": h.line} for h in sketch.handles],
        "slips": [{"values": list(m.values), "why": m.reply} for m in drawable],
    }
    return (
        f'<div class="sketch" data-sketch="{html.escape(json.dumps(data))}"><p class="how">{INSTRUCTIONS}</p>{picture}'
        '<p class="bar"><button type="button" class="compare">Compare</button></p><div class="said" aria-live="polite"></div></div>'
    )
