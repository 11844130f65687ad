"""Groups a coarsened model by its modules: a norm is one node, not its mean, its root and its products. Pure.

Groups of one module that has weights become one node. What is computed between modules joins the module whose result it uses, or
the only one that reads it: a rotation joins the projection before it, a product of two branches the one after it. Sums of
branches, attention, the loss and calls of blocks stay. Where that would make a cycle, the block stays as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from planner_core.core import Block, Call, Op
from planner_core.ops import CoarseBlock, CoarseGraph, Group, Kind, operator

STANDALONE_KINDS = (Kind.ATTENTION, Kind.LOSS)


def group_by_module(coarse: CoarseGraph) -> CoarseGraph:
    """Return the same graph with fewer, larger groups; a node has the name of the group that leads it."""
    return replace(
        coarse, top=_join_groups(coarse.top), blocks={name: _join_groups(b) for name, b in coarse.blocks.items()}
    )


def _join_groups(coarse: CoarseBlock) -> CoarseBlock:
    block = coarse.block
    home = _module_heads(coarse)
    reads, readers = _list_neighbours(coarse)
    members = Counter(home.values())
    loose = [
        k for k, g in enumerate(coarse.nodes) if isinstance(g, Group) and members[home[k]] == 1 and _is_loose(block, g)
    ]
    # Makers first: the rotation of q belongs to q_proj and not to attention, which reads it. Only then readers, for what has several
    # makers, as the product of gate and up, which belongs to down_proj.
    for key in loose:  # in order: what works on a result joins it, and so on
        makers = {_find_head(home, m) for m in reads[key]}
        if len(makers) == 1 and _is_group(coarse, *makers):
            home[key] = makers.pop()
    for key in reversed([k for k in loose if home[k] == k]):
        readers_of_it = {_find_head(home, r) for r in readers[key]} - {key}
        if len(readers_of_it) == 1 and _is_group(coarse, *readers_of_it):
            home[key] = readers_of_it.pop()
    return _order_nodes(coarse, {key: _find_head(home, key) for key in home}, reads) or coarse


def _is_group(coarse: CoarseBlock, key: int) -> bool:
    return key >= 0 and isinstance(coarse.nodes[key], Group)


def _module_heads(coarse: CoarseBlock) -> dict[int, int]:
    """Return for each node the first node of its module, if the module has weights of its own; else the node itself."""
    block = coarse.block
    owners = {op.site.scope for g in coarse.groups for op in block.ops_at(g.items) if block.parameters_of(op)} - {""}
    first: dict[str, int] = {}
    home = {}
    for key, node in enumerate(coarse.nodes):
        home[key] = key
        if (
            isinstance(node, Group)
            and (scope := _lead_op(block, node).site.scope) in owners
            and not _stands_alone(block, node)
        ):
            home[key] = first.setdefault(scope, key)
    return home


def _list_neighbours(coarse: CoarseBlock) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """Return (nodes whose results a node reads, nodes that read its results); -1 stands for the block's inputs and outputs."""
    block = coarse.block
    maker_of = {
        o: key for key, node in enumerate(coarse.nodes) for item in _node_items(block, node) for o in item.outputs
    }
    reads: dict[int, set[int]] = {key: set() for key in range(len(coarse.nodes))}
    readers: dict[int, set[int]] = {key: set() for key in range(len(coarse.nodes))}
    for key, node in enumerate(coarse.nodes):
        for i in (i for item in _node_items(block, node) for i in item.inputs):
            maker = maker_of.get(i, -1)
            if maker != key and block.values[i].kind == "activation":
                reads[key].add(maker)
                if maker >= 0:
                    readers[maker].add(key)
    for i in block.outputs:
        if i in maker_of:
            readers[maker_of[i]].add(-1)
    return reads, readers


def _order_nodes(coarse: CoarseBlock, home: Mapping[int, int], reads: Mapping[int, set[int]]) -> CoarseBlock | None:
    """Return the merged nodes, each after all that it reads; None where two read each other."""
    members: dict[int, list[int]] = {}
    for key, end in home.items():
        members.setdefault(end, []).append(key)
    wants = {end: {home[r] for k in keys for r in reads[k] if r >= 0} - {end} for end, keys in members.items()}
    done: list[int] = []
    while len(done) < len(members):
        ready = next((e for e in members if e not in done and wants[e] <= set(done)), None)
        if ready is None:
            return None
        done.append(ready)
    return replace(coarse, nodes=tuple(_merge_groups(coarse, members[end]) for end in done))


def _merge_groups(coarse: CoarseBlock, keys: list[int]) -> Group | int:
    nodes = [coarse.nodes[k] for k in keys]
    groups = [n for n in nodes if isinstance(n, Group)]
    if len(groups) < len(nodes):
        return nodes[0]
    block = coarse.block
    sizes = [sum(_lead_weight_bytes(block, op) for op in block.ops_at(g.items)) for g in groups]
    lead = groups[sizes.index(max(sizes))]
    return Group(lead.name, tuple(sorted(i for g in groups for i in g.items)))


def _lead_weight_bytes(block: Block, op: Op) -> int:
    """Return the bytes of an op's weights; attention and the loss lead in any case."""
    weight_bytes = sum(v.meta.num_bytes for v in block.parameters_of(op))
    # More than any weight has, so that the largest of a group is its attention.
    return weight_bytes + (1 << 60) * (operator(op.fn).kind in STANDALONE_KINDS)


def _is_loose(block: Block, group: Group) -> bool:
    """Tell whether a group has no weights and does not stand for itself."""
    return not _stands_alone(block, group) and not any(block.parameters_of(op) for op in block.ops_at(group.items))


def _stands_alone(block: Block, group: Group) -> bool:
    return any(operator(op.fn).kind in STANDALONE_KINDS for op in block.ops_at(group.items))


def _find_head(home: Mapping[int, int], key: int) -> int:
    while key >= 0 and home[key] != key:
        key = home[key]
    return key


def _node_items(block: Block, node: Group | int) -> tuple[Op | Call, ...]:
    return tuple(block.items[i] for i in (node.items if isinstance(node, Group) else (node,)))


def _lead_op(block: Block, group: Group) -> Op:
    ops = block.ops_at(group.items)
    return next((op for op in ops if op.name == group.name), ops[-1])
