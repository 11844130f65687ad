"""GPUs as vessels: a step's memory fills them, or bursts them."""

from __future__ import annotations

from collections.abc import Callable

from explorer.figures.palette import COMMUNICATION
from explorer.figures.svg_tensors import Drawing, at, column, text
from explorer.learn.pictures.charts import WIDTH, BarPiece, key, label, piece

VESSEL_HEIGHT, LEFT = 30.0, 58.0


def draw_vessels(
    num_gpus: int, parts: tuple[BarPiece, ...], limit: tuple[float, str], shown: Callable[[float], str]
) -> Drawing:
    """A frame for each GPU, as wide as its memory `limit[0]`, with what it must hold; the excess lies outside, outlined."""
    room, total = limit[0], sum(p.value for p in parts)
    scale = (WIDTH - LEFT - 8) / (1.04 * max(room, total))
    top, step = 24.0, VESSEL_HEIGHT + (8.0 if num_gpus < 5 else 5.0)
    head = label(LEFT, 14, limit[1])
    rows = [at(0, top + r * step, _draw_vessel(r, parts, scale, room, shown)) for r in range(num_gpus)]
    height = top + num_gpus * step
    if total > room:
        words = f"{shown(total - room)} too much"
        if (total - room) * scale > 7.5 * len(words):
            head += label(LEFT + (room + total) / 2 * scale, 14, words, "middle", size=13.5, bold=True)
        else:
            head += label(LEFT + total * scale, 14, words, "end", size=13.5, bold=True)
    return column(Drawing(WIDTH, height, head + "".join(rows)), key(parts), gap=8)


def _draw_vessel(
    rank: int, parts: tuple[BarPiece, ...], scale: float, room: float, shown: Callable[[float], str]
) -> Drawing:
    drawn, x = [at(0, 7, text(f"GPU {rank}", 13))], LEFT
    for p in parts:
        drawn.append(at(x, 2, piece(p, p.value * scale, shown)))
        x += p.value * scale
    wall = LEFT + room * scale
    drawn.append(
        f'<path d="M{wall:.1f} 0H{LEFT:.1f}V{VESSEL_HEIGHT:.0f}H{wall:.1f}" fill="none" stroke="currentColor" stroke-width="2"/>'
    )
    if x > wall:  # the wall is broken
        out = f'<path d="M{wall:.1f} 0l4 8l-7 7l7 7l-4 8" fill="none" stroke="currentColor" stroke-width="2"/>'
        over = f'<rect x="{wall + 1:.1f}" y="-1" width="{x - wall:.1f}" height="{VESSEL_HEIGHT + 2:.0f}" fill="none" stroke="{COMMUNICATION}" stroke-width="3"/>'
        drawn.append(over + out)
    else:
        drawn.append(f'<path d="M{wall:.1f} 0V{VESSEL_HEIGHT:.0f}" stroke="currentColor" stroke-width="2"/>')
    return Drawing(WIDTH, VESSEL_HEIGHT, "".join(drawn))
