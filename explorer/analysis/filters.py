"""Filters plans and candidates of a block: by limits, by marked regions, by ties. No Streamlit here.

A candidate is named by its index: the digits of its choices in base 3, the first weight the highest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from explorer.address.parse import MAX_CORNERS
from explorer.text import words
from planner_core.core import Plan, Shard
from planner_core.planning.methods import BASELINES
from planner_core.search.candidates import Candidates

PLACEMENTS = ("R", "S(0)", "S(1)")
MIXED = len(PLACEMENTS)
"""How a weight is placed where candidates of equal cost place it in several ways."""
REFERENCE_METHOD = "megatron"
"""Method of the plan that others are said to differ from."""
BoolArray = NDArray[np.bool_]


def baseline_ids(plans: Mapping[str, Plan]) -> list[str]:
    """Names of the plans that stand for somebody's usual way."""
    return [n for n, p in plans.items() if p.method in BASELINES]


def format_mesh(plan: Plan) -> str:
    """`2x8`, as the settings write a mesh."""
    return "x".join(map(str, plan.mesh.axis_sizes))


# --- filters -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanFilter:
    """The conditions for a plan to be shown; empty: none. `differs`: weights placed otherwise than by Megatron-LM."""

    fits: bool = False
    meshes: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.fits or self.meshes or self.methods or self.differs)

    def select_plans(self, plans: Mapping[str, Plan]) -> dict[str, Plan]:
        """The plans that pass."""
        other = weights_unlike_reference(plans) if self.differs else {}
        return {
            name: p
            for name, p in plans.items()
            if (p.fits or not self.fits)
            and (not self.meshes or format_mesh(p) in self.meshes)
            and (not self.methods or p.method in self.methods)
            and set(self.differs) <= other.get(name, set())
        }

    def select_candidates(self, found: Candidates, capacity_bytes: float, reference: Plan | None) -> BoolArray:
        """The candidates of a block that pass; mesh and method are the same for all of them."""
        passes = np.isfinite(found.comm_s) & np.isfinite(found.memory_bytes)
        if self.fits:
            passes &= found.model_memory_bytes <= capacity_bytes
        theirs = placement_choices(found, reference) if reference else {}
        for weight in self.differs:
            block, _, name = weight.partition(":")
            if block == found.block and name in theirs:
                passes &= found.choice[:, found.weights.index(name)] != theirs[name]
        return passes


def weights_unlike_reference(plans: Mapping[str, Plan]) -> dict[str, set[str]]:
    """Per plan the weights (`block:name`) that it places otherwise than the Megatron-LM baseline, in any copy."""
    there = next((p for p in plans.values() if p.method == REFERENCE_METHOD), None)
    if there is None:
        return {}
    theirs = words.placements_by_weight(there)
    found = {}
    for name, plan in plans.items():
        mine = words.placements_by_weight(plan)
        found[name] = {
            f"{block}:{weight}"
            for block, weight, prefix in mine.keys() | theirs.keys()
            if mine.get((block, weight, prefix)) != theirs.get((block, weight, prefix))
        }
    return found


# --- candidates --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CandidateMarks:
    """Points to draw: candidates of equal cost are one mark, named by the first of them."""

    x_ms: NDArray[np.float32]
    y_gib: NDArray[np.float32]
    first: NDArray[np.int32]
    count: NDArray[np.int64]
    placed: NDArray[np.int8]
    """How all candidates of a mark place one weight, as in `PLACEMENTS`; SEVERAL where they do not place it alike."""


def group_by_cost(found: Candidates, keep: BoolArray, weight: int = 0) -> CandidateMarks:
    """The marks of the candidates in `keep`: milliseconds of communication, GiB. `weight` is the one that `placed` tells of."""
    index = np.flatnonzero(keep)
    ends = np.stack([found.model_comm_s[index] * 1e3, found.model_memory_bytes[index] / 2**30]).astype(np.float32)
    both = np.ascontiguousarray(ends.T).view(np.complex64).ravel()
    _, first, mark, count = np.unique(both, return_index=True, return_inverse=True, return_counts=True)
    letter = found.choice[index, weight]
    placed = letter[first].astype(np.int8)
    placed[mark[letter != placed[mark]]] = MIXED
    return CandidateMarks(ends[0, first], ends[1, first], index[first].astype(np.int32), count, placed)


def find_equal_cost(found: Candidates, index: int) -> NDArray[np.int64]:
    """Candidates that cost what `index` costs, as drawn."""
    x, y = found.model_comm_s.astype(np.float32), found.model_memory_bytes.astype(np.float32)
    return np.flatnonzero((x == x[index]) & (y == y[index]))


