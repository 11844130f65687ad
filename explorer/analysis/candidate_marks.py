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


def candidate_of_plan(block: Candidates, plan: Plan) -> int | None:
    """Return the candidate that equals a plan's block in most copies: placed alike on a last axis of the same size.

    None for a plan that gathers weights, or shards their states there: a candidate keeps both whole.
    """
    if plan.mesh.axis_sizes[-1] != block.axis_size:
        return None
    variants = [b for label, b in plan.blocks.items() if BlockLabel.parse(label).block == block.block]
    placed = [p for b in variants for name, p in b.params.items() if name in block.weights]
    if any(p.gathered or len(plan.mesh.axis_sizes) - 1 in p.once_gathered_axes for p in placed):
        return None
    params = max(variants, key=lambda b: len(b.prefixes)).params if variants else {}
    if not params.keys() >= set(block.weights):
        return None
    index = 0
    for weight in block.weights:
        used = params[weight].working[-1]
        index = 3 * index + (1 + min(used.dim, 1) if isinstance(used, Shard) else 0)
    return index


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
