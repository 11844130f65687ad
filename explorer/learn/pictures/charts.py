"""Bars, lines and timelines of the lessons, as SVG in the same language as `draw`."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from explorer.figures.svg_tensors import PAPER, Drawing, at, column, dots, on_colour, row, text, tile

WIDTH = 640.0


@dataclass(frozen=True, slots=True)
class BarPiece:
    """A piece of a stacked bar; `dotted` pieces differ without colour."""

    name: str
    value: float
    colour: str
    dotted: bool = False


@dataclass(frozen=True, slots=True)
class StackedBar:
    """One stacked bar; `mark` is a short remark behind its total, `strong` makes its name stand out."""

    name: str
    parts: tuple[BarPiece, ...]
    mark: str = ""
    strong: bool = False

    @property
    def total(self) -> float:
        """Sum of its parts."""
        return sum(p.value for p in self.parts)


def bars(
    items: Sequence[StackedBar],
    shown: Callable[[float], str],
    limit: tuple[float, str] | None = None,
    width: float = WIDTH,
) -> Drawing:
    """Stacked horizontal bars on one scale, totals at their ends, `limit` as a dashed line with its name."""
    left = 12 + 7.6 * max(len(b.name) for b in items)
    tail = 16 + 7.4 * max(len(shown(b.total) + b.mark) + 2 for b in items)
    span = width - left - tail
    scale = span / (max([b.total for b in items] + ([limit[0]] if limit else [])) or 1)
    top, step = (24.0 if limit else 4.0), 36.0
    parts = []
    for i, bar in enumerate(items):
        y = top + i * step
        parts.append(at(0, y + 5, text(bar.name, 14, 600 if bar.strong else 400)))
        x = left
        for p in bar.parts:
            parts.append(at(x, y, piece(p, p.value * scale, shown)))
            x += p.value * scale
        words = shown(bar.total) + (f", {bar.mark}" if bar.mark else "")
        parts.append(at(left + span + 12, y + 5, text(words, 13.5, 600 if bar.strong else 400)))
    height = top + len(items) * step
    if limit:
        x = left + limit[0] * scale
        parts.append(
            f'<path d="M{x:.1f} 18V{height:.1f}" stroke="currentColor" stroke-width="1.5" stroke-dasharray="5 4"/>'
        )
        end = x > width * 0.6
        anchor = "end" if end else "start"
        parts.append(
            f'<text x="{x + (-4 if end else 4):.1f}" y="13" font-size="13" text-anchor="{anchor}" '
            f'fill="currentColor">{html.escape(limit[1])}</text>'
        )
    return column(Drawing(width, height, "".join(parts)), key([p for bar in items for p in bar.parts]), gap=8)


def piece(p: BarPiece, width: float, shown: Callable[[float], str]) -> Drawing:
    """A piece of a bar, `width` wide."""
    tip = f"<title>{html.escape(p.name)}: {html.escape(shown(p.value))}</title>"
    rect = f'<rect width="{max(width - 1, 0.5):.1f}" height="26" fill="{p.colour}"{_faint(p)}/>'
    lines = dots(width, 26, p.colour) if p.dotted else ""
    return Drawing(width, 26, f"<g>{tip}{rect}{lines}</g>")


def _faint(p: BarPiece) -> str:
    return ' fill-opacity="0.25"' if p.dotted else ""


def key(parts: Iterable[BarPiece]) -> Drawing:
    """What the colours of pieces mean; nothing where all have one name."""
    found: dict[str, BarPiece] = {}
    for p in parts:
        found.setdefault(p.name, p)
    if len(found) < 2:
        return Drawing(0, 0)
    marks = []
    for p in found.values():
        swatch = Drawing(
            16,
            14,
            f'<rect width="16" height="14" fill="{p.colour}"{_faint(p)}/>'
            + (dots(16, 14, p.colour, 5) if p.dotted else ""),
        )
        marks.append(row(swatch, text(p.name, 13, muted=True), gap=6))
    return wrap(marks, WIDTH)


def wrap(boxes: Sequence[Drawing], width: float, gap: float = 16) -> Drawing:
    """Boxes in rows no wider than `width`."""
    found: list[list[Drawing]] = [[]]
    for b in boxes:
        if found[-1] and sum(o.width + gap for o in found[-1]) + b.width > width:
            found.append([])
        found[-1].append(b)
    return column(*(row(*r, gap=gap, align=0) for r in found), gap=6)


@dataclass(frozen=True, slots=True)
class Line:
    """A curve through points; `dash` tells it apart without colour."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    dash: str = ""


