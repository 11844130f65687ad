"""The map of regions: which kind of plan is best as two quantities vary, as a figure and in words. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from explorer.figures.palette import DEVICES, Theme
from explorer.figures.style import style
from explorer.text import units, words
from planner_core.core import Cluster, Plan, Shard
from planner_core.cost import zero_stage
from planner_core.planning.analysis import SAME, UNKNOWN, Crossover, MapAxis, RegionCell

LABELS = {
    "inter": "GB/s out of a node", "intra": "GB/s out of a GPU inside a node", "batch": "batch, samples a step",
    "nodes": "nodes",
}  # fmt: skip
SHORT = {"inter": "GB/s between nodes", "intra": "GB/s inside a node", "batch": "samples", "nodes": "nodes"}
FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
NODES = (1, 2, 4, 8, 16)
NAMED = {"inter": "GB/s between nodes", "intra": "GB/s inside a node", "batch": "batch", "nodes": "nodes"}
NOTHING = "nothing fits"
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SHARDED = ("", ", states sharded", ", gradients and states sharded", ", weights sharded")
"""The words that a plan's ZeRO stage adds to its name."""


@dataclass(frozen=True, slots=True)
class Sort:
    """A kind of plan: over how many GPUs it splits the use of most matrices, the batch and the tokens; the ZeRO stage of
    most weights, 3 if a quarter of them is gathered at use; whether tensor parallelism reaches beyond a node."""

    tensor: int = 1
    data: int = 1
    tokens: int = 1
    stage: int = 0
    leaves: bool = False

    def __str__(self) -> str:
        parts = (("tensor parallel", self.tensor), ("data parallel", self.data), ("tokens split", self.tokens))
        text = " × ".join(f"{name} {n}" for name, n in parts if n > 1) or "everything whole"
        return text + SHARDED[self.stage] + ", tp between nodes" * self.leaves


def sort_of(plan: Plan) -> Hashable:
    """The kind of a plan. Which of the weights is left out, so that plans alike for a reader are of one kind."""
    ways = {"tensor": 1, "data": 1, "tokens": 1}
    per_node = int(plan.cluster["levels"][0]["size"])
    gathers = leaves = False
    for axis, n in enumerate(plan.mesh.axis_sizes):
        if n == 1:
            continue
        params = [
            (p, len(b.prefixes)) for b in plan.blocks.values() for w, p in b.params.items() if not words.is_vector(w)
        ]
        copies = sum(k for _, k in params)
        gathered = sum(k for p, k in params if axis in p.gathered)
        split = sum(k for p, k in params if isinstance(p.working[axis], Shard) and axis not in p.gathered)
        gathers |= 4 * gathered > copies
        way = "data" if words.batch_share(plan, axis) > 0.5 else "tensor" if 2 * split > copies else "tokens"
        ways[way] *= n
        leaves |= way == "tensor" and n * plan.mesh.stride(axis) > per_node
    return Sort(**ways, stage=3 if gathers else zero_stage(plan), leaves=leaves)


