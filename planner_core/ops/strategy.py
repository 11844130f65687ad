"""All ways to run a group of ops along one mesh axis: choices of one row for each op that agree inside the group.

Inside a group no tensor is redistributed. So each op takes a tensor in the placements in which the op before it made the tensor,
both for the tensor and for its gradient. A mesh of several axes takes the product of these short lists (`search/network`).

Example: in GPT-2 the group `mlp.c_fc/addmm` is a product, a view of its result and a multiplication. The product has the rows R,
rows, out and in. For each of them one row of the view and one of the multiplication agree, so the group has four rows too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, replace

from planner_core.core import Block, Graph, Op, Shard
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
    unknown: tuple[Op, ...]


def block_strategies(coarse: CoarseBlock, whole: Set[ValueDim] = frozenset()) -> BlockStrategies:
    """Return the rows of every group of `coarse`, without those that shard a dim in `whole`. Ops without a rule are listed in `unknown`,
    and run Replicate."""
    block = coarse.block
    table = {op.name: rows(op, block.values) for op in block.ops}
    if whole:
        table = {op.name: tuple(r for r in table[op.name] if not whole & _sharded_dims(op, r)) for op in block.ops}
    segments = _propagate_segments(block, table)
    unknown = tuple(op for op in block.ops if not rule_of(op, block.values).is_known)
    groups = []
    for group in coarse.groups:
        ops = block.ops_at(group.items)
        groups.append(GroupStrategy(group, ops, _consistent_choices(block, ops, table)))
    return BlockStrategies(tuple(groups), segments, unknown)


def graph_strategies(coarse: CoarseGraph) -> dict[str, BlockStrategies]:
    """Return the strategies of the top block (named "") and of every repeated block. A weight that calls share is in the top block in the
    fused parts that it has inside the calls, so that all keep the same elements on a rank."""
    blocks = {"": coarse.top, **coarse.blocks}
    strategies = {name: block_strategies(block) for name, block in blocks.items()}
    shared = _shared_weights(coarse.graph)
    torn = [
        (place, dim)
        for weight, places in shared.items()
        for dim in range(len(coarse.graph.top.values[weight].meta.shape))
        if len({strategies[name].segments.get((value, dim)) for name, value in places}) > 1
        for place in places
    ]
    for name in {name for (name, _), _ in torn}:  # one use would cut the dim otherwise than another
        strategies[name] = block_strategies(blocks[name], {(value, dim) for (b, value), dim in torn if b == name})
    segments = dict(strategies[""].segments)
    for weight, places in shared.items():
        for name, value in places:
            segments |= {(weight, d): parts for (v, d), parts in strategies[name].segments.items() if v == value}
    return {**strategies, "": replace(strategies[""], segments=segments)}


def strategies_of_any_samples(strategies: Mapping[str, BlockStrategies]) -> dict[str, BlockStrategies]:
    """Return the strategies of a superset of what an operator can run: a view may join sharded tokens however many samples there are.

    Then a plan for fewer samples is a plan for more of them too. Example: [1, 8] to [8] in 4 parts moves nothing, and no mesh shards the
    tokens of [3, 8] to [24] (`Split.within`). No run has such a plan; its price bounds what all divisors of the samples may have.
    """
    freed: dict[int, Row] = {}  # by identity, since many choices share a row

    def free(row: Row) -> Row:
        return freed.setdefault(id(row), replace(row, within=None)) if row.within else row

    return {
        name: replace(
            block,
            groups=tuple(
                replace(group, rows=tuple(tuple(map(free, choice)) for choice in group.rows)) for group in block.groups
            ),
        )
        for name, block in strategies.items()
    }


def _shared_weights(graph: Graph) -> dict[int, set[tuple[str, int]]]:
    """Return the weights of the top block that calls get: each with the blocks that use it, and its number there."""
    read_at_top = {v for op in graph.top.ops for v in op.inputs}
    places: dict[int, set[tuple[str, int]]] = {}
    for call in graph.calls():
        for inside, outside in zip(graph.blocks[call.block].inputs, call.inputs, strict=True):
            if graph.top.values[outside].kind == "parameter":
                places.setdefault(outside, {("", outside)} if outside in read_at_top else set()).add(
                    (call.block, inside)
                )
    return places


def _sharded_dims(op: Op, row: Row) -> set[ValueDim]:
    """Return the dims of the op's operands and results that the row shards."""
    ends = (*zip(op.inputs, row.inputs, strict=True), *zip(op.outputs, row.outputs, strict=True))
    return {(v, p.dim) for v, (p, _) in ends if isinstance(p, Shard)}


