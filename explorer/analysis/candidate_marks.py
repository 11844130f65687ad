"""Candidates of a block as points: grouped by cost, placed as a plan does; and plans that tie. No Streamlit here.

A candidate is named by its index: the digits of its choices in base 3, the first weight the highest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorer.text import words
from planner_core.core import BlockLabel, Plan, Shard
from planner_core.cost import Bools, Ints
from planner_core.search.candidates import Candidates

PLACEMENTS = ("R", "S(0)", "S(1)")


@dataclass(frozen=True, slots=True)
class CandidateMarks:
    """Points to draw: candidates of equal cost are one mark, named by the first of them."""

    x_ms: NDArray[np.float32]
    y_gib: NDArray[np.float32]
    first: NDArray[np.int32]
    count: Ints


def can_run(block: Candidates) -> Bools:
    """Mark the candidates that split evenly: the others have no cost."""
    return np.isfinite(block.comm_s) & np.isfinite(block.memory_bytes)


def group_by_cost(block: Candidates) -> CandidateMarks:
    """Group the candidates that can run by their cost as drawn."""
    index = np.flatnonzero(can_run(block))
    points = np.stack([block.model_comm_s[index] * 1e3, block.model_memory_bytes[index] / 2**30]).astype(np.float32)
    # One complex number for each point, so that `unique` compares both costs at once; in float32 they differ as they are drawn.
    as_complex = np.ascontiguousarray(points.T).view(np.complex64).ravel()
    _, first, count = np.unique(as_complex, return_index=True, return_counts=True)
    return CandidateMarks(points[0, first], points[1, first], index[first].astype(np.int32), count)


def find_equal_cost(block: Candidates, index: int) -> Ints:
    """Return the candidates whose cost is drawn at the same point as that of `index`."""
    x, y = block.model_comm_s.astype(np.float32), block.model_memory_bytes.astype(np.float32)
    return np.flatnonzero((x == x[index]) & (y == y[index]))


def placement_choices(block: Candidates, plan: Plan) -> dict[str, int]:
    """Return a plan's placements of the block's weights on its last axis, as choices of a candidate; those of most copies.

    A weight that is gathered at use counts as whole.
    """
    variants = [b for label, b in plan.blocks.items() if BlockLabel.parse(label).block == block.block]
    variant = max(variants, key=lambda b: len(b.prefixes), default=None)
    choices = {}
    for name in block.weights if variant else ():
        assert variant is not None
        param = variant.params.get(name)
        if param is not None:
            last = len(param.working) - 1
            p = param.working[last]
            choices[name] = 1 + min(p.dim, 1) if isinstance(p, Shard) and last not in param.gathered else 0
    return choices


def candidate_of_plan(block: Candidates, plan: Plan) -> int | None:
    """Return the candidate that equals a plan's block: placed alike on an axis of the same size. None where there is none."""
    return candidate_placed_as(block, plan) if plan.mesh.axis_sizes[-1] == block.axis_size else None


def candidate_placed_as(block: Candidates, plan: Plan) -> int | None:
    """Return the candidate that places the weights as a plan does on its last axis, of whatever size.

    None for a plan that gathers weights, or shards their states there: a candidate keeps both whole.
    """
    variants = [b for label, b in plan.blocks.items() if BlockLabel.parse(label).block == block.block]
    placed = [p for b in variants for name, p in b.params.items() if name in block.weights]
    if any(p.gathered or len(plan.mesh.axis_sizes) - 1 in p.once_gathered_axes for p in placed):
        return None
    choices = placement_choices(block, plan)
    if len(choices) < len(block.weights):
        return None
    return int(sum(choices[w] * 3**k for k, w in enumerate(reversed(block.weights))))


# --- ties --------------------------------------------------------------------------------------------


def find_ties(plans: Mapping[str, Plan]) -> list[str]:
    """Return the fastest plan that fits and those that the prediction cannot tell from it, fastest first; empty if it has no tie."""
    fitting = {n: p for n, p in plans.items() if p.fits} or dict(plans)
    if not fitting:
        return []
    order = sorted(fitting, key=lambda n: fitting[n].cost.step_time_s)
    fastest = fitting[order[0]]
    tied = [
        n
        for n, p in fitting.items()
        if p.cost.step_time_s <= fastest.cost.step_time_s * (1 + words.time_doubt(fastest, p))
    ]
    tied.sort(key=order.index)
    return tied if len(tied) > 1 else []


def short_weight_name(weight: str) -> str:
    """Drop the ending `.weight`, which all names share."""
    return re.sub(r"\.weight$", "", weight)
