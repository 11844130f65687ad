"""Bars, lines and timelines of the lessons, as SVG in the language of `explorer.figures.svg_tensors`."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from explorer.figures.palette import DEVICES, GREY, MEMORY_COLOURS, MEMORY_KINDS, MEMORY_NAMES
from explorer.figures.scale import Scale
from explorer.figures.svg_tensors import PAPER, Drawing, at, column, dots, on_colour, row, text, tile

WIDTH = 608.0
"""Pixels of a chart, and the most of a film: on a phone of 400 pixels a film is shown at 0.6 of its size, in the 368 of the page."""
NARROW = 430.0
"""Pixels of a picture that a phone of 400 shows as a whole, at 0.84 of its size (css/lessons/lesson.css)."""


def label(
    x: float, y: float, words: str, anchor: str = "start", *, size: float = 13, halo: int = 0, bold: bool = False
) -> str:
    """Write words at a point of a chart; a `halo` of paper, in pixels, keeps them legible on lines and areas."""
    weight = ' font-weight="600"' if bold else ""
    edge = f' stroke="{PAPER}" stroke-width="{halo}" paint-order="stroke"' if halo else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}"{weight} text-anchor="{anchor}" fill="currentColor"{edge}>'
        f"{html.escape(words)}</text>"
    )


def swatch(colour: str, dotted: bool) -> Drawing:
    """Return the colour of a piece or a band, for the key of a chart."""
    faint = ' fill-opacity="0.25"' if dotted else ""
    return Drawing(
        16, 14, f'<rect width="16" height="14" fill="{colour}"{faint}/>' + (dots(16, 14, colour, 5) if dotted else "")
    )


@dataclass(frozen=True, slots=True)
class BarPiece:
    """A piece of a stacked bar; `dotted` pieces differ without colour."""

    name: str
    value: float
    colour: str
    dotted: bool = False


@dataclass(frozen=True, slots=True)
class StackedBar:
    """One stacked bar; `mark` is a short remark after its total, `strong` makes its name stand out."""

    name: str
    parts: tuple[BarPiece, ...]
    mark: str = ""
    strong: bool = False

    @property
    def total(self) -> float:
        """Sum of its parts."""
        return sum(p.value for p in self.parts)


def bars(items: Sequence[StackedBar], shown: Callable[[float], str], limit: tuple[float, str] | None = None) -> Drawing:
    """Draw stacked horizontal bars on one scale, each below its name and total, and `limit` as a dashed line with its name."""
    # Next to the bars, names and totals would leave them no length on a phone, or be out of its screen.
    heads = [_draw_bar_head(bar, shown) for bar in items]
    width = max([NARROW, *(head.width for head in heads)])
    scale = width / (max([b.total for b in items] + ([limit[0]] if limit else [])) or 1)
    top, step, low = (22.0 if limit else 0.0), 54.0, 22.0
    parts, wall = [], ""
    for i, (bar, head) in enumerate(zip(items, heads, strict=True)):
        y, x = top + i * step, 0.0
        parts.append(at(0, y, head))
        for p in bar.parts:
            parts.append(at(x, y + low, piece(p, p.value * scale, shown)))
            x += p.value * scale
        if limit:  # from bar to bar it would cross the words
            wall += f"M{limit[0] * scale:.1f} {y + low - 3:.0f}v32"
    if limit:
        x = limit[0] * scale
        parts.append(f'<path d="{wall}" stroke="currentColor" stroke-width="2" stroke-dasharray="5 4"/>')
        parts.append(label(x, 13, limit[1], "end") if x > width * 0.6 else label(x, 13, limit[1]))
    drawn = Drawing(width, top + len(items) * step, "".join(parts))
    return column(drawn, key([p for bar in items for p in bar.parts], width), gap=8)


def _draw_bar_head(bar: StackedBar, shown: Callable[[float], str]) -> Drawing:
    """Write a bar's name, its total and its mark."""
    words = shown(bar.total) + (f", {bar.mark}" if bar.mark else "")
    name = text(bar.name, 14, 600 if bar.strong else 400)
    return row(name, text(words, 13.5, 600), gap=10) if bar.name else text(words, 13.5, 600)