def plot(
    items: Sequence[Line],
    x_name: str,
    y_name: str,
    x_shown: Callable[[float], str],
    y_shown: Callable[[float], str],
    marks: Sequence[tuple[float, str]] = (),
) -> Drawing:
    """Curves on logarithmic scales (all values positive), `marks` vertical lines with their names."""
    width, height, left, low = WIDTH, 270.0, 74.0, 44.0
    xs = [x for line in items for x, _ in line.points]
    ys = [y for line in items for _, y in line.points]
    px = _scale(min(xs), max(xs), left, width - 12)
    py = _scale(min(ys), max(ys), height - low, 34 + 12 * len(marks))
    parts = [_axes(px, py, (min(xs), max(xs)), (min(ys), max(ys)), x_shown, y_shown, (left, width - 12, height - low))]
    for line in items:
        path = "M" + "L".join(f"{px(x):.1f} {py(y):.1f}" for x, y in line.points)
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        parts.append(f'<path d="{path}" fill="none" stroke="{line.colour}" stroke-width="2.5"{dash}/>')
    for k, (at_x, words) in enumerate(marks):
        x, end, y = px(at_x), px(at_x) > width * 0.6, 31 + 16 * k  # below the name of the axis
        anchor = "end" if end else "start"
        parts.append(f'<path d="M{x:.1f} {y + 4}V{height - low:.1f}" stroke="currentColor" stroke-dasharray="5 4"/>')
        parts.append(
            f'<text x="{x + (-5 if end else 5):.1f}" y="{y}" font-size="13" text-anchor="{anchor}" fill="currentColor" '
            f'stroke="{PAPER}" stroke-width="4" paint-order="stroke">{html.escape(words)}</text>'
        )
    parts.append(
        f'<text x="{(left + width) / 2:.0f}" y="{height - 4:.0f}" font-size="13" text-anchor="middle" '
        f'fill="currentColor">{html.escape(x_name)}</text>'
    )
    parts.append(f'<text x="0" y="13" font-size="13" fill="currentColor">{html.escape(y_name)}</text>')
    keys = [row(_stroke(line), text(line.name, 13, muted=True), gap=6) for line in items]
    return column(Drawing(width, height, "".join(parts)), wrap(keys, WIDTH), gap=8)


def _stroke(line: Line) -> Drawing:
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    return Drawing(28, 10, f'<path d="M0 5H28" stroke="{line.colour}" stroke-width="2.5"{dash}/>')


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    a, b = math.log10(low), math.log10(high)
    return lambda v: start + (math.log10(v) - a) / ((b - a) or 1) * (end - start)


def _axes(
    px: Callable[[float], float],
    py: Callable[[float], float],
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    x_shown: Callable[[float], str],
    y_shown: Callable[[float], str],
    edges: tuple[float, float, float],
) -> str:
    left, right, bottom = edges
    parts = []
    for v in ticks(*y_range):
        parts.append(f'<path d="M{left:.0f} {py(v):.1f}H{right:.0f}" stroke="#8a97a3" stroke-opacity="0.3"/>')
        parts.append(
            f'<text x="{left - 6:.0f}" y="{py(v) + 4:.1f}" font-size="12" text-anchor="end" '
            f'fill="currentColor">{html.escape(y_shown(v))}</text>'
        )
    for v in ticks(*x_range):
        parts.append(f'<path d="M{px(v):.1f} {bottom:.0f}v5" stroke="#8a97a3"/>')
        parts.append(
            f'<text x="{px(v):.1f}" y="{bottom + 18:.0f}" font-size="12" text-anchor="middle" '
            f'fill="currentColor">{html.escape(x_shown(v))}</text>'
        )
    return "".join(parts)


def ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside a range, and twice and five times each where they alone would be fewer than three."""
    whole = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1,), (1, 2, 5)):
        found = [s * 10.0**k for k in whole for s in steps if low * (1 - 1e-9) <= s * 10.0**k <= high * (1 + 1e-9)]
        if len(found) > 2:
            break
    return found


def timeline(
    tracks: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]], shown: Callable[[float], str], end: float
) -> Drawing:
    """Rows of (start, end, words, colour) spans on one time scale from 0 to `end`. Words stand in their span, else beside it where there
    is room."""
    left, width = 150.0, WIDTH - 150.0
    parts = []
    for i, (name, spans) in enumerate(tracks):
        y = i * 44.0
        parts.append(at(0, y + 6, text(name, 14, 600)))
        taken = left  # up to where the row is filled, with words beside spans
        for k, (start, stop, words, colour) in enumerate(spans):
            x, w, room = left + start / end * width, (stop - start) / end * width, 8.0 * len(words) + 6
            behind = left + spans[k + 1][0] / end * width if k + 1 < len(spans) else left + width
            parts.append(at(x, y, _span(w, words if w > room else "", colour)))
            on_right = behind - room > x + w
            if w <= room and words:
                parts += _beside(words, x, x + w, y, taken + room < x, on_right)
            taken = x + w + (room if w <= room and on_right else 0)
    height = len(tracks) * 44.0 + 20
    parts.append(f'<path d="M{left} {height - 18:.0f}H{left + width:.0f}" stroke="#8a97a3"/>')
    parts.append(f'<text x="{left}" y="{height:.0f}" font-size="12.5" fill="currentColor">0</text>')
    parts.append(
        f'<text x="{left + width:.0f}" y="{height:.0f}" font-size="12.5" text-anchor="end" '
        f'fill="currentColor">{html.escape(shown(end))}</text>'
    )
    return Drawing(WIDTH, height, "".join(parts))


def _beside(words: str, start: float, stop: float, y: float, left: bool, right: bool) -> list[str]:
    """Words behind a span that is too short for them, else before it, else none."""
    if not (left or right):
        return []
    x, anchor = (stop + 4, "start") if right else (start - 4, "end")
    return [
        f'<text x="{x:.1f}" y="{y + 20:.1f}" font-size="12.5" text-anchor="{anchor}" fill="currentColor">{html.escape(words)}</text>'
    ]


def _span(width: float, words: str, colour: str) -> Drawing:
    body = f'<rect width="{max(1.0, width - 1.5):.1f}" height="30" rx="2" fill="{colour}"/>'
    if words:
        body += (
            f'<text x="{width / 2:.1f}" y="20" font-size="12.5" text-anchor="middle" '
            f'fill="{on_colour(colour)}">{html.escape(words)}</text>'
        )
    return Drawing(width, 30, body)


def nodes(groups: Sequence[int], per_node: int, words: str = "node") -> Drawing:
    """The cluster: a frame per node, a square per GPU in the colour and number of its group."""
    count = -(-len(groups) // per_node)
    side = 30.0
    boxes = []
    for n in range(count):
        here = groups[n * per_node : (n + 1) * per_node]
        squares = row(*(tile(side, side, ("S", g), str(g)) for g in here), gap=3)
        w, h = squares.width + 16, side + 34
        frame = f'<rect width="{w:.0f}" height="{h:.0f}" rx="5" fill="none" stroke="#8a97a3"/>'
        boxes.append(Drawing(w, h, frame + at(8, 4, text(f"{words} {n}", 12.5, muted=True)) + at(8, 24, squares)))
    return wrap(boxes, WIDTH, gap=10)


@dataclass(frozen=True, slots=True)
class Dots:
    """A cloud of points (x, y); `mark` is "o", "square" or "cross", so that clouds differ without colour."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    mark: str = "o"


