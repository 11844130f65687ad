"""Find the dim of each value that holds the samples: given by the inputs, and propagated by the rows of operators.

A size alone does not decide: a model may have as many tokens, features or bins as samples, and may put the tokens first.
"""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import TopologicalSorter

import numpy as np

from planner_core.core import Block, Graph, Op, Shard
from planner_core.ops import DISPATCH, Row, rows
from planner_core.search.network.factors import GroupRows, Network, SampleDims

DimByValue = dict[int, int]
"""The dim of the samples, by value. It lacks values that are made of all samples, or of none."""


def input_sample_dims(graph: Graph) -> dict[str, DimByValue]:
    """Find for each block the dims of the samples in its constants, its inputs, and the results of the blocks that it calls."""
    top = graph.top.name
    dims_of_block = {top: _constant_dims(graph, graph.top)}
    dims_inside: dict[str, DimByValue] = {}
    dims = dict(dims_of_block[top])
    for item in graph.top.items:
        if isinstance(item, Op):
            _propagate_sample_dims(graph.top, dims, (item,), [(row,) for row in rows(item, graph.top.values)])
            continue
        block = graph.blocks[item.block]
        if block.name not in dims_of_block:
            block_inputs = {i: dims[o] for i, o in zip(block.inputs, item.inputs, strict=True) if o in dims}
            dims_of_block[block.name] = _constant_dims(graph, block) | block_inputs
            dims_inside[block.name] = dict(dims_of_block[block.name])
            for op in block.ops:
                _propagate_sample_dims(
                    block, dims_inside[block.name], (op,), [(row,) for row in rows(op, block.values)]
                )
        block_dims = dims_inside[block.name]
        returned = {o: block_dims[i] for i, o in zip(block.outputs, item.outputs, strict=True) if i in block_dims}
        dims.update(returned)
        dims_of_block[top].update(returned)
    return dims_of_block


def find_sample_dims(block: Block, net: Network, input_dims: DimByValue) -> SampleDims:
    """Find the dims of the samples in a block, by the rows of its groups. `input_dims` are those of `input_sample_dims`."""
    dims = dict(input_dims)
    # The calling block may need all samples of what enters and leaves.
    needed_whole = {*block.inputs, *block.outputs}
    for node in _topological_order(net):
        s = node.strategy
        even_rows = [s.rows[i] for i in np.unique(node.index)]  # others would not split evenly
        # The group of a choice of rows is asked as a whole: its operators share a strategy, so one of them decides for all.
        row_choice = _propagate_sample_dims(block, dims, s.ops, even_rows)
        needed_whole.update(
            v for v, pair in _operand_placements(s.ops, row_choice) if v in dims and pair != Shard(dims[v])
        )
    return SampleDims(dims, {v: d for v, d in dims.items() if v not in needed_whole})


def _topological_order(net: Network) -> list[GroupRows]:
    """Sort the groups: each comes after the groups whose results it reads."""
    maker = {v: name for name, node in net.nodes.items() for op in node.strategy.ops for v in op.outputs}
    dependencies = {
        name: {maker[v] for op in node.strategy.ops for v in op.inputs if v in maker} - {name}
        for name, node in net.nodes.items()
    }
    return [net.nodes[name] for name in TopologicalSorter(dependencies).static_order()]


def _constant_dims(graph: Graph, block: Block) -> DimByValue:
    batch, seq = graph.workload["batch"], graph.workload["seq"]
    # No operator makes a constant, so its size decides: labels are [samples], and targets of flat tokens [samples · tokens].
    sizes = ((batch,), (batch * seq,))
    return {i: 0 for i, v in enumerate(block.values) if v.kind == "constant" and v.meta.shape[:1] in sizes}


def _propagate_sample_dims(
    block: Block, dims: DimByValue, ops: Sequence[Op], row_choices: Sequence[Sequence[Row]]
) -> Sequence[Row]:
    """Add the sample dims of a group's results to `dims`. They follow from the row that shards most operands by samples, which is returned.

    Computed operands count before the others.
    """
    operands = [
        (k, i, Shard(dims[v]), block.values[v].kind == "activation")
        for k, op in enumerate(ops)
        for i, v in enumerate(op.inputs)
        if v in dims
    ]
    if not operands:  # no row shards any of them
        return row_choices[0]

    def count_sharded(op_rows: Sequence[Row]) -> tuple[int, int]:
        if any(row.name == DISPATCH for row in op_rows):
            return (0, 0)
        computed = [is_computed for k, i, cut, is_computed in operands if op_rows[k].inputs[i][0] == cut]
        return sum(computed), len(computed)

    best = max(row_choices, key=count_sharded)
    if any(count_sharded(best)):
        for op, row in zip(ops, best, strict=True):
            dims.update((v, p.dim) for v, (p, _) in zip(op.outputs, row.outputs, strict=True) if isinstance(p, Shard))
    return best


def _operand_placements(ops: Sequence[Op], op_rows: Sequence[Row]) -> list[tuple[int, object]]:
    return [
        (v, placement)
        for op, row in zip(ops, op_rows, strict=True)
        for v, (placement, _) in zip(op.inputs, row.inputs, strict=True)
    ]
