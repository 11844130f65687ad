"""The cluster as nested boxes with a plan's traffic on its links. Pure: values in, numbers and SVG out.

Who sends to whom follows the algorithm that the plan names (planner_core/cost/communication/routes.py). A message that leaves a node first
leaves its GPU, so a link of a level carries all that goes beyond its unit.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from explorer.figures.palette import COMMUNICATION, Theme, device_colour
from explorer.text import units
from planner_core.core import PHASES, Cluster, Plan
from planner_core.cost import Floats
from planner_core.cost.communication import bytes_between_gpus

MAX_GPUS = 16
"""GPUs that are drawn in a node, at most."""
NODE_W, NODE_H, GPU, GAP, PER_ROW, NODE_GAP, ROW_H = 300, 183, 28, 7, 4, 24, 213
ARC_DEPTH = 40.0


# --- drawing ------------------------------------------------------------------------------------------


def cluster_svg(plan: Plan, theme: Theme, beside: Sequence[Plan] = (), per_row: int = PER_ROW) -> str:
    """Draw the plan's cluster: links as wide as their load, and below the GPUs of a node an arc for each pair that talks.

    Widths are shared with the plans in `beside`; two rows of `per_row` nodes are drawn.
    """
    cluster = plan.cluster
    per_node = cluster.near_gpus
    nodes = cluster.num_gpus // per_node
    shown, cols = min(nodes, 2 * per_row), min(nodes, per_row)
    matrix = bytes_between_gpus(plan, cluster, PHASES)
    others = [(bytes_between_gpus(p, c := p.cluster, PHASES), c.near_gpus) for p in beside if p is not plan]
    scale = _Scale.of([(matrix, per_node), *others])
    width, top = cols * (NODE_W + NODE_GAP) + 8, 70 if nodes > 1 else 12
    parts = []
    for k in range(shown):
        x, y = 8 + k % per_row * (NODE_W + NODE_GAP), top + k // per_row * ROW_H
        parts.append(_draw_node(k, x, y, cluster, matrix, scale, theme))
    height = top + (shown - 1) // per_row * ROW_H + NODE_H + 2
    if nodes > 1:
        parts.append(_draw_trunk(cluster, matrix, scale, width, top, cols, theme))
    if nodes > shown:
        height += 26
        parts.append(_draw_text(8, height - 6, f"and {nodes - shown} more {_unit(cluster)}s", theme, 13))
    label = html.escape(f"{cluster.name}: {nodes} {_unit(cluster)}s of {per_node} GPUs")
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _unit(cluster: Cluster) -> str:
    """Name what a box is: a node, or a rack where fast links join several nodes."""
    return "node" if cluster.near_gpus == cluster.node_gpus else "rack"


def _name_links(cluster: Cluster, *, inside: bool) -> str:
    """Name the links inside a box, or those between boxes."""
    return " and ".join(level.name for i, level in enumerate(cluster.levels) if cluster.is_inside(i) == inside)


@dataclass(frozen=True, slots=True)
class _Scale:
    """The largest load of a link, and of a pair of GPUs in a node, in bytes: the widest lines."""

    link: float
    pair: float

    @staticmethod
    def of(matrices: Sequence[tuple[Floats, int]]) -> _Scale:
        """Return the scale of some plans. `matrices`: who sends how much to whom, and how many GPUs stand in a node."""
        link, pair = 1.0, 1.0
        for matrix, per_node in matrices:
            node = np.arange(len(matrix)) // per_node
            # An arc shows both ways between two GPUs, a link what a GPU sends.
            inside = np.where(node[:, None] == node[None, :], matrix + matrix.T, 0.0)
            link = max(link, float(matrix.sum(axis=1).max()), _most_out_of_a_node(matrix, per_node))
            pair = max(pair, float(inside.max()))
        return _Scale(link, pair)


def _most_out_of_a_node(matrix: Floats, per_node: int) -> float:
    nodes = len(matrix) // per_node
    by_node = matrix.reshape(nodes, per_node, nodes, per_node).sum(axis=(1, 3))
    return float((by_node.sum(axis=1) - np.diag(by_node)).max())


def _width(load: float, most: float, widest: float = 14.0) -> float:
    return 1.0 + (widest - 1.0) * load / most


def _draw_line(x1: float, y1: float, x2: float, y2: float, load: float, scale: _Scale, theme: Theme) -> str:
    colour = COMMUNICATION if load else theme.faint
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{_width(load, scale.link):.1f}"/>'
    )


def _draw_node(k: int, x: float, y: float, cluster: Cluster, matrix: Floats, scale: _Scale, theme: Theme) -> str:
    per_node = cluster.near_gpus
    gpus, first = min(per_node, MAX_GPUS), k * per_node
    members = slice(first, first + per_node)
    inside, of_first = (units.traffic(_sent_inside(matrix, n, per_node)) for n in (k, 0))
    bar, row = y + 44, y + 88
    unit, links = _unit(cluster), html.escape(_name_links(cluster, inside=True))
    parts = [
        f'<rect x="{x}" y="{y}" width="{NODE_W}" height="{NODE_H}" rx="8" fill="none" stroke="{theme.faint}"/>',
        _draw_text(x + 12, y + 20, f"{unit} {k}", theme, 13, bold=True),
    ]
    if k == 0 or inside != of_first:  # most plans load all nodes alike
        label = f"{_name_links(cluster, inside=True)}: {inside} per GPU"
        parts.append(_draw_text(x + NODE_W - 12, y + 20, label, theme, 12.5, "end"))
    step = min(GPU + GAP, (NODE_W - 24) / gpus)
    size = min(GPU, step - 2)
    middles = [x + 12 + g * step + size / 2 for g in range(gpus)]
    for g, middle in enumerate(middles):
        rank = first + g
        all_sent, near = float(matrix[rank].sum()), float(matrix[rank, members].sum())
        label = f"GPU {rank} sends {units.traffic(near)} inside its {unit}, {units.traffic(all_sent - near)} to other {unit}s"
        parts.append(_draw_line(middle, bar, middle, row, all_sent, scale, theme))
        parts.append(
            f'<rect x="{middle - size / 2:.1f}" y="{row}" width="{size:.1f}" height="{size:.1f}" rx="4" '
            f'fill="{device_colour(g)}"><title>{label}</title></rect>'
        )
    parts.append(_draw_arcs(first, middles, row + size + 5, matrix, scale))
    parts.append(
        f'<rect x="{x + 12}" y="{bar - 5}" width="{NODE_W - 24}" height="10" rx="5" '
        f'fill="{theme.muted}"><title>{links}</title></rect>'
    )
    return "".join(parts)


def _sent_inside(matrix: Floats, node: int, per_node: int) -> float:
    """Return the bytes that a GPU of a node sends to others in it, in the mean.

    What goes on to other nodes stands at the trunk: the two add up to what the GPUs send.
    """
    members = slice(node * per_node, (node + 1) * per_node)
    return float(matrix[members, members].sum(axis=1).mean())


def _draw_arcs(first: int, middles: Sequence[float], y: float, matrix: Floats, scale: _Scale) -> str:
    """Draw one arc for each pair of GPUs of a node that talk, as wide as what they send each other."""
    parts, far = [], max(1, len(middles) - 1)
    for i in range(len(middles)):
        for j in range(i + 1, len(middles)):
            forth, back = float(matrix[first + i, first + j]), float(matrix[first + j, first + i])
            if forth + back == 0:
                continue
            depth = 6 + 2 * ARC_DEPTH * (j - i) / far
            label = f"GPU {first + i} to {first + j}: {units.traffic(forth)}; back: {units.traffic(back)}"
            parts.append(
                f'<path d="M{middles[i]:.1f} {y:.1f}Q{(middles[i] + middles[j]) / 2:.1f} {y + depth:.1f} {middles[j]:.1f} {y:.1f}" '
                f'fill="none" stroke="{COMMUNICATION}" stroke-width="{_width(forth + back, scale.pair, 4.5):.1f}">'
                f"<title>{label}</title></path>"
            )
    return "".join(parts)


def _draw_trunk(
    cluster: Cluster, matrix: Floats, scale: _Scale, width: float, top: float, cols: int, theme: Theme
) -> str:
    load = _most_out_of_a_node(matrix, cluster.near_gpus)
    parts = [f'<rect x="8" y="26" width="{width - 32}" height="10" rx="5" fill="{theme.muted}"/>']
    for k in range(cols):
        middle = 8 + k * (NODE_W + NODE_GAP) + NODE_W / 2
        parts.append(_draw_line(middle, 36, middle, top, load, scale, theme))
    label = f"{_name_links(cluster, inside=False)}: {units.traffic(load / cluster.near_gpus)} per GPU"
    parts.append(
        f"<g><title>{units.traffic(load)} out of each {_unit(cluster)}</title>{_draw_text(8, 16, label, theme, 12.5)}</g>"
    )
    return "".join(parts)


def _draw_text(
    x: float, y: float, text: str, theme: Theme, size: float, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{theme.text}"{weight}>{html.escape(text)}</text>'