def piece(p: BarPiece, width: float, shown: Callable[[float], str]) -> Drawing:
    """Return a piece of a bar, `width` wide."""
    tip = f"<title>{html.escape(p.name)}: {html.escape(shown(p.value))}</title>"
    faint = ' fill-opacity="0.25"' if p.dotted else ""
    rect = f'<rect width="{max(width - 1, 0.5):.1f}" height="26" fill="{p.colour}"{faint}/>'
    return Drawing(width, 26, f"<g>{tip}{rect}{dots(width, 26, p.colour) if p.dotted else ''}</g>")


def key(parts: Iterable[BarPiece], width: float = WIDTH) -> Drawing:
    """Say what the colours of pieces mean, in rows of `width` pixels; nothing where all have one name."""
    by_name: dict[str, BarPiece] = {}
    for p in parts:
        by_name.setdefault(p.name, p)
    if len(by_name) < 2:
        return Drawing(0, 0)
    return wrap([row(swatch(p.colour, p.dotted), text(p.name, 13, muted=True), gap=6) for p in by_name.values()], width)


def memory_pieces(num_bytes: Mapping[str, float]) -> tuple[BarPiece, ...]:
    """Return pieces of one GPU's memory, by the kinds of `MEMORY_KINDS`; other keys, and kinds that take nothing, are left out."""
    return tuple(
        BarPiece(MEMORY_NAMES[k], float(num_bytes[k]), MEMORY_COLOURS[k], dotted=k in ("grads", "activations"))
        for k in MEMORY_KINDS
        if num_bytes.get(k)
    )


def wrap(boxes: Sequence[Drawing], width: float, gap: float = 16) -> Drawing:
    """Put boxes in rows no wider than `width`."""
    rows: list[list[Drawing]] = [[]]
    for b in boxes:
        if rows[-1] and sum(o.width + gap for o in rows[-1]) + b.width > width:
            rows.append([])
        rows[-1].append(b)
    return column(*(row(*r, gap=gap, align=0) for r in rows), gap=6)


def grid(boxes: Sequence[Drawing], per_row: int, gap: float = 10) -> Drawing:
    """Put boxes in rows of `per_row`, their tops aligned."""
    return column(*(row(*boxes[i : i + per_row], gap=gap, align=0) for i in range(0, len(boxes), per_row)), gap=gap)