def scatter(clouds: Sequence[Dots], x_name: str, y_name: str, shown: Callable[[float], str]) -> Drawing:
    """Points on equal logarithmic axes with the line on which y is x, and the band of 10 % around it."""
    width, height, left, low = WIDTH, 400.0, 74.0, 44.0
    values = [v for cloud in clouds for point in cloud.points for v in point]
    ends = (min(values) / 1.1, max(values) * 1.1)
    px, py = _scale(*ends, left, width - 12), _scale(*ends, height - low, 24)
    parts = [_axes(px, py, ends, ends, shown, shown, (left, width - 12, height - low))]
    for factor, dash in ((1.1, "3 4"), (1.0, ""), (1 / 1.1, "3 4")):
        a, b = ends[0] * max(1, 1 / factor), ends[1] / max(1, factor)
        line = f"M{px(a):.1f} {py(a * factor):.1f}L{px(b):.1f} {py(b * factor):.1f}"
        parts.append(f'<path d="{line}" stroke="currentColor" fill="none" stroke-dasharray="{dash}"/>')
    for cloud in clouds:
        parts.append("".join(_dot(cloud, px(x), py(y)) for x, y in cloud.points))
    parts.append(
        f'<text x="{(left + width) / 2:.0f}" y="{height - 4:.0f}" font-size="13" text-anchor="middle" '
        f'fill="currentColor">{html.escape(x_name)}</text>'
    )
    parts.append(f'<text x="0" y="13" font-size="13" fill="currentColor">{html.escape(y_name)}</text>')
    keys = [
        row(Drawing(14, 14, _dot(c, 7, 7)), text(f"{c.name} ({len(c.points)})", 13, muted=True), gap=6) for c in clouds
    ]
    return column(Drawing(width, height, "".join(parts)), wrap(keys, WIDTH), gap=8)


def _dot(cloud: Dots, x: float, y: float) -> str:
    if cloud.mark == "square":
        return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" fill="none" stroke="{cloud.colour}" stroke-width="1.8"/>'
    if cloud.mark == "cross":
        d = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
        return f'<path d="{d}" fill="none" stroke="{cloud.colour}" stroke-width="2"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" fill="{cloud.colour}" fill-opacity="0.65"/>'


def columns(
    items: Sequence[tuple[str, float]],
    y_name: str,
    colour: str,
    mark: int | None = None,
    level: tuple[float, str] | None = None,
) -> Drawing:
    """Counts as upright bars with their names below; bar `mark` is outlined, `level` is a dashed line with its name."""
    width, height, left, low = WIDTH, 240.0, 8.0, 40.0
    step = (width - left) / len(items)
    most = max((v for _, v in items), default=0) or 1
    parts = [f'<text x="0" y="13" font-size="13" fill="currentColor">{html.escape(y_name)}</text>']
    for i, (name, value) in enumerate(items):
        tall = value / most * (height - low - 42)
        x, y = left + i * step, height - low - tall
        edge = ' stroke="currentColor" stroke-width="2"' if i == mark else ""
        parts.append(
            f'<rect x="{x + 2:.1f}" y="{y:.1f}" width="{step - 4:.1f}" height="{tall:.1f}" fill="{colour}"{edge}/>'
        )
        middle = x + step / 2
        if value:
            parts.append(
                f'<text x="{middle:.1f}" y="{y - 5:.1f}" font-size="12.5" text-anchor="middle" fill="currentColor">{value:g}</text>'
            )
        parts.append(
            f'<text x="{middle:.1f}" y="{height - low + 18:.1f}" font-size="12" text-anchor="middle" fill="currentColor">{html.escape(name)}</text>'
        )
    if level:
        y = height - low - level[0] / most * (height - low - 42)
        parts.append(
            f'<path d="M{left:.0f} {y:.1f}H{width:.0f}" stroke="currentColor" stroke-width="1.5" stroke-dasharray="5 4"/>'
            f'<text x="{width:.0f}" y="{y - 6:.1f}" font-size="13" text-anchor="end" fill="currentColor" stroke="{PAPER}" '
            f'stroke-width="4" paint-order="stroke">{html.escape(level[1])}</text>'
        )
    return Drawing(width, height, "".join(parts))
