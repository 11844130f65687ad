"""Figures of the printed report as SVG: memory by kind, and the step in lanes. Pure: values in, SVG out.

Drawn for white paper; hatching and words go with every colour, so that a black-and-white print is readable.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from explorer.figures.palette import LIGHT, MEMORY_COLOURS, MEMORY_KINDS, MEMORY_NAMES
from explorer.figures.style import LIMIT_WORDS
from explorer.figures.svg_tensors import on_colour
from explorer.text import units
from explorer.text.words import plan_title
from planner_core.core import Plan

WIDTH, NAME_W, END = 520.0, 92.0, 56.0
"""Pixels of a figure, of the names on its left, and of the figures on its right."""
SPAN = WIDTH - NAME_W - END
LANE_H, BAR_H, NAME_H = 13.0, 26.0, 18.0
HATCH = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect width="5" height="5" fill="{LIGHT.surface}"/><rect width="2" height="5" fill="{LIGHT.faint}"/></pattern></defs>'
)


def memory_svg(plans: Mapping[str, Plan], limits: Mapping[str, int]) -> str:
    """Draw memory per GPU stacked by kind, one bar a plan, with what it may take (`limits`, bytes) as a line."""
    capacities = [limits[n] for n in plans]
    most = max(*capacities, *(_total_bytes(p) for p in plans.values())) * 1.02
    y, parts = 16.0, []
    for p, capacity in zip(plans.values(), capacities, strict=True):
        parts.append(_limit_mark(NAME_W + capacity / most * SPAN, y - 2, NAME_H + BAR_H - 6))
        if len(set(capacities)) > 1:
            parts.append(_text(NAME_W + SPAN, y + 11, f"{LIMIT_WORDS} {units.memory(capacity)}", anchor="end"))
        parts.append(_text(0, y + 11, plan_title(p), bold=True))
        x = NAME_W
        y += NAME_H
        for kind in MEMORY_KINDS:
            size = p.cost.memory_bytes.get(kind, 0)
            wide = size / most * SPAN
            label = f"{MEMORY_NAMES[kind]} {units.memory(size)}"
            parts.append(_rect(x, y, wide, BAR_H - 8, MEMORY_COLOURS[kind], label))
            if wide > 34:
                parts.append(
                    _inside(
                        x + wide / 2, y + 12.5, units.significant(size / units.GIB), on_colour(MEMORY_COLOURS[kind])
                    )
                )
            x += wide
        parts.append(_text(x + 5, y + 13, units.memory(p.cost.memory_bytes["peak"])))
        y += BAR_H
    label = (
        f"{LIMIT_WORDS} {units.memory(capacities[0])}; in the bars GiB"
        if len(set(capacities)) == 1
        else "in the bars GiB"
    )
    parts.append(_text(NAME_W + max(capacities) / most * SPAN, 10, label, anchor="end"))
    y += 6
    for i, kind in enumerate(MEMORY_KINDS):
        parts.append(_rect(i * 104, y, 9, 9, MEMORY_COLOURS[kind]))
        parts.append(_text(i * 104 + 13, y + 8.5, MEMORY_NAMES[kind]))
    return _svg(y + 14, "".join(parts), "Memory per GPU by kind")


def _limit_mark(x: float, y: float, high: float) -> str:
    return f'<path d="M{x:.1f} {y:.1f}v{high:.1f}" stroke="{LIGHT.text}" stroke-width="1.3" stroke-dasharray="4 3"/>'


def _total_bytes(plan: Plan) -> int:
    kinds = sum(plan.cost.memory_bytes.get(k, 0) for k in MEMORY_KINDS)
    return max(kinds, plan.cost.memory_bytes["peak"])


def timeline_svg(drawn: Mapping[str, Any]) -> str:
    """Draw one step of each plan in lanes (`explorer.analysis.streams`); work too short to see is merged."""
    widest = max((plan["step_s"] for plan in drawn["plans"]), default=0.0) or 1.0
    y, parts, used = 0.0, [HATCH], set()
    for plan in drawn["plans"]:
        parts.append(_text(0, y + 11, f"{plan['name']}: {plan['told']}", bold=True))
        y += NAME_H
        for at, lane in enumerate(plan["lanes"]):
            parts.append(_text(0, y + 9.5, lane, muted=True))
            for work in _merge_short([w for w in plan["works"] if w[0] == at], widest / SPAN):
                used.add(work.kind)
                parts.append(_work(work, drawn, widest, y))
            y += LANE_H
        y += 5
    parts.append(_axis(widest, y))
    legend, high = _legend([k for i, k in enumerate(drawn["kinds"]) if i in used and k["words"]], y + 24)
    return _svg(high, "".join([*parts, *legend]), "One training step in time")


@dataclass(slots=True)
class _MergedWork:
    """Neighbours of one kind in a lane. `text`: the number of the words about the first."""

    kind: int
    text: int
    start_s: float
    end_s: float
    number: int = 1


def _merge_short(works: Sequence[Sequence[Any]], least_s: float) -> Iterator[_MergedWork]:
    """Merge works of one kind that touch, of which one is shorter than `least_s`."""
    now: _MergedWork | None = None
    for _, kind, text, start, seconds, *_ in works:
        if now and now.kind == kind and start - now.end_s < least_s and min(seconds, now.end_s - now.start_s) < least_s:
            now.end_s, now.number = start + seconds, now.number + 1
            continue
        if now:
            yield now
        now = _MergedWork(kind, text, start, start + seconds)
    if now:
        yield now


def _work(work: _MergedWork, drawn: Mapping[str, Any], widest: float, y: float) -> str:
    kind, seconds = drawn["kinds"][work.kind], work.end_s - work.start_s
    x, wide = NAME_W + work.start_s / widest * SPAN, seconds / widest * SPAN
    more = f" and {work.number - 1} more" if work.number > 1 else ""
    label = f"{drawn['words'][work.text]}{more}: {kind['told']} {units.seconds(seconds)}"
    fill = "url(#hatch)" if kind.get("hatch") else kind["colour"] or LIGHT.grid
    return _rect(x, y, wide, LANE_H - 2.5, fill, label)


def _legend(kinds: Sequence[Mapping[str, Any]], y: float) -> tuple[list[str], float]:
    """Return the colours in words, three in a row, and where the next line would be."""
    parts = []
    for i, kind in enumerate(kinds):
        x, line = (i % 3) * WIDTH / 3, y + i // 3 * 14
        parts.append(_rect(x, line, 9, 9, "url(#hatch)" if kind.get("hatch") else kind["colour"]))
        parts.append(_text(x + 13, line + 8.5, kind["words"]))
    return parts, y + -(-len(kinds) // 3) * 14 + 4


def _axis(widest: float, y: float) -> str:
    parts = [f'<path d="M{NAME_W} {y:.1f}H{NAME_W + SPAN:.1f}" stroke="{LIGHT.faint}"/>']
    step = round_step(widest / 4)
    for k in range(int(widest / step) + 1):
        x = NAME_W + k * step / widest * SPAN
        parts.append(f'<path d="M{x:.1f} {y:.1f}v4" stroke="{LIGHT.faint}"/>')
        parts.append(_text(x, y + 14, units.seconds(k * step), anchor="middle", muted=True))
    return "".join(parts)


def round_step(value: float) -> float:
    """Return the next of 1, 2 or 5 times a power of ten at or above `value`."""
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * (1 - 1e-9))


def _inside(x: float, y: float, words: str, ink: str) -> str:
    """Write words in the middle of a bar."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="9.5" text-anchor="middle" fill="{ink}">{html.escape(words)}</text>'
    )


def _rect(x: float, y: float, width: float, height: float, fill: str, label: str = "") -> str:
    inside = f"<title>{html.escape(label)}</title>" if label else ""
    edge = f' stroke="{LIGHT.surface}" stroke-width="0.4"' if width > 2 else ""
    return f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0):.2f}" height="{height:.1f}" fill="{fill}"{edge}>{inside}</rect>'


def _text(x: float, y: float, words: str, anchor: str = "start", bold: bool = False, muted: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    fill = LIGHT.muted if muted else LIGHT.text
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="10.5" text-anchor="{anchor}" fill="{fill}"{weight}>{html.escape(words)}</text>'


def _svg(height: float, body: str, words: str) -> str:
    size = f'viewBox="0 0 {WIDTH:.0f} {height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{html.escape(words)}">{body}</svg>'
