"""Pictures of tensors on devices, as SVG text. Pure functions; every text that goes in is escaped.

A `Drawing` is a piece of drawing with a size; `row`, `column` and `device` put drawings together. Colours of text and paper
are the page's own, so that one picture serves light and dark. Replicate is grey, Shard solid in the colour of its
device, Partial hatched in it; the letters R, S(dim) and P stand with each, so colour is never alone. Hatching means
Partial and nothing else. There are eight device colours: from rank 8 on they come again with a dotted frame inside.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from explorer.figures.palette import DEVICES, GREY, device_colour
from explorer.text import units

CELL_W, CELL_H = 44.0, 30.0
PAPER = "var(--st-background-color, #fff)"
Style = tuple[str, int | None]
"""(look, rank): look is "R", "S", "P" or "" (plain)."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A drawing of `width` × `height` with its corner at the origin."""

    width: float
    height: float
    body: str = ""


def svg(box: Drawing, alt: str) -> str:
    """Return the finished picture; `alt` says in words what it shows."""
    w, h = box.width + 4, box.height + 4
    return (
        f'<svg viewBox="-2 -2 {w:.0f} {h:.0f}" width="{w:.0f}" height="{h:.0f}" style="--w:{w:.0f}px" role="img" '
        f'aria-label="{html.escape(alt)}">'
        f"{box.body}</svg>"
    )


def at(x: float, y: float, box: Drawing) -> str:
    """Return the box moved to (x, y)."""
    return f'<g transform="translate({x:.1f} {y:.1f})">{box.body}</g>' if box.body else ""


def row(*boxes: Drawing, gap: float = 14, align: float = 0.5) -> Drawing:
    """Put boxes side by side; `align` 0 top, 0.5 middle, 1 bottom."""
    height = max((b.height for b in boxes), default=0)
    x, parts = 0.0, []
    for b in boxes:
        parts.append(at(x, (height - b.height) * align, b))
        x += b.width + gap
    return Drawing(max(0.0, x - gap), height, "".join(parts))


def column(*boxes: Drawing, gap: float = 14) -> Drawing:
    """Put boxes below each other, flush left."""
    width = max((b.width for b in boxes), default=0)
    y, parts = 0.0, []
    for b in boxes:
        parts.append(at(0, y, b))
        y += b.height + gap
    return Drawing(width, max(0.0, y - gap), "".join(parts))


def text(words: str, size: float = 14, weight: int = 400, colour: str = "currentColor", muted: bool = False) -> Drawing:
    """Write one line."""
    fade = ' opacity="0.75"' if muted else ""
    body = (
        f'<text x="0" y="{size:.1f}" font-size="{size}" font-weight="{weight}" '
        f'fill="{colour}"{fade}>{html.escape(words)}</text>'
    )
    return Drawing(len(words) * size * 0.53 + 2, size * 1.3, body)


def lines(*words: str, size: float = 14, muted: bool = False) -> Drawing:
    """Write several lines."""
    return column(*(text(w, size, muted=muted) for w in words), gap=2)


def on_colour(colour: str) -> str:
    """Return black or white, whichever reads better on `colour` (WCAG relative luminance)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (light + 0.05) > (light + 0.05) / 0.05 else "#000000"


def hatch(width: float, height: float, colour: str) -> str:
    """Return diagonal lines that fill a rectangle, cut at its edges."""
    every = 7.0
    path, c = [], every
    while c < width + height:
        x0, y0 = min(c, width), max(0.0, c - width)
        x1, y1 = max(0.0, c - height), min(c, height)
        path.append(f"M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}")
        c += every
    return f'<path d="{"".join(path)}" stroke="{colour}" stroke-width="1.6" stroke-opacity="0.75" fill="none"/>'


def tile(width: float, height: float, style: Style, words: str = "", size: float = 14) -> Drawing:
    """Return a rectangle in the look of a placement, with a text in its middle."""
    look, rank = style
    colour = GREY if rank is None else device_colour(rank)
    frame = f'width="{width:.1f}" height="{height:.1f}"'
    ink, halo = "currentColor", ""
    if look == "S":
        body = f'<rect {frame} fill="{colour}" stroke="{PAPER}" stroke-width="1"/>'
        ink = on_colour(colour)
        body += repeated_colour_frame(width, height, ink) if rank is not None and rank >= len(DEVICES) else ""
    elif look == "P":
        body = (
            f'<rect {frame} fill="{colour}" fill-opacity="0.14" stroke="{colour}" '
            f'stroke-opacity="0.6"/>{hatch(width, height, colour)}'
        )
        halo = f' stroke="{PAPER}" stroke-width="4" paint-order="stroke" stroke-linejoin="round"'
    elif look == "R":
        body = f'<rect {frame} fill="{GREY}" fill-opacity="0.3" stroke="{GREY}" stroke-opacity="0.7"/>'
    else:
        body = f'<rect {frame} fill="none" stroke="{GREY}" stroke-opacity="0.6"/>'
    if words:
        body += (
            f'<text x="{width / 2:.1f}" y="{height / 2 + size * 0.36:.1f}" text-anchor="middle" font-size="{size}" '
            f'fill="{ink}"{halo}>{html.escape(words)}</text>'
        )
    return Drawing(width, height, body)


def repeated_colour_frame(width: float, height: float, ink: str) -> str:
    """Return the dotted frame of a device whose colour another one has already."""
    inner = f'x="3" y="3" width="{max(0.0, width - 6):.1f}" height="{max(0.0, height - 6):.1f}"'
    return f'<rect {inner} fill="none" stroke="{ink}" stroke-width="1.5" stroke-dasharray="1.5 2.5"/>'


def dots(width: float, height: float, colour: str, every: float = 7) -> str:
    """Fill a rectangle with dots: for pieces of bars that must differ without colour."""
    rows = [
        f'<circle cx="{x + every / 2 * (k % 2):.1f}" cy="{y:.1f}" r="1.3"/>'
        for k, y in enumerate(_spread(height, every))
        for x in _spread(width - every / 2 * (k % 2), every)
    ]
    return f'<g fill="{colour}" fill-opacity="0.9">{"".join(rows)}</g>'


def _spread(extent: float, every: float) -> list[float]:
    return [every / 2 + k * every for k in range(int((extent - every / 4) // every))]


def number(value: float) -> str:
    """Return a cell's number: integers as such, else two decimals with a true minus."""
    value = float(value) + 0.0  # no minus before a zero
    shown = f"{value:.0f}" if value.is_integer() else f"{value:.2f}"
    return ("0.00" if shown == "-0.00" else shown).replace("-", "−")