def even_grid(boxes: Sequence[Drawing]) -> Drawing:
    """Put boxes in rows of nearly equal length, not much wider than a chart."""
    most = max(1, int(660 // (max(b.width for b in boxes) + 10)))
    num_rows = -(-len(boxes) // most)
    return grid(boxes, -(-len(boxes) // num_rows))


LOOKS = ((DEVICES[0], ""), (DEVICES[5], "7 4"), (DEVICES[2], "2 3"), (DEVICES[3], "10 3 2 3"), (DEVICES[4], "14 5"))
"""Colours and dashes of the curves of a plot, in order: dashes tell them apart without colour."""


LEFT, LOW = 74.0, 44.0
"""Pixels of a chart left of its axes and below them, for numbers and names."""


def draw_chart(
    x: Scale,
    y: Scale,
    names: tuple[str, str],
    shown: tuple[Callable[[float], str], Callable[[float], str]],
    inside: str,
) -> Drawing:
    """Draw what lies `inside` on two axes; `names` and `shown`, how values are written, are those of x and of y."""
    left, right, bottom = x.start, x.end, y.start
    parts = []
    for v in y.ticks():
        parts.append(f'<path d="M{left:.0f} {y(v):.1f}H{right:.0f}" stroke="{GREY}" stroke-opacity="0.3"/>')
        parts.append(label(left - 6, y(v) + 4, shown[1](v), "end", size=12))
    for v in x.ticks():
        parts.append(f'<path d="M{x(v):.1f} {bottom:.0f}v5" stroke="{GREY}"/>')
        parts.append(label(x(v), bottom + 18, shown[0](v), "middle", size=12))
    parts += [inside, label((left + WIDTH) / 2, bottom + LOW - 4, names[0], "middle"), label(0, 13, names[1])]
    return Drawing(WIDTH, bottom + LOW, "".join(parts))


def plot(
    xs: Sequence[float],
    curves: Mapping[str, Callable[[float], float]],
    x_name: str,
    y_name: str,
    x_shown: Callable[[float], str],
    y_shown: Callable[[float], str],
    marks: Sequence[tuple[float, str]] = (),
) -> Drawing:
    """Draw curves by their names at `xs`, on logarithmic scales (all values positive); `marks` are vertical lines with their names."""
    bottom = 226.0
    values_by_name = {name: [curve(x) for x in xs] for name, curve in curves.items()}
    ys = [y for values in values_by_name.values() for y in values]
    px, py = Scale(min(xs), max(xs), LEFT, WIDTH - 12), Scale(min(ys), max(ys), bottom, 34 + 12 * len(marks))
    parts, keys = [], []
    for (name, values), (colour, dash) in zip(values_by_name.items(), LOOKS, strict=False):
        path = "L".join(f"{px(x):.1f} {py(y):.1f}" for x, y in zip(xs, values, strict=True))
        look = f'fill="none" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"'
        parts.append(f'<path d="M{path}" {look}/>')
        stroke = Drawing(28, 10, f'<path d="M0 5H28" {look}/>')
        keys.append(row(stroke, text(name, 13, muted=True), gap=6))
    for k, (at_x, words) in enumerate(marks):
        x, y = px(at_x), 31 + 16 * k  # below the name of the axis
        parts.append(f'<path d="M{x:.1f} {y + 4}V{bottom:.1f}" stroke="currentColor" stroke-dasharray="5 4"/>')
        parts.append(label(x - 5, y, words, "end", halo=4) if x > WIDTH * 0.6 else label(x + 5, y, words, halo=4))
    chart = draw_chart(px, py, (x_name, y_name), (x_shown, y_shown), "".join(parts))
    return column(chart, wrap(keys, WIDTH), gap=8)


def timeline(
    tracks: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]], shown: Callable[[float], str], end: float
) -> Drawing:
    """Draw rows of (start, end, words, colour) spans on one time scale from 0 to `end`.

    Words stand in their span, or next to it where only that has room.
    """
    left, width = 150.0, WIDTH - 150.0
    parts = []
    for i, (name, spans) in enumerate(tracks):
        y = i * 44.0
        parts.append(at(0, y + 6, text(name, 14, 600)))
        filled = left  # the row is filled up to here, words next to spans included
        for k, (start, stop, words, colour) in enumerate(spans):
            x, w, room = left + start / end * width, (stop - start) / end * width, 8.0 * len(words) + 6
            behind = left + spans[k + 1][0] / end * width if k + 1 < len(spans) else left + width
            parts.append(at(x, y, draw_span(w, words if w > room else "", colour)))
            on_right = behind - room > x + w
            if w <= room and words:
                parts += _label_next_to(words, x, x + w, y, filled + room < x, on_right)
            filled = x + w + (room if w <= room and on_right else 0)
    height = len(tracks) * 44.0 + 20
    parts.append(f'<path d="M{left} {height - 18:.0f}H{left + width:.0f}" stroke="{GREY}"/>')
    parts += [label(left, height, "0", size=12.5), label(left + width, height, shown(end), "end", size=12.5)]
    return Drawing(WIDTH, height, "".join(parts))


def _label_next_to(words: str, start: float, stop: float, y: float, left: bool, right: bool) -> list[str]:
    """Write words after a span that is too short for them, or before it; none where neither side has room."""
    if right:
        return [label(stop + 4, y + 20, words, size=12.5)]
    return [label(start - 4, y + 20, words, "end", size=12.5)] if left else []


def draw_span(width: float, words: str, colour: str, height: float = 30) -> Drawing:
    """Return a span of time with its words."""
    body = f'<rect width="{max(2.0, width - 1.5):.1f}" height="{height:.0f}" rx="2" fill="{colour}"/>'
    if words:
        body += (
            f'<text x="{width / 2:.1f}" y="{height / 2 + 5:.0f}" font-size="12.5" text-anchor="middle" '
            f'fill="{on_colour(colour)}">{html.escape(words)}</text>'
        )
    return Drawing(width, height, body)


def nodes(groups: Sequence[int], per_node: int) -> Drawing:
    """Return the cluster: a frame per node, a square per GPU in the colour and number of its group."""
    count = -(-len(groups) // per_node)
    side = 30.0
    boxes = []
    for n in range(count):
        here = groups[n * per_node : (n + 1) * per_node]
        squares = row(*(tile(side, side, ("S", g), str(g)) for g in here), gap=3)
        w, h = squares.width + 16, side + 34
        frame = f'<rect width="{w:.0f}" height="{h:.0f}" rx="5" fill="none" stroke="{GREY}"/>'
        boxes.append(Drawing(w, h, frame + at(8, 4, text(f"node {n}", 12.5, muted=True)) + at(8, 24, squares)))
    return wrap(boxes, WIDTH, gap=10)


@dataclass(frozen=True, slots=True)
class Dots:
    """A cloud of points (x, y); `mark` is "o", "square" or "cross", so that clouds differ without colour."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    mark: str = "o"


def scatter(clouds: Sequence[Dots], x_name: str, y_name: str, shown: Callable[[float], str]) -> Drawing:
    """Draw points on equal logarithmic axes with the line on which y is x, and the band of 10 % around it."""
    values = [v for cloud in clouds for point in cloud.points for v in point]
    ends = (min(values) / 1.1, max(values) * 1.1)
    px, py = Scale(*ends, LEFT, WIDTH - 12), Scale(*ends, 356, 24)
    parts = []
    for factor, dash in ((1.1, "3 4"), (1.0, ""), (1 / 1.1, "3 4")):
        a, b = ends[0] * max(1, 1 / factor), ends[1] / max(1, factor)
        line = f"M{px(a):.1f} {py(a * factor):.1f}L{px(b):.1f} {py(b * factor):.1f}"
        parts.append(f'<path d="{line}" stroke="currentColor" fill="none" stroke-dasharray="{dash}"/>')
    parts += [_draw_dot(cloud, px(x), py(y)) for cloud in clouds for x, y in cloud.points]
    keys = [
        row(Drawing(14, 14, _draw_dot(c, 7, 7)), text(f"{c.name} ({len(c.points)})", 13, muted=True), gap=6)
        for c in clouds
    ]
    chart = draw_chart(px, py, (x_name, y_name), (shown, shown), "".join(parts))
    return column(chart, wrap(keys, WIDTH), gap=8)


def _draw_dot(cloud: Dots, x: float, y: float) -> str:
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
    """Draw counts as upright bars with their names below; bar `mark` is outlined, `level` is a dashed line with its name."""
    width, height, left, low = WIDTH, 240.0, 8.0, 40.0
    step = (width - left) / len(items)
    most = max((v for _, v in items), default=0) or 1
    parts, values = [label(0, 13, y_name)], []
    for i, (name, value) in enumerate(items):
        tall = value / most * (height - low - 42)
        x, y = left + i * step, height - low - tall
        edge = ' stroke="currentColor" stroke-width="2"' if i == mark else ""
        parts.append(
            f'<rect x="{x + 2:.1f}" y="{y:.1f}" width="{step - 4:.1f}" height="{tall:.1f}" fill="{colour}"{edge}/>'
        )
        middle = x + step / 2
        if value:
            values.append(label(middle, y - 5, f"{value:g}", "middle", size=12.5, halo=4))
        parts.append(label(middle, height - low + 18, name, "middle", size=12))
    if level:
        y = height - low - level[0] / most * (height - low - 42)
        parts.append(
            f'<path d="M{left:.0f} {y:.1f}H{width:.0f}" stroke="currentColor" stroke-width="1.5" stroke-dasharray="5 4"/>'
        )
        parts.append(label(width, y - 6, level[1], "end", halo=4))
    return Drawing(width, height, "".join([*parts, *values]))  # a value close to the level stays legible
