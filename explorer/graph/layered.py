"""A layered drawing of a directed acyclic graph, top to bottom (Sugiyama): ranks, order, positions, routes.

Longest-path ranks, barycentre sweeps for the order, then positions that pull a node to the middle of its neighbours. An edge
over a few ranks bends through gaps; a longer one (a residual) runs in a lane at the side. Pure and deterministic.

Why not a library: networkx places ranks without an order that avoids crossings and routes no edges, Graphviz is a program to install,
and ELK is 1.5 MB of JavaScript for a browser, while the exported SVG and the HTML of `fold --html` need the same positions in Python.
None of them draws a residual in a lane beside its block, which is what one looks for in a transformer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

RANK_GAP = 15.0
NODE_GAP = 22.0
LANE_GAP = 16.0
DUMMY_WIDTH = 10.0
LONG_SPAN = 4
"""Edges over at least this many ranks run in a side lane."""
SWEEPS = 4
"""Passes over the rows, down and up in turn: a node has neighbours on both sides."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """A node to place: its size in pixels, and its place in the model's code, which orders siblings."""

    id: str
    width: float
    height: float
    hint: float = 0.0


@dataclass(frozen=True, slots=True)
class GraphLayout:
    """The centre of every box, a polyline for every edge (in the order given), and the size of the whole; left top is (0, 0)."""

    centres: Mapping[str, Point]
    routes: tuple[tuple[Point, ...], ...]
    width: float
    height: float


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Estimate the width of a text in a sans-serif face, in pixels."""
    # Python knows no font, and the browser must not move what Python placed: boxes take an estimate by kinds of letters.
    narrow = sum(c in "iljtf.,:;|![]()' " for c in text)
    wide = sum(c in "mwMW@×" for c in text)
    return (0.56 * (len(text) - narrow - wide) + 0.32 * narrow + 0.86 * wide) * size * (1.06 if bold else 1.0)


def layout_graph(boxes: Sequence[Box], edges: Sequence[tuple[str, str]]) -> GraphLayout:
    """Place boxes so that every edge points down."""
    if not boxes:
        return GraphLayout({}, (), 0.0, 0.0)
    rank = assign_ranks([b.id for b in boxes], edges)
    chains, rows, links = _insert_dummies(boxes, edges, rank)
    order = _order_rows(rows, links)
    widths = {b.id: b.width for b in boxes}
    x = _place_columns(order, links, widths)
    heights = [max((b.height for b in boxes if rank[b.id] == r), default=0.0) for r in range(len(order))]
    tops = [0.0]
    for h in heights:
        tops.append(tops[-1] + h + RANK_GAP)
    size = {b.id: (b.width, b.height) for b in boxes}
    centres = {b.id: (x[b.id], tops[rank[b.id]] + heights[rank[b.id]] / 2) for b in boxes}
    middles = [tops[r] + heights[r] / 2 for r in range(len(heights))]
    routes = _route_edges(edges, chains, centres, size, x, middles, rank)
    return _move_to_origin(centres, size, routes)


def assign_ranks(ids: Sequence[str], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Return the longest path from a source; a source moves down to just above its first reader. `ids` are in execution order."""
    place = {name: i for i, name in enumerate(ids)}
    readers: dict[str, list[str]] = {name: [] for name in ids}
    makers: dict[str, list[str]] = {name: [] for name in ids}
    for src, dst in edges:
        if place[src] >= place[dst]:
            raise ValueError(f"edge {src} -> {dst} points up: boxes must come in execution order")
        readers[src].append(dst)
        makers[dst].append(src)
    rank: dict[str, int] = {}
    for name in ids:
        rank[name] = max((rank[m] + 1 for m in makers[name]), default=0)
    # A source such as a bias table would stand in the first row, far from its reader: it moves down to it.
    for name in reversed(ids):
        if not makers[name] and readers[name]:
            rank[name] = min(rank[r] for r in readers[name]) - 1
    return rank