def _consistent_choices(
    block: Block, ops: tuple[Op, ...], table: Mapping[str, tuple[Row, ...]]
) -> tuple[tuple[Row, ...], ...]:
    """Return every choice of one row for each op in which all agree on every tensor that is made inside, in the order of the rows.

    The choices are extended op by op. Each choice comes with the placements of the tensors that it makes.
    """
    # Op by op, and not the product of all rows first: with 4 rows each, 6 ops have 4096 products, of which few agree.
    choices: list[tuple[tuple[Row, ...], dict[int, Pair]]] = [((), {})]
    for op in ops:
        choices = [
            ((*rows, row), placed | dict(zip(op.outputs, row.outputs, strict=True)))
            for rows, placed in choices
            for row in table[op.name]
            if all(
                i not in placed or _placements_match(placed[i], p, block.values[i].grad)
                for i, p in zip(op.inputs, row.inputs, strict=True)
            )
        ]
    return tuple(rows for rows, _ in choices)


def _placements_match(produced: Pair, taken: Pair, grad: bool) -> bool:
    # Without a gradient nobody reads the placement that it would have, so two rows may differ in it.
    return produced == taken if grad else produced[0] == taken[0]


def _propagate_segments(block: Block, table: dict[str, tuple[Row, ...]]) -> SegmentMap:
    """Return the sizes of fused parts (q, k, v in one projection), carried from the ops that cut them back to the weights.

    A row is removed from `table` if it mixes a fused dim with a dim of another size, or shards a fused dim at the boundary of the block
    or of one that it calls, or of a constant.
    """
    ports = {v for item in (block, *block.items) if not isinstance(item, Op) for v in (*item.inputs, *item.outputs)}
    passed = {v for v in ports if block.values[v].kind == "activation"}
    segments: dict[ValueDim, tuple[int, ...]] = {}
    for op in block.ops:
        for row in table[op.name]:
            segments.update(_segments_cut_by(op, row))
    # A fixed point: a row that carries a fused dim to another tensor may force rows of that tensor's other readers, and a removed row may
    # free others. Rows only disappear and dims only gain parts, so the loop ends.
    grown = bool(segments)
    while grown:
        grown = False
        for op in block.ops:
            possible = []
            for row in table[op.name]:
                fresh = _propagate_through_row(block, op, row, segments, passed)
                if fresh is None:
                    continue
                possible.append(row)
                grown = grown or bool(fresh)
                segments.update(fresh)
            grown = grown or len(possible) != len(table[op.name])
            table[op.name] = tuple(possible)
    return segments


def _segments_cut_by(op: Op, row: Row) -> dict[ValueDim, tuple[int, ...]]:
    """Return the fused dims that the op itself cuts apart, or knows."""
    cut = {}
    for i, sizes in row.segments.items():
        placement, parts = row.inputs[i][0], tuple(n for n in sizes if n)  # an empty part needs no place
        assert isinstance(placement, Shard)
        if len(parts) > 1:
            cut[op.inputs[i], placement.dim] = parts
    return cut


def _propagate_through_row(
    block: Block, op: Op, row: Row, segments: SegmentMap, passed: Collection[int]
) -> dict[ValueDim, tuple[int, ...]] | None:
    """Return the fused dims that `row` adds, or None if it cannot keep the parts apart: activations that are `passed` to other blocks are
    not."""
    ends = _sharded_dims(op, row)
    sizes = {segments[end] for end in ends if end in segments}
    if not sizes:
        return {}
    if len(sizes) > 1 or any(v in passed for v, _ in ends):
        return None
    (parts,) = sizes
    if cut := _segments_cut_by(op, row):  # all fused dims must be those that it cuts, in the same parts
        return {} if all(cut.get(end) == segments.get(end) for end in ends) else None
    fresh = {}
    for value, dim in ends:
        # a run cuts constants and buffers in one piece, and a running statistic is written where it lies
        if block.values[value].meta.shape[dim] != sum(parts) or block.values[value].kind == "constant":
            return None
        if (value, dim) not in segments:
            fresh[value, dim] = parts
    return fresh
