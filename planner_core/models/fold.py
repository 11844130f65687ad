"""Fold by names: TAP's Algorithm 1 on module-path components, step by step, so that it can be replayed.

    for depth = max ... 1:
        nodeTree[depth] = longest common prefixes of the node names        -> _content_by_prefix
        opCount         = how many blocks are similar                      -> _group_similar
        if opCount >= minDuplicate: keep them as one shared subgraph, else stop

Nodes are the operations with weights. Prefixes are compared component by component (`layer_1` is not a prefix of `layer_10`).
Blocks are similar only if their nodes have equal relative names, functions and weight shapes. A depth at which nothing repeats
stops the algorithm only if something was kept before. `Graph.blocks` has the blocks that capture verified op by op.
`why_not_folded` says why two similar blocks differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner_core.core import Block, Call, Graph, Op, TensorMeta, is_within, join_name, unfold_graph

Content = tuple[tuple[str, str, tuple[tuple[int, ...], ...]], ...]


@dataclass(frozen=True, slots=True)
class FoldGroup:
    """Blocks of one depth with equal content: `count` copies of `similar` nodes each, under `pattern`."""

    pattern: str
    count: int
    similar: int
    kept: bool
    reason: str
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FoldStep:
    """The groups at one depth; `stopped` marks the depth at which the algorithm stopped."""

    depth: int
    groups: tuple[FoldGroup, ...]
    stopped: bool = False

    @property
    def kept(self) -> tuple[FoldGroup, ...]:
        """The groups kept as shared subgraphs."""
        return tuple(g for g in self.groups if g.kept)


@dataclass(frozen=True, slots=True)
class WeightNode:
    """A weight-bearing operation: module path, function, and the shapes of its weights.

    A `hoisted` operation is in a repeated block by its name, but does not depend on the block's inputs (T5 computes the relative
    position bias of all layers in layer 0). It counts as a node of its own, not as content of the block.
    """

    path: str
    fn: str
    shapes: tuple[tuple[int, ...], ...]
    hoisted: bool = False


def list_weight_nodes(graph: Graph) -> list[WeightNode]:
    """List every operation that takes a parameter, in order, with repeats written out."""
    nodes: list[WeightNode] = []
    inside = tuple(call.prefix + "." for call in graph.calls())
    for item in graph.top.items:
        if isinstance(item, Call):
            inner = list(_weight_ops(graph.blocks[item.block]))
            nodes += [WeightNode(join_name(item.prefix, op.site.scope), op.fn, shapes) for op, shapes in inner]
        else:
            nodes += [
                WeightNode(op.site.scope, op.fn, shapes, op.name.startswith(inside))
                for op, shapes in _weight_ops(graph.top, item)
            ]
    return nodes


def _weight_ops(block: Block, only: Op | None = None) -> Iterator[tuple[Op, tuple[tuple[int, ...], ...]]]:
    for op in block.ops if only is None else (only,):
        values = [block.values[v] for v in op.inputs]
        shapes = tuple(v.meta.shape for v in values if v.kind == "parameter")
        if shapes:
            yield op, shapes


def fold_steps(nodes: list[WeightNode], min_duplicate: int = 2) -> tuple[FoldStep, ...]:
    """Run Algorithm 1 from the deepest level; the last step is the one that stopped it, or depth 1."""
    parts = [(tuple(n.path.split(".")) if n.path else (), n) for n in nodes]
    steps: list[FoldStep] = []
    has_begun = False
    for depth in range(max((len(p) for p, _ in parts), default=0), 0, -1):
        groups = _group_similar(_content_by_prefix(parts, depth), min_duplicate)
        repeats = any(g.kept for g in groups)
        # The deepest level may hold operators of one module alone: it must not end the algorithm before it has begun.
        stopped = has_begun and not repeats
        steps.append(FoldStep(depth, groups, stopped))
        if stopped:
            break
        has_begun = has_begun or repeats
    return tuple(steps)


def shared_subgraphs(steps: tuple[FoldStep, ...]) -> tuple[FoldGroup, ...]:
    """Return the kept groups that lie in no larger kept one, shallowest first."""
    outermost: list[FoldGroup] = []
    covered: set[tuple[str, ...]] = set()
    # From the shallowest level on: a layer covers the attention inside it, which repeats as often.
    for step in reversed(steps):
        for group in step.kept:
            paths = [tuple(p.split(".")) for p in group.prefixes]
            if not any(p[:i] in covered for p in paths for i in range(1, len(p) + 1)):
                outermost.append(group)
        covered.update(tuple(p.split(".")) for g in step.kept for p in g.prefixes)
    return tuple(outermost)


def _content_by_prefix(parts: list[tuple[tuple[str, ...], WeightNode]], depth: int) -> dict[tuple[str, ...], Content]:
    """Return the content of every block at `depth`: its nodes by relative name, in order."""
    contents: dict[tuple[str, ...], list[tuple[str, str, tuple[tuple[int, ...], ...]]]] = {}
    for path, node in parts:
        # T5's relative bias has the path of layer 0 and would make that layer unlike all others.
        if len(path) == depth or (len(path) > depth and not node.hoisted):
            contents.setdefault(path[:depth], []).append((".".join(path[depth:]), node.fn, node.shapes))
    return {prefix: tuple(content) for prefix, content in contents.items()}


def _group_similar(prefixes: dict[tuple[str, ...], Content], min_duplicate: int) -> tuple[FoldGroup, ...]:
    # Siblings of one family alone: `encoder.0` and `decoder.0` may have equal content, and are two stacks.
    alike: dict[tuple[tuple[str, ...], Content], list[tuple[str, ...]]] = {}
    for prefix, content in prefixes.items():
        alike.setdefault((_numbered_family(prefix), content), []).append(prefix)
    rows = []
    for (family, content), members in alike.items():
        repeats = len(members) >= min_duplicate
        names = tuple(".".join(m) for m in members)
        pattern = ".".join(c[0] if len(set(c)) == 1 else "*" for c in zip(*members, strict=True))
        # One sibling of each other content: a reason names what differs from it.
        others = [(".".join(p), c) for (f, c), ps in alike.items() if f == family and c != content for p in ps[:1]]
        reason = _explain_group(len(members), content, others, repeats, min_duplicate)
        rows.append(FoldGroup(pattern, len(members), len(content), repeats, reason, names))
    return tuple(rows)


def _numbered_family(prefix: tuple[str, ...]) -> tuple[str, ...]:
    """Drop trailing digits of each component, so that numbered siblings (layers.0, layers.1) form one family."""
    return tuple("#" + c.rstrip("0123456789") if c[-1:].isdecimal() else c for c in prefix)


def _explain_group(count: int, content: Content, others: list[tuple[str, Content]], repeats: bool, least: int) -> str:
    if repeats:
        return f"{count} blocks with the same {len(content)} weight operation{'s' * (len(content) > 1)}"
    if not others:
        return f"only {count} such block, {least} needed"
    name, other = others[0]
    mine, theirs = {c[0]: c for c in content}, {c[0]: c for c in other}
    for key in mine:
        if key not in theirs:
            return f"has {key or 'a weight'}, which {name} has not"
        if mine[key] != theirs[key]:
            return f"{key or 'its weight'} is {_format_shapes(mine[key])}, in {name} {_format_shapes(theirs[key])}"
    extra = next((key for key in theirs if key not in mine), None)
    return f"lacks {extra}, which {name} has" if extra else f"calls its weights in another order than {name}"


def _format_shapes(row: tuple[str, str, tuple[tuple[int, ...], ...]]) -> str:
    return f"{row[1]} {' '.join('x'.join(map(str, s)) for s in row[2])}"


def why_not_folded(graph: Graph, prefix_a: str, prefix_b: str, limit: int = 8) -> list[str]:
    """Explain why two module calls are not one block; empty if they do the same."""
    flat = unfold_graph(graph).top
    a, b = (_ops_under(flat, p) for p in (prefix_a, prefix_b))
    for prefix, rows in ((prefix_a, a), (prefix_b, b)):
        if not rows:
            return [f"{prefix} does nothing in this graph"]
    reasons = [f"only {prefix_a} does {name} ({a[name][0]})" for name in a if name not in b]
    reasons += [f"only {prefix_b} does {name} ({b[name][0]})" for name in b if name not in a]
    for name in a:
        if name in b and a[name] != b[name]:
            reasons.append(f"{name} differs: {_describe_difference(a[name], b[name])}")
    if not reasons and list(a) != list(b):
        reasons.append("they do the same operations in another order")
    return reasons[:limit] + ([f"and {len(reasons) - limit} more differences"] if len(reasons) > limit else [])


OpSignature = tuple[str, dict[str, object], tuple[TensorMeta, ...], tuple[TensorMeta, ...]]


def _ops_under(block: Block, prefix: str) -> dict[str, OpSignature]:
    rows: dict[str, OpSignature] = {}
    for op in block.ops:
        if is_within(op.name, prefix):
            ins, outs = (tuple(block.values[v].meta for v in side) for side in (op.inputs, op.outputs))
            rows[op.name[len(prefix) :].removeprefix(".")] = (op.fn, dict(op.attrs), ins, outs)
    return rows


def _describe_difference(a: OpSignature, b: OpSignature) -> str:
    if a[0] != b[0]:
        return f"{a[0]} against {b[0]}"
    if a[1] != b[1]:
        keys = [k for k in sorted({*a[1], *b[1]}) if a[1].get(k) != b[1].get(k)]
        return ", ".join(f"{k} {a[1].get(k)} against {b[1].get(k)}" for k in keys)
    for side, x, y in (("operands", a[2], b[2]), ("results", a[3], b[3])):
        if x != y:
            return f"{side} {_format_metas(x)} against {_format_metas(y)}"
    return "nothing"


def _format_metas(metas: tuple[TensorMeta, ...]) -> str:
    return ", ".join(f"{m.dtype} {'x'.join(map(str, m.shape))}" for m in metas)
