"""Every choice of a block's weights as a dot: what it sends and what it keeps."""

from __future__ import annotations

from typing import Any

import numpy as np

from explorer.figures.palette import COMMUNICATION, COMPUTE
from explorer.figures.svg_tensors import PAPER, Drawing, column, text
from explorer.learn.pictures.charts import WIDTH
from explorer.text import units
from planner_core.search.candidates import Candidates


def draw_candidates(found: Candidates, mine: int, best: int) -> Drawing:
    """The candidates by communication and memory, with the front, and the rows `mine` and `best` marked."""
    x, y = found.comm_s * 1e3, found.memory_bytes / units.GIB
    ok = np.isfinite(x) & np.isfinite(y)
    left, top, width, height = 64.0, 12.0, WIDTH - 80, 250.0
    xs, ys = (0.0, float(x[ok].max()) * 1.04 or 1.0), (0.0, float(y[ok].max()) * 1.08)

    def px(v: Any) -> Any:
        return left + (v - xs[0]) / (xs[1] - xs[0]) * width

    def py(v: Any) -> Any:
        return top + height - (v - ys[0]) / (ys[1] - ys[0]) * height

    spots = np.unique(np.rint(np.stack([px(x[ok]), py(y[ok])], axis=1)).astype(int), axis=0)
    parts = [f'<path d="M{left} {top}V{top + height}H{left + width}" stroke="#8a97a3" fill="none"/>']
    parts += [f'<circle cx="{a}" cy="{b}" r="2.6" fill="#8a97a3" fill-opacity="0.5"/>' for a, b in spots.tolist()]
    front = np.flatnonzero(found.on_front)
    front = front[np.argsort(x[front])]
    parts.append(
        f'<path d="M{"L".join(f"{px(x[i]):.1f} {py(y[i]):.1f}" for i in front)}" fill="none" '
        f'stroke="{COMPUTE}" stroke-width="2"/>'
    )
    parts += [f'<circle cx="{px(x[i]):.1f}" cy="{py(y[i]):.1f}" r="4" fill="{COMPUTE}"/>' for i in front]
    named = [(best, "optimum", COMPUTE, 22.0)] + ([(mine, "yours", COMMUNICATION, -12.0)] if ok[mine] else [])
    for i, word, colour, down in named:
        cx, cy = float(px(x[i])), float(py(y[i]))
        parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="9" fill="none" stroke="{colour}" stroke-width="3"/>')
        parts.append(
            f'<text x="{min(cx + 10, WIDTH - 60):.1f}" y="{cy + down + 4:.1f}" font-size="14" font-weight="600" '
            f'fill="currentColor" stroke="{PAPER}" stroke-width="5" paint-order="stroke">{word}</text>'
        )
    parts += [
        f'<text x="{left - 6}" y="{py(v) + 4:.1f}" font-size="12" text-anchor="end" '
        f'fill="currentColor">{units.significant(v)}</text>'
        for v in (0.0, ys[1] / 2, ys[1])
    ]
    parts += [
        f'<text x="{px(v):.1f}" y="{top + height + 18:.0f}" font-size="12" text-anchor="middle" '
        f'fill="currentColor">{units.significant(v)}</text>'
        for v in (xs[1] / 2, xs[1] * 0.97)
    ]
    chart = Drawing(WIDTH, top + height + 24, "".join(parts))
    return column(
        text("memory per layer and GPU, GiB", 13, muted=True),
        chart,
        text("communication per layer, ms; the line is the front: no choice is better in both", 13, muted=True),
        gap=6,
    )