def difference(value: float) -> str:
    """Return how far two results are apart: 0, or the power of ten that tells rounding from a mistake."""
    return f"{value:.0e}".replace("-", "−") if value else "0"  # a hyphen would let the line break


def matrix(
    values: Any, style: Callable[[int, int], Style], name: str = "", placement: str = "", cell: float = CELL_W
) -> Drawing:
    """Return a matrix of real numbers, cell by cell; `name` and the letter of its placement stand above."""
    rows = [[float(v) for v in r] for r in values]
    grid = column(
        *(
            row(*(tile(cell, CELL_H, style(i, j), number(v)) for j, v in enumerate(r)), gap=0)
            for i, r in enumerate(rows)
        ),
        gap=0,
    )
    return titled(grid, name, placement)


def titled(box: Drawing, name: str, placement: str = "") -> Drawing:
    """Return a caption above a box: its name in strong, its placement beside it."""
    if not name and not placement:
        return box
    words = row(
        *([text(name, 14, 600)] if name else []),
        *([text(placement, 13, muted=True)] if placement else []),
        gap=6,
        align=1,
    )
    return column(words, box, gap=4)


def replicated(i: int, j: int) -> Style:
    """Return the style of a matrix that every device holds whole."""
    return "R", None


def owned(rank: int, look: str = "S") -> Callable[[int, int], Style]:
    """Return the style of a matrix that one device holds: solid, or hatched where it is one term of a sum."""
    return lambda i, j: (look, rank)


def sliced(dim: int, size: int, parts: int) -> Callable[[int, int], Style]:
    """Return the style of a whole matrix whose slices along `dim` (of `size`) belong to `parts` devices."""
    return lambda i, j: ("S", (j if dim else i) * parts // size)


def device(rank: int, box: Drawing, words: str = "") -> Drawing:
    """Return a frame round what one device holds, with its name in its colour."""
    colour = device_colour(rank)
    name = words or f"GPU {rank}"
    width, height = max(box.width + 20, len(name) * 8 + 24), box.height + 42
    body = (
        f'<rect width="{width:.1f}" height="{height:.1f}" rx="5" fill="none" stroke="{colour}" stroke-width="2"/>'
        f'<rect width="{width:.1f}" height="24" rx="4" fill="{colour}"/>'
        f'<text x="10" y="17" font-size="13.5" font-weight="600" fill="{on_colour(colour)}">{html.escape(name)}</text>'
    )
    body += repeated_colour_frame(width, 24, on_colour(colour)) if rank >= len(DEVICES) else ""
    return Drawing(width, height, body + at(10, 32, box))


def sign(words: str, size: float = 20) -> Drawing:
    """Return an operator between boxes."""
    return text(words, size, 400)


def arrow(width: float = 40, words: str = "") -> Drawing:
    """Return an arrow to the right, with a word above it."""
    width = max(width, len(words) * 7.3 + 8)
    body = (
        f'<path d="M0 24H{width - 8:.0f}M{width - 8:.0f} 24l-7 -4.5v9z" stroke="currentColor" fill="currentColor" '
        'stroke-width="1.5"/>'
    )
    above = (
        f'<text x="{width / 2 - 3:.0f}" y="14" font-size="13" text-anchor="middle" '
        f'fill="currentColor">{html.escape(words)}</text>'
    )
    return Drawing(width, 34, body + (above if words else ""))


LONG_CELL = 22
"""Letters from which on a cell of a table may break."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], mark: int | None = None) -> str:
    """Return an HTML table; row `mark` is the one meant. Cells are text."""
    top = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in head)
    body = "".join(
        f"<tr{' class=mark' if i == mark else ''}>" + "".join(_cell(c) for c in r) + "</tr>" for i, r in enumerate(rows)
    )
    whole = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    # where it is wider than the page, keys scroll it too
    return f'<div class="scroll" tabindex="0" role="group" aria-label="Table">{whole}</div>'


def _cell(words: str) -> str:
    """Return a cell; a short one stays on one line, e.g. a number with its unit."""
    look = ' class="long"' if len(words) > LONG_CELL else ""
    return f"<td{look}>{html.escape(words)}</td>"


def legend(*looks: str) -> Drawing:
    """Return what the looks mean, for the foot of a picture."""
    words = {"R": "R  Replicate: whole on each", "S": "S  Shard: a slice", "P": "P  Partial: not summed yet"}
    return row(
        *(row(tile(22, 14, (k, None if k == "R" else 0)), text(words[k], 12.5, muted=True), gap=6) for k in looks),
        gap=18,
    )


def amount(num_bytes: float) -> str:
    """Return the bytes in the largest unit that leaves a figure of one or more, so that two of them compare at a glance."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= size:
            return f"{units.significant(num_bytes / size)} {unit}"
    return f"{int(num_bytes)} B"
