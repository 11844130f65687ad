"""GPUs as vessels: a step's memory fills them, or bursts them."""

from __future__ import annotations

from explorer.figures.palette import COMMUNICATION
from explorer.figures.svg_tensors import Drawing, at, column, text
from explorer.learn.pictures.charts import NARROW, BarPiece, key, label, piece
from explorer.text import units

VESSEL_HEIGHT, LEFT = 30.0, 58.0


def draw_vessels(num_gpus: int, parts: tuple[BarPiece, ...], limit: tuple[float, str]) -> Drawing:
    """Draw a frame for each GPU, as wide as its memory, with what it must hold; the excess lies outside, outlined.

    `limit` is that memory in bytes, and in words.
    """
    room, total = limit[0], sum(p.value for p in parts)
    scale = (NARROW - LEFT - 8) / (1.04 * max(room, total))
    top, step = 24.0, VESSEL_HEIGHT + (8.0 if num_gpus < 5 else 5.0)
    head = label(LEFT, 14, limit[1])
    rows = [at(0, top + r * step, _draw_vessel(r, parts, scale, room)) for r in range(num_gpus)]
    height = top + num_gpus * step
    if total > room:
        words = f"{units.difference(total, room, units.memory)} too much"
        # At the end, not above the excess: where the GPU is small beside it, its words begin where the limit's still stand.
        head += label(LEFT + total * scale, 14, words, "end", size=13.5, bold=True)
    return column(Drawing(NARROW, height, head + "".join(rows)), key(parts, NARROW), gap=8)


def _draw_vessel(rank: int, parts: tuple[BarPiece, ...], scale: float, room: float) -> Drawing:
    drawn, x = [at(0, 7, text(f"GPU {rank}", 13))], LEFT
    for p in parts:
        drawn.append(at(x, 2, piece(p, p.value * scale, units.memory)))
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
    return Drawing(NARROW, VESSEL_HEIGHT, "".join(drawn))
