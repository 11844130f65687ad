"""Every choice of a block's weights as a dot: what it sends and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from explorer.figures.palette import COMMUNICATION, COMPUTE, GREY
from explorer.figures.scale import Scale
from explorer.figures.svg_tensors import Drawing, column, text
from explorer.learn.pictures.charts import LEFT, WIDTH, draw_chart, label
from explorer.text import units
from planner_core.search.candidates import Candidates


def cloud_scales(x_range: tuple[float, float], y_most: float) -> tuple[Scale, Scale]:
    """Return the linear axes of a cloud; that of y begins at zero."""
    return Scale(*x_range, LEFT, WIDTH - 12, log=False), Scale(0.0, y_most, 284, 36, log=False)


def draw_cloud(x: Scale, y: Scale, names: tuple[str, str], inside: Sequence[str], remark: str) -> Drawing:
    """Return what lies `inside` on its axes, with a remark below."""
    shown = "{:g}".format, "{:g}".format
    return column(draw_chart(x, y, names, shown, "".join(inside)), text(remark, 13, muted=True), gap=6)


def line_through(x: Scale, y: Scale, points: Sequence[tuple[float, float]], style: str) -> str:
    """Return a line through points (x, y)."""
    return f'<path d="M{"L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)}" fill="none" {style}/>'


def circle(x: float, y: float, radius: float, style: str) -> str:
    """Return a dot or a ring, whichever `style` makes it."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" {style}/>'


def draw_candidates(candidates: Candidates, mine: int, best: int) -> Drawing:
    """Return the candidates by communication and memory, with the front, and the rows `mine` and `best` marked."""
    ms, gib = candidates.comm_s * 1e3, candidates.memory_bytes / units.GIB
    ok = np.isfinite(ms) & np.isfinite(gib)
    x, y = cloud_scales((0.0, float(ms[ok].max()) * 1.04 or 1.0), float(gib[ok].max()) * 1.08)
    spots = sorted({(round(x(a)), round(y(b))) for a, b in zip(ms[ok].tolist(), gib[ok].tolist(), strict=True)})
    parts = [circle(a, b, 2.6, f'fill="{GREY}" fill-opacity="0.5"') for a, b in spots]
    front = np.flatnonzero(candidates.on_front)
    ends = sorted(zip(ms[front].tolist(), gib[front].tolist(), strict=True))
    parts.append(line_through(x, y, ends, f'stroke="{COMPUTE}" stroke-width="2"'))
    parts += [circle(x(a), y(b), 4, f'fill="{COMPUTE}"') for a, b in ends]
    named = [(best, "optimum", COMPUTE, 22.0)] + ([(mine, "yours", COMMUNICATION, -12.0)] if ok[mine] else [])
    for i, word, colour, down in named:
        cx, cy = x(float(ms[i])), y(float(gib[i]))
        parts.append(circle(cx, cy, 9, f'fill="none" stroke="{colour}" stroke-width="3"'))
        parts.append(label(min(cx + 10, WIDTH - 60), cy + down + 4, word, size=14, halo=5, bold=True))
    names = "communication per layer, ms", "memory per layer and GPU, GiB"
    return draw_cloud(x, y, names, parts, "The line is the front: no choice is better in both.")
