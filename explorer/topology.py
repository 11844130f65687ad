"""The cluster as nested boxes with a plan's traffic on its links. Pure: values in, SVG out.

Traffic is put on links as one flat ring for each group of a mesh axis: a ring that has members inside and outside a
unit (GPU, node, ...) sends its wire bytes once out of that unit. All GPUs are alike, so each unit of a level
carries the same load, that of the busiest.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from explorer import units
from explorer.palette import COMMUNICATION, Theme, device_colour
from planner_core.cluster import Cluster
from planner_core.mesh import DeviceMesh
from planner_core.plan import Plan

MAX_NODES, MAX_GPUS = 8, 16
NODE_W, GPU, GAP, PER_ROW = 300, 28, 7, 4


@dataclass(frozen=True, slots=True)
class Load:
    """What one unit of a level sends out in a step, by mesh axis and phase: bytes, and the time its link takes for them."""

    level: int
    axis: str
    phase: str
    num_bytes: int
    time_s: float


def loads(plan: Plan, cluster: Cluster) -> list[Load]:
    """Every load that is not zero."""
    found: Counter[tuple[int, int, str]] = Counter()
    for t in plan.cost.traffic:
        for level in range(len(cluster.levels)):
            found[level, t.axis, t.phase] += rings(plan.mesh, t.axis, cluster.unit_gpus(level)) * t.wire_bytes
    return [
        Load(level, plan.mesh.axis_names[axis], phase, size, size / cluster.levels[level].bytes_per_s)
        for (level, axis, phase), size in found.items()
        if size
    ]


def rings(mesh: DeviceMesh, axis: int, unit_gpus: int) -> int:
    """Groups of `axis` that have ranks inside and outside one unit of `unit_gpus` neighbours; of the busiest unit."""
    size, stride = mesh.axis_sizes[axis], mesh.stride(axis)
    if size == 1:
        return 0
    inside: Counter[tuple[int, int]] = Counter()
    for rank in range(mesh.num_devices):
        group = rank // (size * stride) * stride + rank % stride
        inside[rank // unit_gpus, group] += 1
    leaving = Counter(unit for (unit, _), n in inside.items() if n < size)
    return max(leaving.values(), default=0)


def drawing(plan: Plan, cluster: Cluster, phases: Sequence[str], theme: Theme) -> str:
    """The cluster as SVG, one link per level as wide as its load."""
    per_node = cluster.levels[0].size
    nodes = cluster.num_gpus // per_node
    shown, gpus = min(nodes, MAX_NODES), min(per_node, MAX_GPUS)
    total = [
        sum(x.num_bytes for x in loads(plan, cluster) if x.level == i and x.phase in phases)
        for i in range(len(cluster.levels))
    ]
    most = max(*total, 1)
    cols = min(shown, PER_ROW)
    width = cols * (NODE_W + 24) + 8
    top = 70 if nodes > 1 else 12
    parts = [
        _node(
            k, gpus, per_node, 8 + k % PER_ROW * (NODE_W + 24), top + k // PER_ROW * 150, cluster, total[0], most, theme
        )
        for k in range(shown)
    ]
    height = top + (shown + PER_ROW - 1) // PER_ROW * 150
    if nodes > 1:
        parts.append(_trunk(cluster, total[1:], most, width, top, cols, theme))
    if nodes > shown:
        parts.append(_text(8, height + 12, f"and {nodes - shown} more nodes, all alike", theme, 13))
        height += 24
    label = html.escape(f"{cluster.name}: {nodes} nodes of {per_node} GPUs")
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _width(load: float, most: float) -> float:
    return 1.0 + 13.0 * load / most


def _node(
    k: int, gpus: int, per_node: int, x: float, y: float, cluster: Cluster, load: int, most: int, theme: Theme
) -> str:
    bar, row = y + 44, y + 88
    parts = [
        f'<rect x="{x}" y="{y}" width="{NODE_W}" height="130" rx="8" fill="none" stroke="{theme.faint}"/>',
        _text(x + 12, y + 20, f"node {k}", theme, 13, bold=True),
        _text(
            x + NODE_W - 12,
            y + 20,
            f"{cluster.levels[0].name}, {units.traffic(load)} per GPU",
            theme,
            12.5,
            anchor="end",
        ),
    ]
    step = min(GPU + GAP, (NODE_W - 24) / gpus)
    for g in range(gpus):
        left = x + 12 + g * step
        rank = k * per_node + g
        size = min(GPU, step - 2)
        parts.append(
            f'<line x1="{left + size / 2}" y1="{bar}" x2="{left + size / 2}" y2="{row}" '
            f'stroke="{COMMUNICATION if load else theme.faint}" stroke-width="{_width(load, most):.1f}"/>'
        )
        parts.append(
            f'<rect x="{left}" y="{row}" width="{size}" height="{size}" rx="4" '
            f'fill="{device_colour(g)}"><title>GPU {rank}</title></rect>'
        )
        parts.append(_text(left + size / 2, row + size + 12, str(rank), theme, 10.5, anchor="middle"))
    parts.append(
        f'<rect x="{x + 12}" y="{bar - 5}" width="{NODE_W - 24}" height="10" rx="5" '
        f'fill="{theme.muted}"><title>{html.escape(cluster.levels[0].name)}</title></rect>'
    )
    return "".join(parts)


def _trunk(cluster: Cluster, outer: Sequence[int], most: int, width: float, top: float, cols: int, theme: Theme) -> str:
    load = outer[0] if outer else 0
    level = cluster.levels[1]
    parts = [f'<rect x="8" y="26" width="{width - 32}" height="10" rx="5" fill="{theme.muted}"/>']
    for k in range(cols):
        middle = 8 + k * (NODE_W + 24) + NODE_W / 2
        parts.append(
            f'<line x1="{middle}" y1="36" x2="{middle}" y2="{top}" '
            f'stroke="{COMMUNICATION if load else theme.faint}" stroke-width="{_width(load, most):.1f}"/>'
        )
    parts.append(_text(8, 16, f"{level.name}, {units.traffic(load)} out of each node", theme, 12.5))
    return "".join(parts)


def _text(x: float, y: float, text: str, theme: Theme, size: float, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{theme.text}"{weight}>{html.escape(text)}</text>'