def axis_of(name: str, values: Mapping[str, Any], cluster: Cluster, batch: int) -> MapAxis:
    """The values that a quantity takes in the map, around what stands."""
    if name == "nodes":
        return MapAxis(name, NODES, 1.0)
    if name == "batch":
        base = max(1, batch // 4)
        return MapAxis(name, tuple(float(base * 2**k) for k in range(6)), float(cluster.num_gpus))
    level = cluster.levels[0 if name == "intra" else min(1, len(cluster.levels) - 1)]
    now = level.unit_bytes_per_s / 1e9
    return MapAxis(name, tuple(float(f"{now * f:.4g}") for f in FACTORS), links=True)


def changes(x: MapAxis, a: float, y: MapAxis, b: float) -> dict[str, Any]:
    """The settings of one point of the map."""
    return {n.name: int(v) if n.name in ("batch", "nodes") else float(f"{v:.6g}") for n, v in ((x, a), (y, b))}


def names(cells: Sequence[RegionCell]) -> dict[Hashable, str]:
    """A letter for each kind, the one with the most cells first."""
    count: dict[Hashable, int] = {}
    for c in cells:
        if c.kind not in (None, UNKNOWN):
            count[c.kind] = count.get(c.kind, 0) + 1
    return {k: NAMES[i % 26] for i, k in enumerate(sorted(count, key=lambda k: (-count[k], str(k))))}


def figure(
    x: MapAxis, y: MapAxis, cells: Sequence[RegionCell], here: tuple[float, float] | None, theme: Theme
) -> go.Figure:
    """The map: a tile a point, coloured and lettered by kind; a ring at the settings as they stand."""
    drawn = go.Figure()
    letters = names(cells)
    xs, ys = list(x.values), list(y.values)
    for kind, letter in [*letters.items(), (UNKNOWN, "?"), (None, "–")]:
        mine = [c for c in cells if c.kind == kind]
        if not mine:
            continue
        drawn.add_scatter(
            x=[xs.index(c.x) for c in mine], y=[ys.index(c.y) for c in mine], mode="markers+text", text=[letter] * len(mine),
            name=f"{letter}  {kind or NOTHING}", textfont={"size": 14, "color": theme.text},
            marker={"symbol": "square", "size": 44, "color": _colour(letter, theme), "opacity": 0.42,
                    "line": {"width": 1, "color": theme.surface}},
            customdata=[f"{c.x:.10g},{c.y:.10g}" for c in mine], hovertext=[_hover(x, y, c) for c in mine],
            hovertemplate="%{hovertext}<extra></extra>",
        )  # fmt: skip
    if here and here[0] in xs and here[1] in ys:
        drawn.add_scatter(
            x=[xs.index(here[0])], y=[ys.index(here[1])], mode="markers", name="the settings as they stand", hoverinfo="skip",
            marker={"symbol": "square-open", "size": 46, "color": theme.text, "line": {"width": 2.5}},
        )  # fmt: skip
    for update, axis in ((drawn.update_xaxes, x), (drawn.update_yaxes, y)):
        update(
            title=LABELS[axis.name], tickvals=list(range(len(axis.values))), range=[-0.6, len(axis.values) - 0.4],
            ticktext=[_number(axis, v, 3) for v in axis.values], showgrid=False, zeroline=False,
        )  # fmt: skip
    styled = style(drawn, theme, 150 + 48 * len(ys) + 26 * (len(letters) + 1))
    styled.update_layout(
        legend={"orientation": "v", "itemsizing": "constant"}, margin={"b": 70 + 26 * (len(letters) + 1)}
    )
    return styled


def _colour(letter: str, theme: Theme) -> str:
    return theme.muted if letter not in NAMES else DEVICES[NAMES.index(letter) % len(DEVICES)]


def _hover(x: MapAxis, y: MapAxis, c: RegionCell) -> str:
    at = f"{units.significant(c.x)} {SHORT[x.name]}, {units.significant(c.y)} {SHORT[y.name]}"
    if c.kind in (None, UNKNOWN):
        return f"{at}<br>{c.kind or NOTHING}"
    sure = "" if c.searched else f"<br>not searched: within {units.percent(SAME)} of the best, by its neighbours"
    return f"{at}<br>{c.kind}<br>step {units.seconds(c.step_time_s)}, {units.memory(c.memory_bytes)}{sure}"


def row(x: MapAxis, y: MapAxis, c: RegionCell) -> dict[str, Any]:
    """A point of the map as a row of a table."""
    none = c.kind in (None, UNKNOWN)
    return {
        SHORT[x.name]: c.x, SHORT[y.name]: c.y, "best plan": str(c.kind or NOTHING),
        "step, ms": None if none else float(f"{c.step_time_s * 1e3:.4g}"),
        "memory, GiB": None if none else float(f"{c.memory_bytes / units.GIB:.4g}"),
        "found": "searched" if c.searched else "by its neighbours",
    }  # fmt: skip


MARKS = {True: "■", False: "□", None: "·"}


def so_far(x: MapAxis, y: MapAxis, cells: Sequence[RegionCell]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table of what is known: searched, inferred, still to come; the last row is the lowest, as in the map."""
    known = {(c.x, c.y): c.searched for c in cells}
    head = [f"{NAMED[y.name]} ↓, {NAMED[x.name]} →", *(_number(x, a, 3) for a in x.values)]
    return head, [[_number(y, b, 3), *(MARKS[known.get((a, b))] for a in x.values)] for b in reversed(y.values)]


def counted(cells: Sequence[RegionCell], searches: int) -> str:
    """How the map came about, in a sentence."""
    inferred = sum(not c.searched for c in cells)
    told = f"{units.whole(searches)} searches: {len(cells) - inferred} of the {len(cells)} points"
    rest = searches - (len(cells) - inferred)
    told += f", and {rest} to close in on the borders." if rest > 0 else "."
    if inferred:
        told += (
            f" The other {inferred} lie between two searched points of the same kind along ever faster links: the plan of one, priced "
            f"there, takes at most {units.percent(SAME)} longer than the best with the faster links, which nothing can beat."
        )
    return told


def told(x: MapAxis, y: MapAxis, found: Sequence[Crossover], letters: Mapping[Hashable, str]) -> list[str]:
    """Each crossover in a sentence; rows in which the same happens at the same values together."""
    alike: dict[tuple[Any, ...], list[float]] = {}
    for c in found:
        alike.setdefault((c.low, c.high, c.below, c.above), []).append(c.y)
    sentences = []
    for (low, high, below, above), rows in alike.items():
        same = Crossover(rows[0], low, high, below, above)
        more = f" to {_quantity(y, rows[-1])}" if len(rows) > 1 else ""
        first = _quantity(y, rows[0]) if len(rows) == 1 else _number(y, rows[0])
        one, other = (_kind(k, letters) for k in (below, above))
        if x.step:
            change = f"{one} up to {_quantity(x, low)}, {other} from {_quantity(x, high)} on"
        else:
            change = f"{one} below about {_quantity(x, same.value)}, {other} above"
        sentences.append(f"At {first}{more}: {change}.")
    return sentences


def _number(axis: MapAxis, value: float, figures: int = 2) -> str:
    return units.whole(value) if axis.name in ("batch", "nodes") or value >= 1000 else units.significant(value, figures)


def _quantity(axis: MapAxis, value: float) -> str:
    what = SHORT[axis.name].removesuffix("s") if value == 1 else SHORT[axis.name]
    return f"{_number(axis, value)} {what}"


def _kind(kind: Hashable | None, letters: Mapping[Hashable, str]) -> str:
    return NOTHING if kind is None else f"{letters.get(kind, '')} {kind}".strip()
