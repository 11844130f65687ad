"""Why one plan communicates less than another, read off the two plans: weights laid out otherwise, and moves that only one has."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from planner_core.core import Op, Plan, glob_name, join_name, placements_by_pattern
from planner_core.ops import CoarseBlock, CoarseGraph, Group, block_strategies
from planner_core.planning import Planner
from planner_core.planning.planner import Networks

MOST = 3
"""Sites and weights that are told of each kind."""


def explain_difference(theirs: Plan, ours: Plan) -> str:
    """One line: `weights ...; theirs alone: ...; ours alone: ...`."""
    a, b = _count_collectives(theirs), _count_collectives(ours)
    parts = [_compare_weights(theirs, ours), _list_counts("theirs alone", a - b), _list_counts("ours alone", b - a)]
    return "; ".join(filter(None, parts))


def _count_collectives(plan: Plan) -> Counter[str]:
    """Return how often each collective runs in a step, by kind, phase and site."""
    counts: Counter[str] = Counter()
    for part in plan.blocks.values():
        where = glob_name(part.prefixes)
        for site, edges in part.sites.items():
            for edge in (*edges.inputs, *edges.outputs):
                for phase, steps in (("forward", edge.forward), ("backward", edge.backward)):
                    for step in steps:
                        if step.collective:
                            counts[f"{step.collective} {phase} at {join_name(where, site)}"] += len(part.prefixes)
    return counts


def _compare_weights(theirs: Plan, ours: Plan) -> str:
    a, b = placements_by_pattern(theirs), placements_by_pattern(ours)
    other = [f"{n} {a[n][-1]} -> {b[n][-1]}" for n in a if n in b and a[n] != b[n]]
    return "weights " + _list_some(other) if other else "the same weights"


def _list_counts(title: str, counts: Counter[str]) -> str:
    return f"{title}: " + _list_some([f"{n} {what}" for what, n in counts.most_common()]) if counts else ""


def _list_some(items: list[str]) -> str:
    return ", ".join(items[:MOST]) + (f" and {len(items) - MOST} more" if len(items) > MOST else "")


# --- plans that move a tensor inside what is one group to us ------------------------------------------------


def with_single_op_groups(planner: Planner) -> Planner:
    """Return the same planner with a group for every op: a plan may then gather a product's result before it is taken apart."""
    coarse = planner.coarse
    split = CoarseGraph(
        coarse.graph, _group_each_op(coarse.top), {n: _group_each_op(b) for n, b in coarse.blocks.items()}
    )
    strategies: dict[str, Any] = {
        "": block_strategies(split.top),
        **{n: block_strategies(b) for n, b in split.blocks.items()},
    }
    return replace(planner, networks=Networks(split, strategies, planner.effort.network))


def _group_each_op(block: CoarseBlock) -> CoarseBlock:
    items = block.block.items
    nodes: list[Group | int] = []
    for position, item in enumerate(items):
        nodes.append(Group(item.name, (position,)) if isinstance(item, Op) else position)
    return CoarseBlock(block.block, tuple(nodes))
