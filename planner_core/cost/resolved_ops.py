"""What an operator of a plan runs: the row of its rule on each mesh axis, and the bytes that one GPU then holds."""

from __future__ import annotations

import math

from planner_core.core import ITEM_BYTES, Block, BlockLabel, Graph, InputError, Op, Placements, SitePlan, local_shape
from planner_core.cost.model import CostModel
from planner_core.ops import Row, rows

RECEIVE = "receive"
"""The function of the operator that makes what comes from the stage before, in a graph that is one stage of a model."""


def block_of(graph: Graph, label: str) -> Block:
    """Return the block of a label of a plan. Raises InputError if the model does not have it."""
    name = BlockLabel.parse(label).block
    if not name:
        return graph.top
    if name not in graph.blocks:
        raise InputError(f"the plan has a block {name!r} that the model {graph.name} does not; plan this model again")
    return graph.blocks[name]


def split_parts(block: Block, op: Op, site: SitePlan, model: CostModel) -> int:
    """Return the number of parts into which the work of an operator is split."""
    axis_rows = rows_at(block, op, site)
    return math.prod(n for row, n in zip(axis_rows, model.sizes, strict=True) if row.splits_work)


def rows_at(block: Block, op: Op, site: SitePlan) -> list[Row]:
    """Return the row that an operator runs on each mesh axis under `site`. Raises InputError if no row of its rule fits."""
    axis_rows = []
    options = rows(op, block.values)
    for axis in range(len(site.outputs[0].src.forward)):
        ins = tuple((e.dst.forward[axis], e.dst.gradient[axis]) for e in site.inputs)
        outs = tuple((e.src.forward[axis], e.src.gradient[axis]) for e in site.outputs)
        row = next((r for r in options if r.inputs == ins and r.outputs == outs), None)
        if row is None:
            shown = ", ".join(f"{c}|{g}" for c, g in ins)
            raise InputError(
                f"{op.name} cannot run with operands ({shown}) on mesh axis {axis}: no rule of {op.fn} allows that; plan this model again"
            )
        axis_rows.append(row)
    return axis_rows


def local_bytes(block: Block, value: int, placements: Placements, model: CostModel) -> int:
    """Return the bytes of a value on one GPU."""
    meta = block.values[value].meta
    return math.prod(local_shape(meta.shape, placements, model.sizes)) * ITEM_BYTES[meta.dtype]
