"""A stacked area over the moments of a step, on a linear scale, with a limit."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from explorer.figures.palette import GREY
from explorer.figures.svg_tensors import PAPER, Drawing, column, row, text
from explorer.learn.pictures.charts import WIDTH, label, swatch, wrap


@dataclass(frozen=True, slots=True)
class Stratum:
    """One kind of the stack: a height at each moment. `dotted` tells it apart without colour."""

    name: str
    heights: tuple[float, ...]
    colour: str
    dotted: bool = False


def draw_area(
    bands: Sequence[Stratum],
    shown: Callable[[float], str],
    limit: tuple[float, str],
    parts: Sequence[tuple[int, str]],
    mark: tuple[int, str] | None,
    upto: int | None,
) -> Drawing:
    """Stack bands in order; `parts` are (first moment, name) along the axis, `mark` a moment with its words.

    The moments from `upto` on keep their room and are not drawn.
    """
    width, height, left, low, top = WIDTH, 280.0, 62.0, 28.0, 34.0
    count = len(bands[0].heights)
    last = count if upto is None else upto
    totals = [sum(b.heights[i] for b in bands) for i in range(count)]
    most = 1.06 * max(*totals, limit[0])

    def px(i: float) -> float:
        return left + i / max(1, count - 1) * (width - left - 8)

    def py(value: float) -> float:
        return height - low - value / most * (height - low - top)

    drawn, below = [], [0.0] * count
    for band in bands:
        above = [b + h for b, h in zip(below, band.heights, strict=True)]
        path = "M" + "L".join(f"{px(i):.1f} {py(above[i]):.1f}" for i in range(last))
        path += "L" + "L".join(f"{px(i):.1f} {py(below[i]):.1f}" for i in reversed(range(last))) + "Z"
        faint = ' fill-opacity="0.3"' if band.dotted else ""
        drawn.append(
            f'<path d="{path}" fill="{band.colour}"{faint} stroke="{PAPER}" stroke-width="0.6"><title>{html.escape(band.name)}</title></path>'
        )
        below = above
    drawn += [label(0, 16, "memory of one GPU", size=12.5, halo=3), *_limit(limit, py(limit[0]), left, width, shown)]
    for start, name in parts:
        drawn.append(f'<path d="M{px(start):.1f} {height - low:.1f}v6" stroke="currentColor"/>')
        drawn.append(label(px(start) + 2, height - low + 18, name, size=12.5, halo=3))
    drawn.append(f'<path d="M{left} {height - low:.1f}H{width - 8:.1f}" stroke="{GREY}"/>')
    if mark is not None:
        x, y, end = px(mark[0]), py(totals[mark[0]]), px(mark[0]) > width * 0.6
        drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="currentColor" stroke-width="2"/>')
        drawn.append(label(x + (-10 if end else 10), y - 8, mark[1], "end" if end else "start", size=12.5, halo=3))
    keys = [
        row(swatch(b.colour, b.dotted), text(b.name, 13, muted=True), gap=6) for b in bands if max(b.heights[:last]) > 0
    ]
    return column(Drawing(width, height, "".join(drawn)), wrap(keys, WIDTH), gap=8)


def _limit(limit: tuple[float, str], y: float, left: float, width: float, shown: Callable[[float], str]) -> list[str]:
    line = (
        f'<path d="M{left} {y:.1f}H{width - 8:.1f}" stroke="currentColor" stroke-width="1.5" stroke-dasharray="5 4"/>'
    )
    value = shown(limit[0]).split("\u202f")[0]
    return [
        line,
        label(left + 4, y - 6, limit[1], size=12.5, halo=3),
        label(left - 6, y + 4, value, "end", size=12.5, halo=3),
    ]
