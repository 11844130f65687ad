"""GPUs as vessels that a step's memory fills, and bursts where it is too much."""

from __future__ import annotations

import html
from collections.abc import Callable

from explorer.figures.palette import COMMUNICATION
from explorer.figures.svg_tensors import Drawing, at, column, text
from explorer.learn.pictures.charts import WIDTH, BarPiece, key, piece

HIGH, LEFT = 30.0, 58.0


def vessels(
    num_gpus: int, parts: tuple[BarPiece, ...], limit: tuple[float, str], shown: Callable[[float], str]
) -> Drawing:
    """A frame per GPU, as wide as its memory `limit[0]`, and what it must hold; what is too much lies outside, outlined."""
    room, total = limit[0], sum(p.value for p in parts)
    scale = (WIDTH - LEFT - 8) / (1.04 * max(room, total))
    top, step = 24.0, HIGH + (8.0 if num_gpus < 5 else 5.0)
    name = f'<text x="{LEFT:.0f}" y="14" font-size="13" fill="currentColor">{html.escape(limit[1])}</text>'
    rows = [at(0, top + r * step, _vessel(r, parts, scale, room, shown)) for r in range(num_gpus)]
    height = top + num_gpus * step
    if total > room:
        words = f"{shown(total - room)} too much"
        x = LEFT + (room + total) / 2 * scale
        anchor = "middle" if (total - room) * scale > 7.5 * len(words) else "end"
        x = x if anchor == "middle" else LEFT + total * scale
        name += (
            f'<text x="{x:.1f}" y="14" font-size="13.5" font-weight="600" text-anchor="{anchor}" '
            f'fill="currentColor">{html.escape(words)}</text>'
        )
    return column(Drawing(WIDTH, height, name + "".join(rows)), key(parts), gap=8)


def _vessel(
    rank: int, parts: tuple[BarPiece, ...], scale: float, room: float, shown: Callable[[float], str]
) -> Drawing:
    found, x = [at(0, 7, text(f"GPU {rank}", 13))], LEFT
    for p in parts:
        found.append(at(x, 2, piece(p, p.value * scale, shown)))
        x += p.value * scale
    wall = LEFT + room * scale
    found.append(
        f'<path d="M{wall:.1f} 0H{LEFT:.1f}V{HIGH:.0f}H{wall:.1f}" fill="none" stroke="currentColor" stroke-width="2"/>'
    )
    if x > wall:  # the wall is broken
        out = f'<path d="M{wall:.1f} 0l4 8l-7 7l7 7l-4 8" fill="none" stroke="currentColor" stroke-width="2"/>'
        over = f'<rect x="{wall + 1:.1f}" y="-1" width="{x - wall:.1f}" height="{HIGH + 2:.0f}" fill="none" stroke="{COMMUNICATION}" stroke-width="3"/>'
        found.append(over + out)
    else:
        found.append(f'<path d="M{wall:.1f} 0V{HIGH:.0f}" stroke="currentColor" stroke-width="2"/>')
    return Drawing(WIDTH, HIGH, "".join(found))
