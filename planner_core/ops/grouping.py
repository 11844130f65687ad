"""Merge ops that must share a placement (TAP's GraphNode): an op that has a weight with the ops that follow it.

An op joins the group that makes its only activation if a redistribution of that tensor between them could never gain anything. This holds
if the op is linear in the tensor (views, casts, rotary embedding: a Partial passes through; two at once, if both may be), or if the
tensor is never Partial. Products, attention, lookups, norms and losses always start a group. So does a cast to a wider dtype, which
belongs to the ops that follow. So does an op that broadcasts its activation: to redistribute the small tensor before it, or to sum the
small gradient, costs less than after it. An op that cannot be sharded as its operand is (numbers that are drawn, a sum along all samples)
is a group alone: what comes before and behind it may be.
Inside a group no tensor is redistributed.

Example: y = gelu(x @ w). If x @ w may be Partial (k sharded), it must be summed before gelu, which is not linear. So gelu starts a
group of its own. A view or a transpose of x @ w joins the group of the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner_core.core import ITEM_BYTES, Block, Call, Graph, Op, P, R, Shard
from planner_core.ops.operators import Kind
from planner_core.ops.registry import is_heavy, operator, rows


@dataclass(frozen=True, slots=True)
class Group:
    """Ops of one block that share a placement, by their positions in `block.items`. The group has the name of its leading op."""

    name: str
    items: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CoarseBlock:
    """A block's items in order: groups of ops, and calls by their position in `block.items`."""

    block: Block
    nodes: tuple[Group | int, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups, without the calls."""
        return tuple(n for n in self.nodes if isinstance(n, Group))


@dataclass(frozen=True, slots=True)
class CoarseGraph:
    """A graph whose blocks are coarsened."""

    graph: Graph
    top: CoarseBlock
    blocks: Mapping[str, CoarseBlock]

    @property
    def num_nodes(self) -> int:
        """Number of groups of the unfolded model."""
        repeats = self.graph.num_repeats
        return len(self.top.groups) + sum(len(b.groups) * repeats[n] for n, b in self.blocks.items())


def coarsen(graph: Graph) -> CoarseGraph:
    """Group the ops of every block. Calls stay as they are."""
    return CoarseGraph(graph, coarsen_block(graph.top), {n: coarsen_block(b) for n, b in graph.blocks.items()})


def coarsen_block(block: Block) -> CoarseBlock:
    """Group the ops of one block (see the head of the file)."""
    # value -> the group that makes it; absent are values from outside, from a call, or from an op that is alone
    home: dict[int, int] = {}
    members: list[list[int]] = []
    may_be_partial = _partial_values(block)
    # In running order, so that the group of an operand is known when its reader is looked at.
    for position, item in enumerate(block.items):
        if isinstance(item, Call):
            continue
        alone = _must_stand_alone(block, item)
        group = None if alone else _group_to_join(block, item, home, may_be_partial)
        if group is None:
            group = len(members)
            members.append([])
        members[group].append(position)
        if not alone:
            home.update(dict.fromkeys(item.outputs, group))
    _absorb_elementwise(block, members, home, may_be_partial)
    return CoarseBlock(block, _order_groups(block, [m for m in members if m]))


def _partial_values(block: Block) -> set[int]:
    """Return the values that some row makes Partial, or passes on from a value that may be Partial."""
    inside = {o for i in block.items if isinstance(i, Op) for o in i.outputs}
    partial_values = {i for i, v in enumerate(block.values) if v.kind == "activation" and i not in inside}
    for op in block.ops:
        if _is_widening_cast(block, op):
            continue  # a Partial is summed before it is cast to a wider dtype
        for row in rows(op, block.values):
            partial_in = [
                i
                for i, (p, _) in zip(op.inputs, row.inputs, strict=True)
                if p == P and block.values[i].kind == "activation"
            ]
            partial_out = any(p == P for p, _ in row.outputs)
            if partial_out and (row.name != "P" or any(i in partial_values for i in partial_in)):
                partial_values.update(op.outputs)
    return partial_values


def _group_to_join(block: Block, op: Op, home: Mapping[int, int], may_be_partial: set[int]) -> int | None:
    tracked = [i for i in op.inputs if block.values[i].kind == "activation"]
    groups = {home.get(i) for i in tracked}
    if is_heavy(op) or len(groups) != 1 or None in groups:
        return None
    (group,) = groups
    if _is_widening_cast(block, op) or _broadcasts_activation(block, op, tracked):
        return None
    partial = [k for k, i in enumerate(op.inputs) if i in tracked and i in may_be_partial]
    passes = any(r.name == "P" and all(r.inputs[k][0] == P for k in partial) for r in rows(op, block.values))
    return group if passes or not partial else None  # of a product of two sums, one sum has to be made before


def _must_stand_alone(block: Block, op: Op) -> bool:
    """Return whether no dim of an op may be sharded, or not the first dim of its activation, which its result has too."""
    results = [block.values[o].meta.shape for o in op.outputs]
    given = [(k, block.values[i].meta.shape) for k, i in enumerate(op.inputs) if block.values[i].kind == "activation"]
    if is_heavy(op) or not given or not any(n > 1 for shape in results for n in shape):
        return False
    splits = [r for r in rows(op, block.values) if r.splits_work]
    return not splits or any(
        shape[:1] != (1,) and shape in results and all(r.inputs[k][0] != Shard(0) for r in splits) for k, shape in given
    )


def _is_widening_cast(block: Block, op: Op) -> bool:
    if operator(op.fn).kind is not Kind.CAST:
        return False
    before, after = (ITEM_BYTES[block.values[v].meta.dtype] for v in (op.inputs[0], op.outputs[0]))
    return after > before


def _broadcasts_activation(block: Block, op: Op, tracked: list[int]) -> bool:
    """Return whether a result is larger than the activations, and may be sharded along a dim that they lack (one head for all, say)."""
    # Example: one key head spread over 32 query heads. In a group with its maker the 32-fold tensor would be redistributed.
    most = max(block.values[i].meta.num_bytes for i in tracked)
    # A result that is no larger than what it was made of costs no more to move after the op than before it.
    if all(block.values[o].meta.num_bytes <= most for o in op.outputs):
        return False
    operands = [k for k, i in enumerate(op.inputs) if i in tracked]
    return any(r.splits_work and all(r.inputs[k] == (R, P) for k in operands) for r in rows(op, block.values))


def _absorb_elementwise(block: Block, members: list[list[int]], home: dict[int, int], may_be_partial: set[int]) -> None:
    """Merge a group without heavy ops into its only successor, if that has none either (silu into the product with the gate)."""
    users: dict[int, set[int | None]] = {}  # the groups that read a group's results; None is a call
    where = {p: g for g, ps in enumerate(members) for p in ps}
    for position, item in enumerate(block.items):
        for i in item.inputs:
            if i in home:
                users.setdefault(home[i], set()).add(where.get(position))
    for g in range(len(members)):
        targets = users.get(g, set()) - {g}
        h = next(iter(targets)) if len(targets) == 1 else None
        # None, or an op that is alone.
        if h is None or any(o not in home for op in block.ops_at(members[h]) for o in op.outputs):
            continue
        if not _can_absorb(block, members[g], members[h], may_be_partial):
            continue
        members[h] = sorted(members[g] + members[h])
        home.update((o, h) for op in block.ops_at(members[g]) for o in op.outputs)
        members[g] = []
        for u in users.values():
            if g in u:
                u.discard(g)
                u.add(h)


def _can_absorb(block: Block, positions: list[int], into: list[int], may_be_partial: set[int]) -> bool:
    group_ops, other_ops = block.ops_at(positions), block.ops_at(into)
    results = {o for op in group_ops for o in op.outputs}
    if results & (set(block.outputs) | may_be_partial):
        return False
    if any(is_heavy(op) for op in (*group_ops, *other_ops)) or any(block.parameters_of(op) for op in group_ops):
        return False
    # the gradient of a broadcast operand is a sum, which may need communication
    return not any(_broadcasts_operand(block, op, results) for op in other_ops)


def _broadcasts_operand(block: Block, op: Op, operands: set[int]) -> bool:
    shape = block.values[op.outputs[0]].meta.shape
    return any(block.values[v].meta.shape != shape for v in op.inputs if v in operands)


def _order_groups(block: Block, members: list[list[int]]) -> tuple[Group | int, ...]:
    """Return each group at the place of its last op, so that all that it needs comes before it."""
    nodes: list[tuple[int, Group | int]] = [(p, p) for p, i in enumerate(block.items) if isinstance(i, Call)]
    for ps in members:
        ops = block.ops_at(ps)
        lead = next((o for o in ops if is_heavy(o)), None) or next((o for o in ops if block.parameters_of(o)), ops[-1])
        nodes.append((ps[-1], Group(lead.name, tuple(ps))))
    return tuple(n for _, n in sorted(nodes, key=lambda pair: pair[0]))
