"""Compares plans weight by weight: how each one places it, and how long the step waits at the op that uses it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from explorer.text import words
from planner_core.core import Block, BlockLabel, Graph, Plan, glob_name, join_name
from planner_core.cost import block_of, cost_model_of, exposed_parts
from planner_core.ops import coarsen_block

NO_WEIGHT = "ops without a weight"
WeightKey = tuple[str, str, str]
"""(block, weight, prefix of the copy)."""


@dataclass(frozen=True, slots=True)
class WeightRow:
    """A weight and those of its copies that every plan treats alike.

    `waits_s`: seconds per step that the ops of all copies wait for data, by plan. `same`: all plans place it alike.
    """

    weight: str
    copies: int
    placements: Mapping[str, str]
    waits_s: Mapping[str, float]
    same: bool


def compare_weights(plans: Mapping[str, Plan], graphs: Mapping[str, Graph]) -> list[WeightRow]:
    """Return a row for every weight, in the model's order, then one for waits at ops without a weight.

    `graphs`: the graph that each plan was made for. The waits of a plan add up to its exposed communication.
    """
    placements = {name: words.placements_by_weight(plan) for name, plan in plans.items()}
    waits = {name: {} if plan.pipeline else waits_by_weight(plan, graphs[name]) for name, plan in plans.items()}
    keys = {key for table in placements.values() for key in table}
    rows = []
    for (block, weight, cells), prefixes in group_copies(list(placements.values())).items():
        sums = {n: sum(w.get((block, weight, p), 0.0) for p in prefixes) for n, w in waits.items()}
        name = join_name(glob_name(tuple(prefixes)), weight)
        same = len({_without_axis_name(cell, plan) for cell, plan in zip(cells, plans.values(), strict=True)}) == 1
        rows.append(WeightRow(name, len(prefixes), dict(zip(plans, cells, strict=True)), sums, same))
    other_waits = {n: sum(s for key, s in w.items() if key not in keys) for n, w in waits.items()}
    # of a plan with stages no wait is known weight by weight: where a rank waits follows from the simulated step
    other_waits |= {name: plan.cost.exposed_comm_time_s for name, plan in plans.items() if plan.pipeline}
    return [*rows, WeightRow(NO_WEIGHT, 1, {}, other_waits, True)]


def group_copies(tables: Sequence[Mapping[WeightKey, str]]) -> dict[tuple[str, str, tuple[str, ...]], list[str]]:
    """Return (block, weight, its placement in each table) -> prefixes of the copies that are placed so; what a table lacks is whole."""
    copies: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for block, weight, prefix in dict.fromkeys(key for table in tables for key in table):
        cells = tuple(table.get((block, weight, prefix), words.WHOLE) for table in tables)
        copies.setdefault((block, weight, cells), []).append(prefix)
    return copies


def _without_axis_name(cell: str, plan: Plan) -> str:
    """Drop the name of an axis that is all GPUs: two such axes are the same, whatever they are called."""
    (name, *others) = plan.mesh.axis_names
    return cell if others else cell.replace(f"{name} ", "all GPUs ")


def waits_by_weight(plan: Plan, graph: Graph) -> dict[WeightKey, float]:
    """Return the seconds per step that each weight's op waits for data; weight "" where no weight is used."""
    model = cost_model_of(plan)
    weight_of_op = {label: _largest_weight_by_op(block_of(graph, label)) for label in plan.blocks}
    waits: dict[WeightKey, float] = {}

    def add(label: str, weight: str, seconds: float) -> None:
        prefixes = plan.blocks[label].prefixes
        for prefix in prefixes:
            key = BlockLabel.parse(label).block, weight, prefix
            waits[key] = waits.get(key, 0.0) + seconds / len(prefixes)

    for e in exposed_parts(plan.blocks, graph, model):
        add(e.label, e.weight or weight_of_op[e.label].get(e.site, ""), e.seconds)
    return waits


def _largest_weight_by_op(block: Block) -> dict[str, str]:
    """Return the largest weight of each op's group."""
    largest = {}
    for group in coarsen_block(block).groups:
        ops = block.ops_at(group.items)
        parameters = [v for op in ops for v in block.parameters_of(op)]
        if parameters:
            weight = max(parameters, key=lambda v: math.prod(v.meta.shape)).name
            largest.update({op.name: weight for op in ops})
    return largest
