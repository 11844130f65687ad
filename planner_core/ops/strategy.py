"""All ways to run a group of ops along one mesh axis: choices of one row for each op that agree inside the group.

Inside a group no tensor is redistributed. So each op takes a tensor in the placements in which the op before it made the tensor,
both for the tensor and for its gradient. A mesh of several axes takes the product of these short lists (`search/network`).

Example: in GPT-2 the group `mlp.c_fc/addmm` is a product, a view of its result and a multiplication. The product has the rows R,
rows, out and in. For each of them one row of the view and one of the multiplication agree, so the group has four rows too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner_core.core import Block, Op, Shard
from planner_core.ops.grouping import CoarseBlock, CoarseGraph, Group
from planner_core.ops.registry import rows, rule_of
from planner_core.ops.rules import Pair, Row

ValueDim = tuple[int, int]
SegmentMap = Mapping[ValueDim, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class GroupStrategy:
    """The rows of one group. `rows[r][k]` is the row of its k-th op in group row r; `ops` are its ops."""

    group: Group
    ops: tuple[Op, ...]
    rows: tuple[tuple[Row, ...], ...]


@dataclass(frozen=True, slots=True)
class BlockStrategies:
    """Strategies of every group of a block, and the sizes of the fused parts of its tensors' dims."""

    groups: tuple[GroupStrategy, ...]
    segments: SegmentMap
    unknown: tuple[str, ...]


def block_strategies(coarse: CoarseBlock) -> BlockStrategies:
    """The rows of every group of `coarse`. Ops without a rule are listed in `unknown`, and run Replicate."""
    block = coarse.block
    table = {op.name: rows(op, block.values) for op in block.ops}
    segments = _segments(block, table)
    unknown = tuple(op.name for op in block.ops if not rule_of(op, block.values).known)
    groups = []
    for group in coarse.groups:
        ops = tuple(op for i in group.items if isinstance(op := block.items[i], Op))
        groups.append(GroupStrategy(group, ops, _agreeing(block, ops, table)))
    return BlockStrategies(tuple(groups), segments, unknown)


def graph_strategies(coarse: CoarseGraph) -> dict[str, BlockStrategies]:
    """The strategies of the top block (named "") and of every repeated block. A weight that calls share is in the top block in the
    fused parts that it has inside the calls, so that all keep the same elements on a rank."""
    blocks = {name: block_strategies(block) for name, block in coarse.blocks.items()}
    top = block_strategies(coarse.top)
    segments = dict(top.segments)
    for call in coarse.graph.calls():
        inputs, inside = coarse.graph.blocks[call.block].inputs, blocks[call.block].segments
        for (value, dim), sizes in inside.items():
            for position in (p for p, v in enumerate(inputs) if v == value):
                if coarse.graph.top.values[call.inputs[position]].kind == "parameter":
                    segments.setdefault((call.inputs[position], dim), sizes)
    return {"": replace(top, segments=segments), **blocks}


def _agreeing(block: Block, ops: tuple[Op, ...], table: Mapping[str, tuple[Row, ...]]) -> tuple[tuple[Row, ...], ...]:
    """Every choice of one row for each op in which all agree on every tensor that is made inside, in the order of the rows.

    The choices are extended op by op. Each choice comes with the placements of the tensors that it makes.
    """
    choices: list[tuple[tuple[Row, ...], dict[int, Pair]]] = [((), {})]
    for op in ops:
        choices = [
            ((*rows, row), made | dict(zip(op.outputs, row.outputs, strict=True)))
            for rows, made in choices
            for row in table[op.name]
            if all(
                i not in made or _agree(made[i], p, block.values[i].grad)
                for i, p in zip(op.inputs, row.inputs, strict=True)
            )
        ]
    return tuple(rows for rows, _ in choices)


def _agree(made: Pair, taken: Pair, grad: bool) -> bool:
    return made == taken if grad else made[0] == taken[0]


def _segments(block: Block, table: dict[str, tuple[Row, ...]]) -> SegmentMap:
    """The sizes of fused parts (q, k, v in one projection), carried from the ops that cut them back to the weights.

    A row is removed from `table` if it mixes a fused dim with a dim of another size, or shards a fused dim at the block's boundary
    or of a constant.
    """
    segments: dict[ValueDim, tuple[int, ...]] = {}
    for op in block.ops:
        for row in table[op.name]:
            for i, sizes in row.segments.items():
                placement, parts = row.inputs[i][0], tuple(n for n in sizes if n)  # an empty part needs no place
                assert isinstance(placement, Shard)
                if len(parts) > 1:
                    segments[op.inputs[i], placement.dim] = parts
    grown = bool(segments)
    while grown:
        grown = False
        for op in block.ops:
            kept = []
            for row in table[op.name]:
                fresh = _spread(block, op, row, segments)
                if fresh is None:
                    continue
                kept.append(row)
                grown = grown or bool(fresh)
                segments.update(fresh)
            grown = grown or len(kept) != len(table[op.name])
            table[op.name] = tuple(kept)
    return segments


def _spread(block: Block, op: Op, row: Row, segments: SegmentMap) -> dict[ValueDim, tuple[int, ...]] | None:
    """The fused dims that `row` adds, or None if it cannot keep the parts apart."""
    ends = [
        (v, p.dim)
        for v, (p, _) in (*zip(op.inputs, row.inputs, strict=True), *zip(op.outputs, row.outputs, strict=True))
        if isinstance(p, Shard)
    ]
    sizes = {segments[end] for end in ends if end in segments}
    if not sizes:
        return {}
    if len(sizes) > 1 or any(
        v in block.inputs or v in block.outputs for v, _ in ends if block.values[v].kind == "activation"
    ):
        return None
    if row.segments:  # this op cuts the parts apart, or knows them
        return {}
    (parts,) = sizes
    fresh = {}
    for value, dim in ends:
        # a run cuts constants and buffers in one piece, and a running statistic is written where it lies
        if block.values[value].meta.shape[dim] != sum(parts) or block.values[value].kind == "constant":
            return None
        if (value, dim) not in segments:
            fresh[value, dim] = parts
    return fresh