def _insert_dummies(
    boxes: Sequence[Box], edges: Sequence[tuple[str, str]], rank: Mapping[str, int]
) -> tuple[dict[int, list[str]], list[list[str]], list[tuple[str, str]]]:
    """Return rows of ids by rank with a dummy where a short edge passes, the dummies of each edge, and links between rows."""
    rows: list[list[str]] = [[] for _ in range(max(rank.values()) + 1)]
    for box in sorted(boxes, key=lambda b: b.hint):
        rows[rank[box.id]].append(box.id)
    chains: dict[int, list[str]] = {}
    links = []
    for i, (src, dst) in enumerate(edges):
        span = rank[dst] - rank[src]
        if span >= LONG_SPAN:
            continue  # it runs in a side lane, where no row has to make room for it
        chain = [f"\0{i}.{r}" for r in range(rank[src] + 1, rank[dst])]
        for r, name in enumerate(chain, rank[src] + 1):
            rows[r].append(name)
        chains[i] = chain
        path = [src, *chain, dst]
        links += list(pairwise(path))
    return chains, rows, links


def _list_neighbours(links: Sequence[tuple[str, str]]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    up: dict[str, list[str]] = {}
    down: dict[str, list[str]] = {}
    for a, b in links:
        down.setdefault(a, []).append(b)
        up.setdefault(b, []).append(a)
    return up, down


def _order_rows(rows: list[list[str]], links: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Order the nodes of each row by barycentre sweeps, down and up."""
    up, down = _list_neighbours(links)
    rows = [list(r) for r in rows]
    for sweep in range(SWEEPS):
        neighbours, sequence = (up, rows[1:]) if sweep % 2 == 0 else (down, rows[-2::-1])
        # Places from 0 to 1, since rows have different numbers of nodes; a node alone stands in the middle.
        place = {n: i / max(1, len(r) - 1) if len(r) > 1 else 0.5 for r in rows for i, n in enumerate(r)}
        for row in sequence:
            if len(row) > 1:
                row.sort(key=lambda n: _mean_or_default([place[m] for m in neighbours.get(n, ())], place[n]))
            place.update({n: i / (len(row) - 1) if len(row) > 1 else 0.5 for i, n in enumerate(row)})
    return rows


def _mean_or_default(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _place_columns(
    rows: list[list[str]], links: Sequence[tuple[str, str]], widths: Mapping[str, float]
) -> dict[str, float]:
    """Return x of every id: rows packed around 0, then pulled to the mean of their neighbours."""
    up, down = _list_neighbours(links)
    x: dict[str, float] = {}
    for row in rows:
        total = sum(widths.get(n, DUMMY_WIDTH) for n in row) + NODE_GAP * (len(row) - 1)
        at = -total / 2
        for n in row:
            w = widths.get(n, DUMMY_WIDTH)
            x[n] = at + w / 2
            at += w + NODE_GAP
    # Down, up and so on: each sweep aligns a row with one of its sides.
    for sweep in range(6):
        neighbours = up if sweep % 2 == 0 else down
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            wish = [_mean_or_default([x[m] for m in neighbours.get(n, ())], x[n]) for n in row]
            for n, at in zip(row, _separate_nodes(wish, [widths.get(n, DUMMY_WIDTH) for n in row]), strict=True):
                x[n] = at
    return x


def _separate_nodes(wish: list[float], widths: list[float]) -> list[float]:
    """Return the nearest positions to `wish`, in order and without overlap: the mean of a push right and a push left."""
    # Pushed to the right alone, a row would drift off its middle; the mean of both pushes stays symmetric and keeps the gaps.
    right, left = wish[:], wish[:]
    for i in range(1, len(wish)):
        right[i] = max(right[i], right[i - 1] + (widths[i - 1] + widths[i]) / 2 + NODE_GAP)
    for i in range(len(wish) - 2, -1, -1):
        left[i] = min(left[i], left[i + 1] - (widths[i] + widths[i + 1]) / 2 - NODE_GAP)
    return [(a + b) / 2 for a, b in zip(right, left, strict=True)]


def _route_edges(
    edges: Sequence[tuple[str, str]],
    chains: Mapping[int, list[str]],
    centres: Mapping[str, Point],
    size: Mapping[str, tuple[float, float]],
    x: Mapping[str, float],
    middles: Sequence[float],
    rank: Mapping[str, int],
) -> list[tuple[Point, ...]]:
    routes: list[tuple[Point, ...]] = [()] * len(edges)
    for i, (src, dst) in enumerate(edges):
        if i in chains:
            (sx, sy), (dx, dy) = centres[src], centres[dst]
            between = [(x[n], middles[r]) for r, n in enumerate(chains[i], rank[src] + 1)]
            routes[i] = ((sx, sy + size[src][1] / 2), *between, (dx, dy - size[dst][1] / 2))
    lanes = _SideLanes(centres, size, rank)
    # The shortest first: a lane lies outside of all that its rows hold by then, so a longer edge runs around a shorter one.
    for i in sorted(set(range(len(edges))) - set(chains), key=lambda i: rank[edges[i][1]] - rank[edges[i][0]]):
        routes[i] = lanes.route(*edges[i])
    return routes


class _SideLanes:
    """Assigns side lanes: shorter edges first, so that longer ones run outside them."""

    def __init__(
        self, centres: Mapping[str, Point], size: Mapping[str, tuple[float, float]], rank: Mapping[str, int]
    ) -> None:
        self.centres, self.size, self.rank = centres, size, rank
        top = max(rank.values()) + 1
        self.extent = {-1: [0.0] * top, 1: [0.0] * top}
        for name, (cx, _) in centres.items():
            half = size[name][0] / 2
            for side, reach in self.extent.items():
                edge = cx + side * half
                r = rank[name]
                reach[r] = max(reach[r], edge) if side == 1 else min(reach[r], edge)
        self.turn = -1

    def route(self, src: str, dst: str) -> tuple[Point, ...]:
        """Route an edge out of the side of `src`, down the lane, into the side of `dst`; through gaps where others are in the way."""
        first, last = self.rank[src], self.rank[dst]
        side = self._choose_side(src, dst)
        reach = self.extent[side]
        inner = reach[first : last + 1]
        lane = (max(inner) if side == 1 else min(inner)) + side * LANE_GAP
        # In the rows of its ends the lane is no obstacle: there the edge turns to its node.
        for r in range(first, last + 1):
            reach[r] = lane if r not in (first, last) else reach[r]
        return (*self._leave_node(src, side, lane), *reversed(self._leave_node(dst, side, lane, above=True)))

    def _choose_side(self, src: str, dst: str) -> int:
        free = {s: self._is_outermost(src, s) + self._is_outermost(dst, s) for s in (-1, 1)}
        if free[-1] != free[1]:
            return max(free, key=lambda s: free[s])
        # both sides are as good: the two residuals of a block then run on different sides
        self.turn = -self.turn
        return self.turn

    def _is_outermost(self, name: str, side: int) -> bool:
        reach = self.centres[name][0] * side
        return all(c[0] * side <= reach for other, c in self.centres.items() if self.rank[other] == self.rank[name])

    def _leave_node(self, name: str, side: int, lane: float, above: bool = False) -> list[Point]:
        (cx, cy), (w, h) = self.centres[name], self.size[name]
        if self._is_outermost(name, side):
            # Nothing of its row is in the way.
            return [(cx + side * w / 2, cy), (lane, cy)]
        gap = -1 if above else 1
        y = cy + gap * (h / 2 + RANK_GAP / 2)
        return [(cx, cy + gap * h / 2), (cx, y), (lane, y)]


def _move_to_origin(
    centres: Mapping[str, Point], size: Mapping[str, tuple[float, float]], routes: Sequence[tuple[Point, ...]]
) -> GraphLayout:
    """Move a drawing so that its left top is (0, 0)."""
    xs = [c[0] - size[n][0] / 2 for n, c in centres.items()] + [p[0] for route in routes for p in route]
    ends = [c[0] + size[n][0] / 2 for n, c in centres.items()] + [p[0] for route in routes for p in route]
    left, right = min(xs), max(ends)
    bottom = max(c[1] + size[n][1] / 2 for n, c in centres.items())

    def moved(p: Point) -> Point:
        return round(p[0] - left, 1), round(p[1], 1)

    return GraphLayout(
        {n: moved(c) for n, c in centres.items()}, tuple(tuple(map(moved, r)) for r in routes), right - left, bottom
    )
