"""Every choice of a block's weights as a dot: what it sends and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from explorer.figures.palette import COMMUNICATION, COMPUTE, GREY
from explorer.figures.svg_tensors import Drawing, column, text
from explorer.learn.pictures.charts import WIDTH, label
from explorer.text import units
from planner_core.search.candidates import Candidates


@dataclass(frozen=True, slots=True)
class CloudFrame:
    """Two linear axes with their names: `x_range` along the foot, and from 0 up to `y_most`."""

    x_range: tuple[float, float]
    y_most: float
    x_name: str
    y_name: str
    left: float = 62.0
    top: float = 24.0
    width: float = WIDTH - 80
    height: float = 255.0

    def x(self, value: Any) -> Any:
        """Where a value, or an array of them, stands along the foot."""
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * self.width

    def y(self, value: Any) -> Any:
        """Return how far from the top a value stands."""
        return self.top + self.height - value / self.y_most * self.height

    def path(self, points: Sequence[tuple[float, float]], style: str) -> str:
        """Return a line through points."""
        places = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        return f'<path d="M{places}" fill="none" {style}/>'

    def draw(self, inside: Sequence[str], x_ticks: Sequence[float]) -> Drawing:
        """Return the chart with its axes and names."""
        foot = self.top + self.height
        axes = f'<path d="M{self.left} {self.top}V{foot}H{self.left + self.width}" stroke="{GREY}" fill="none"/>'
        numbers = [
            label(self.left - 6, self.y(v) + 4, units.significant(v), "end", size=12)
            for v in (0.0, self.y_most / 2, self.y_most)
        ]
        numbers += [label(self.x(v), foot + 18, units.significant(v), "middle", size=12) for v in x_ticks]
        chart = Drawing(WIDTH, foot + 24, "".join([axes, *inside, *numbers]))
        return column(text(self.y_name, 13, muted=True), chart, text(self.x_name, 13, muted=True), gap=6)


def circle(x: float, y: float, radius: float, style: str) -> str:
    """Return a dot or a ring, whichever `style` makes it."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" {style}/>'


def draw_candidates(candidates: Candidates, mine: int, best: int) -> Drawing:
    """Return the candidates by communication and memory, with the front, and the rows `mine` and `best` marked."""
    x, y = candidates.comm_s * 1e3, candidates.memory_bytes / units.GIB
    ok = np.isfinite(x) & np.isfinite(y)
    most_x = float(x[ok].max()) * 1.04 or 1.0
    frame = CloudFrame(
        (0.0, most_x),
        float(y[ok].max()) * 1.08,
        "communication per layer, ms; the line is the front: no choice is better in both",
        "memory per layer and GPU, GiB",
    )
    spots = np.unique(np.rint(np.stack([frame.x(x[ok]), frame.y(y[ok])], axis=1)).astype(int), axis=0)
    parts = [circle(a, b, 2.6, f'fill="{GREY}" fill-opacity="0.5"') for a, b in spots.tolist()]
    front = np.flatnonzero(candidates.on_front)
    front = front[np.argsort(x[front])]
    parts.append(frame.path([(x[i], y[i]) for i in front], f'stroke="{COMPUTE}" stroke-width="2"'))
    parts += [circle(frame.x(x[i]), frame.y(y[i]), 4, f'fill="{COMPUTE}"') for i in front]
    named = [(best, "optimum", COMPUTE, 22.0)] + ([(mine, "yours", COMMUNICATION, -12.0)] if ok[mine] else [])
    for i, word, colour, down in named:
        cx, cy = float(frame.x(x[i])), float(frame.y(y[i]))
        parts.append(circle(cx, cy, 9, f'fill="none" stroke="{colour}" stroke-width="3"'))
        parts.append(label(min(cx + 10, WIDTH - 60), cy + down + 4, word, size=14, halo=5, bold=True))
    return frame.draw(parts, (most_x / 2, most_x * 0.97))