def placements_by_weight(found: Candidates, marked: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """For each weight of the block: the placements that some candidates give it."""
    rows = found.choice[list(marked)]
    return {w: tuple(PLACEMENTS[c] for c in np.unique(rows[:, k])) for k, w in enumerate(found.weights)}


def placement_choices(found: Candidates, plan: Plan) -> dict[str, int]:
    """What a plan does with the block's weights on its last axis, as choices of a candidate; most copies' way. A weight
    that is gathered at use counts as whole."""
    ways = [b for label, b in plan.blocks.items() if label.partition("#")[0] == found.block]
    way = max(ways, key=lambda b: len(b.prefixes), default=None)
    choices = {}
    for name in found.weights if way else ():
        assert way is not None
        param = way.params.get(name)
        if param is not None:
            last = len(param.working) - 1
            p = param.working[last]
            choices[name] = 1 + min(p.dim, 1) if isinstance(p, Shard) and last not in param.gathered else 0
    return choices


def candidate_of_plan(found: Candidates, plan: Plan) -> int | None:
    """The candidate that a plan's block is: placed alike on an axis of the same size. None where there is none."""
    return candidate_placed_as(found, plan) if plan.mesh.axis_sizes[-1] == found.axis_size else None


def candidate_placed_as(found: Candidates, plan: Plan) -> int | None:
    """The candidate that places the block's weights as a plan does on its last axis, of whatever size, or None; a candidate keeps
    every weight where it is used, so a plan that gathers weights is not one of them."""
    mine = [b for label, b in plan.blocks.items() if label.partition("#")[0] == found.block]
    if any(p.gathered for b in mine for name, p in b.params.items() if name in found.weights):
        return None
    chosen = placement_choices(found, plan)
    if len(chosen) < len(found.weights):
        return None
    return int(sum(chosen[w] * 3**k for k, w in enumerate(reversed(found.weights))))


# --- regions marked by hand ---------------------------------------------------------------------------


def selected_region(selection: Mapping[str, Any]) -> tuple[str, ...]:
    """The region of a selection in a chart (its lasso, or its box) as x and y in turn, thinned to what the address keeps."""
    for shape in selection.get("lasso") or ():
        xs, ys = list(shape["x"]), list(shape["y"])
        return _thin_corners(xs, ys) if len(xs) >= 3 else ()
    for shape in selection.get("box") or ():
        (x0, x1), (y0, y1) = shape["x"], shape["y"]
        return _thin_corners([x0, x1, x1, x0], [y0, y0, y1, y1])
    return ()


def _thin_corners(xs: Sequence[float], ys: Sequence[float]) -> tuple[str, ...]:
    step = max(1, -(-len(xs) // MAX_CORNERS))
    return tuple(f"{v:.4g}" for pair in list(zip(xs, ys, strict=True))[::step] for v in pair)


def points_inside(region: Sequence[str], x: NDArray[Any], y: NDArray[Any]) -> BoolArray:
    """Which points lie in a region of corners (even-odd rule)."""
    ends = np.array([float(v) for v in region]).reshape(-1, 2)
    found = np.zeros(len(x), dtype=bool)
    for (x0, y0), (x1, y1) in zip(ends, np.roll(ends, -1, axis=0), strict=True):
        crosses = (y0 > y) != (y1 > y)
        if y1 != y0:
            found ^= crosses & (x < (x1 - x0) * (y - y0) / (y1 - y0) + x0)
    return found


def find_marked(found: Candidates, keep: BoolArray, region: Sequence[str]) -> NDArray[np.int64]:
    """The candidates in `keep` that lie in a region of the chart: milliseconds of communication, GiB."""
    held = points_inside(region, found.model_comm_s * 1e3, found.model_memory_bytes / 2**30) & keep
    return np.flatnonzero(held)


# --- ties --------------------------------------------------------------------------------------------


def find_ties(plans: Mapping[str, Plan]) -> list[str]:
    """The fastest plan that fits and those that the prediction's doubt does not tell from it, fastest first; empty where it stands
    alone."""
    fitting = {n: p for n, p in plans.items() if p.fits} or dict(plans)
    if not fitting:
        return []
    order = sorted(fitting, key=lambda n: fitting[n].cost.step_time_s)
    first = fitting[order[0]]
    near = [
        n for n, p in fitting.items() if p.cost.step_time_s <= first.cost.step_time_s * (1 + words.time_doubt(first, p))
    ]
    near.sort(key=order.index)
    return near if len(near) > 1 else []


def short_weight_name(weight: str) -> str:
    """A weight's name without what all of them share."""
    return re.sub(r"\.weight$", "", weight)
