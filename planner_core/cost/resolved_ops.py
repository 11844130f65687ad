"""What a site of a plan means: which row of the op's rule it runs on each mesh axis, and what one GPU then holds."""

from __future__ import annotations

import numpy as np

from planner_core.core import ITEM_BYTES, Block, Graph, InputError, Op, Placements, SitePlan, local_shape
from planner_core.cost.model import CostModel
from planner_core.ops import Row, rows


def block_of(graph: Graph, label: str) -> Block:
    """The block that a plan's label means; raises InputError for a label the model does not have."""
    name = label.partition("#")[0]
    if not name:
        return graph.top
    if name not in graph.blocks:
        raise InputError(f"the plan has a block {name!r} that the model {graph.name} does not; plan this model again")
    return graph.blocks[name]


def split_parts(block: Block, op: Op, site: SitePlan, model: CostModel) -> int:
    """Into how many parts the work of an op is split."""
    chosen = rows_at(block, op, site)
    return int(np.prod([n for row, n in zip(chosen, model.sizes, strict=True) if row.splits_work], dtype=int))


def rows_at(block: Block, op: Op, site: SitePlan) -> list[Row]:
    """The row that `site` runs on each mesh axis; raises InputError where no row of the op is meant."""
    found = []
    options = rows(op, block.values)
    for axis in range(len(site.outputs[0].src.forward)):
        ins = tuple((e.dst.forward[axis], e.dst.gradient[axis]) for e in site.inputs)
        outs = tuple((e.src.forward[axis], e.src.gradient[axis]) for e in site.outputs)
        row = next((r for r in options if r.inputs == ins and r.outputs == outs), None)
        if row is None:
            shown = ", ".join(f"{c}|{g}" for c, g in ins)
            raise InputError(
                f"{op.name} cannot run with operands ({shown}) on mesh axis {axis}: no rule of {op.fn} gives that"
            )
        found.append(row)
    return found


def local_bytes(block: Block, value: int, placements: Placements, model: CostModel) -> int:
    """Bytes one GPU holds of a value."""
    meta = block.values[value].meta
    return int(np.prod(local_shape(meta.shape, placements, model.sizes), dtype=np.int64)) * ITEM_BYTES[meta.dtype]
