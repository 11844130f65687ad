"""Which dim of each value holds the samples: as inputs bring them, and as the rows of operators pass them on.

A size alone does not tell: a model may have as many tokens, features or bins as samples, and may put the samples behind the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

import numpy as np

from planner_core.core import Block, Graph, Op, Shard
from planner_core.ops import DISPATCH, Row, rows
from planner_core.search.network.factors import GroupRows, Network

DimByValue = dict[int, int]
"""The dim of the samples, by value. Values that are made of all samples, or of none, are not in it."""


@dataclass(frozen=True, slots=True)
class SampleDims:
    """By value of a block the dim by which it is `produced` sharded where samples are, and by which it is `delivered`: a value that an
    operator reads whole (a statistic of all samples) is made in parts, but not delivered so."""

    produced: Mapping[int, int]
    delivered: Mapping[int, int]


def input_sample_dims(graph: Graph) -> dict[str, DimByValue]:
    """For each block the dims of the samples in what it is given: constants, inputs, and what it gets back from the blocks it calls."""
    top = graph.top.name
    found = {top: _constant_dims(graph, graph.top)}
    inside: dict[str, DimByValue] = {}
    dims = dict(found[top])
    for item in graph.top.items:
        if isinstance(item, Op):
            _propagate(graph.top, dims, (item,), [(row,) for row in rows(item, graph.top.values)])
            continue
        block = graph.blocks[item.block]
        if block.name not in found:
            given = {i: dims[o] for i, o in zip(block.inputs, item.inputs, strict=True) if o in dims}
            found[block.name] = _constant_dims(graph, block) | given
            inside[block.name] = dict(found[block.name])
            for op in block.ops:
                _propagate(block, inside[block.name], (op,), [(row,) for row in rows(op, block.values)])
        made = inside[block.name]
        back = {o: made[i] for i, o in zip(block.outputs, item.outputs, strict=True) if i in made}
        dims.update(back)
        found[top].update(back)
    return found


def find_sample_dims(where: Block, net: Network, given: DimByValue) -> SampleDims:
    """The dims of the samples in a block, by the rows of its groups. `given`: those of what it is given."""
    dims, whole = dict(given), {*where.inputs, *where.outputs}  # the block around may need all samples of these
    for node in _topological_order(net):
        s = node.strategy
        even = [s.rows[i] for i in np.unique(node.index)]  # others would not split evenly
        chosen = _propagate(where, dims, s.ops, even)
        whole.update(v for v, pair in _operand_placements(s.ops, chosen) if v in dims and pair != Shard(dims[v]))
    return SampleDims(dims, {v: d for v, d in dims.items() if v not in whole})


def _topological_order(net: Network) -> list[GroupRows]:
    """The groups, each after those that make what it reads."""
    home = {v: name for name, node in net.nodes.items() for op in node.strategy.ops for v in op.outputs}
    reads = {
        name: {home[v] for op in node.strategy.ops for v in op.inputs if v in home} - {name}
        for name, node in net.nodes.items()
    }
    return [net.nodes[name] for name in TopologicalSorter(reads).static_order()]


def _constant_dims(graph: Graph, block: Block) -> DimByValue:
    batch, seq = graph.workload["batch"], graph.workload["seq"]
    sizes = ((batch,), (batch * seq,))
    return {i: 0 for i, v in enumerate(block.values) if v.kind == "constant" and v.meta.shape[:1] in sizes}


def _propagate(where: Block, dims: DimByValue, ops: Sequence[Op], options: Sequence[Sequence[Row]]) -> Sequence[Row]:
    """Add the dims of what a group makes, by the row that takes most operands by their samples, computed ones first; that row."""
    held = [
        (k, i, Shard(dims[v]), where.values[v].kind == "activation")
        for k, op in enumerate(ops)
        for i, v in enumerate(op.inputs)
        if v in dims
    ]

    def fits(chosen: Sequence[Row]) -> tuple[int, int]:
        if any(row.name == DISPATCH for row in chosen):
            return (0, 0)
        computed = [is_computed for k, i, cut, is_computed in held if chosen[k].inputs[i][0] == cut]
        return sum(computed), len(computed)

    best = max(options, key=fits)
    if any(fits(best)):
        for op, row in zip(ops, best, strict=True):
            dims.update((v, p.dim) for v, (p, _) in zip(op.outputs, row.outputs, strict=True) if isinstance(p, Shard))
    return best


def _operand_placements(ops: Sequence[Op], chosen: Sequence[Row]) -> list[tuple[int, object]]:
    return [
        (v, placement)
        for op, row in zip(ops, chosen, strict=True)
        for v, (placement, _) in zip(op.inputs, row.inputs, strict=True)
    ]
