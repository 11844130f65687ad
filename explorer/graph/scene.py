"""A coarsened model as a drawing: scopes (the top, and each repeated block once) of nodes and edges with positions.

    CoarseGraph --scopes--> boxes and edges --layered--> Scene --to_json--> the component and the stand-alone page

A run of equal calls is one node "name ×N" that opens to its block's scope. Node ids are the group's name at the top and
`block:group` inside a block, so an address names a node for as long as the model's code does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from explorer.graph.layered import Box, layout_graph, text_width
from explorer.text import units
from planner_core.core import Block, Call, Op, TensorMeta, glob_name, module_path
from planner_core.cost.compute import op_work
from planner_core.ops import CoarseBlock, CoarseGraph, Group, Kind, is_heavy, operator, rows
from planner_core.search.network import Run, find_runs

NodeKind: TypeAlias = Literal["weight", "attention", "norm", "join", "loss", "op", "port", "block"]
NODE_HEIGHT = 34.0
PORT_HEIGHT = 16.0
MAX_NAME_LENGTH = 24
"""Letters of a name in a brief drawing; a longer one is cut at its front."""
IN, OUT = "in", "out"


@dataclass(frozen=True, slots=True)
class Node:
    """One box. Numbers are of one copy, whole tensors.

    `weights` are (name in the block, meta); `call` is the index of the run in `Scene.runs` for kind "block".
    """

    id: str
    name: str
    sub: str
    kind: NodeKind
    module: str = ""
    ops: tuple[Op, ...] = ()
    weights: tuple[tuple[str, TensorMeta], ...] = ()
    inputs: tuple[TensorMeta, ...] = ()
    outputs: tuple[TensorMeta, ...] = ()
    flops: int = 0
    call: int = -1
    copies: int = 1

    @property
    def num_params(self) -> int:
        """Elements of the node's weights."""
        return sum(math.prod(m.shape) for _, m in self.weights)


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node with the centre and size of its box."""

    node: Node
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Wire:
    """An edge between two nodes of a scope, as a polyline."""

    src: str
    dst: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class ScopeDrawing:
    """One drawing: the top, or the inside of a block."""

    name: str
    nodes: tuple[PlacedNode, ...]
    wires: tuple[Wire, ...]
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Scene:
    """All drawings of a model. `scopes[""]` is the top; `runs` are its repeated blocks in order."""

    title: str
    scopes: Mapping[str, ScopeDrawing]
    runs: tuple[Run, ...]
    titles: Mapping[str, str] = field(default_factory=dict)

    def node(self, node_id: str) -> Node | None:
        """Return the node of this id, in whatever scope."""
        matches = (
            p.node for s in self.scopes.values() for p in s.nodes if p.node.id == node_id and p.node.kind != "port"
        )
        return next(matches, None)


def build_scene(coarse: CoarseGraph, *, brief: bool = False) -> Scene:
    """Draw a model: every unique block is laid out once. `brief`: nodes show names alone, and sums are small."""
    runs, _ = find_runs(coarse.graph.top)
    titles = {name: block_title(name, coarse.graph.calls()) for name in coarse.blocks}
    scopes = {name: _draw_scope(name, block, [], titles, brief) for name, block in coarse.blocks.items()}
    scopes[""] = _draw_scope("", coarse.top, runs, titles, brief)
    return Scene(coarse.graph.name, scopes, tuple(runs), titles)


def block_title(name: str, calls: Any) -> str:
    """Name a block by the path of its copies: `model.layers.*`; by its class where it is called once."""
    prefixes = [c.prefix for c in calls if c.block == name]
    rows_ = [p.split(".") for p in prefixes]
    if not rows_ or len({len(r) for r in rows_}) != 1:
        return name
    return ".".join(c[0] if len(set(c)) == 1 else "*" for c in zip(*rows_, strict=True))


def _draw_scope(
    name: str, coarse: CoarseBlock, runs: list[Run], titles: Mapping[str, str], brief: bool
) -> ScopeDrawing:
    block = coarse.block
    nodes, maker_of = _build_nodes(name, coarse, runs, titles)
    edges = _build_edges(block, runs, nodes, maker_of, name)
    nodes = [_shorten_node(n) for n in nodes] if brief else nodes
    boxes = [
        Box(n.id, *(_brief_size(n) if brief else (_full_width(n), _full_height(n))), _first_op_index(n, block))
        for n in nodes
    ]
    drawn = layout_graph(boxes, edges)
    placed = tuple(PlacedNode(n, *drawn.centres[n.id], b.width, b.height) for n, b in zip(nodes, boxes, strict=True))
    wires = tuple(Wire(s, d, route) for (s, d), route in zip(edges, drawn.routes, strict=True))
    return ScopeDrawing(name, placed, wires, drawn.width, drawn.height)


def _first_op_index(node: Node, block: Block) -> float:
    """Return the place of the node's first op in the model's code: siblings are drawn in this order."""
    return float(block.items.index(node.ops[0])) if node.ops else 0.0


def _shorten_node(node: Node) -> Node:
    """Reduce a node to its name; a sum of branches to its sign."""
    name = "+" if node.kind == "join" and node.name == "add" else node.name
    # The end of a path stays, which says what a node is; the front is the same for all.
    return replace(node, sub="", name=name if len(name) <= MAX_NAME_LENGTH else f"…{name[1 - MAX_NAME_LENGTH :]}")


def _brief_size(node: Node) -> tuple[float, float]:
    """Return the width and height of a node that shows its name, and below it how its weight is split."""
    if node.kind == "port" or node.name == "+":
        return (26.0, 8.0) if node.kind == "port" else (26.0, 20.0)
    if node.kind == "block":
        return max(190.0, round(text_width(node.name, 12.5, bold=True) + 30)), 64.0
    return max(92.0, round(text_width(node.name, 12.5, bold=True) + 18)), 40.0 if node.kind == "weight" else 28.0


def _full_height(node: Node) -> float:
    return PORT_HEIGHT if node.kind == "port" else NODE_HEIGHT


def _full_width(node: Node) -> float:
    if node.kind == "port":
        return 64.0
    return max(96.0, round(max(text_width(node.name, 12.5, bold=True), text_width(node.sub, 10.5)) + 26))


def _build_nodes(
    scope: str, coarse: CoarseBlock, runs: list[Run], titles: Mapping[str, str]
) -> tuple[list[Node], dict[int, str]]:
    """Return the nodes in execution order, and which node makes each value."""
    block = coarse.block
    nodes: list[Node] = []
    maker_of: dict[int, str] = {}
    if scope and any(block.values[i].kind == "activation" for i in block.inputs):
        nodes.append(Node(f"{scope}:{IN}", IN, "", "port"))
        maker_of.update(dict.fromkeys(block.inputs, nodes[-1].id))
    run_of = {id(call): k for k, run in enumerate(runs) for call in run.calls}
    for item in coarse.nodes:
        if isinstance(item, Group):
            node = _group_node(scope, block, item)
            nodes.append(node)
            maker_of.update({o: node.id for op in node.ops for o in op.outputs})
            continue
        call = block.items[item]
        assert isinstance(call, Call)
        k = run_of[id(call)]
        run = runs[k]
        maker_of.update(dict.fromkeys(call.outputs, f"run:{k}"))
        if call is run.calls[-1]:  # the run stands where its last copy ends
            nodes.append(_run_node(k, run, block, titles))
    if scope:
        nodes.append(Node(f"{scope}:{OUT}", OUT, "", "port"))
    return _distinguish_names(nodes), maker_of


def _distinguish_names(nodes: list[Node]) -> list[Node]:
    """Give weights that share a name the name of their parent module too: `mlp.c_proj`."""
    counts = Counter(n.name for n in nodes if n.weights)
    return [replace(n, name=_qualified_name(n)) if n.weights and counts[n.name] > 1 else n for n in nodes]


def _qualified_name(node: Node) -> str:
    path = node.ops[0].site.scope.split(".")
    return ".".join(path[-2:]) if path[-1] == node.name else node.name


def _run_node(k: int, run: Run, block: Block, titles: Mapping[str, str]) -> Node:
    first, last = run.calls[0], run.calls[-1]

    def metas(ids: tuple[int, ...]) -> tuple[TensorMeta, ...]:
        return tuple(block.values[i].meta for i in ids if block.values[i].kind == "activation")

    return Node(
        f"run:{k}",
        run_title(run),
        titles[run.block],
        "block",
        module=first.prefix,
        inputs=metas(first.inputs),
        outputs=metas(last.outputs),
        call=k,
        copies=len(run.calls),
    )


def run_title(run: Run) -> str:
    """Name a run by the path of its copies: `model.layers.*`; a single copy by its prefix."""
    return glob_name(tuple(call.prefix for call in run.calls))


def _group_node(scope: str, block: Block, group: Group) -> Node:
    ops = block.ops_at(group.items)
    lead = next((op for op in ops if op.name == group.name), ops[-1])
    inside = {o for op in ops for o in op.outputs}
    weights = {
        i: (block.values[i].name, block.values[i].meta)
        for op in ops
        for i in op.inputs
        if block.values[i].kind == "parameter"
    }
    inputs = dict.fromkeys(
        i for op in ops for i in op.inputs if i not in inside and block.values[i].kind == "activation"
    )
    matrices = sum(len(meta.shape) > 1 for _, meta in weights.values())
    name, sub = _name_and_subtitle(lead, bool(weights), block.values[lead.outputs[0]].meta)
    return Node(
        f"{scope}:{group.name}" if scope else group.name,
        name,
        sub,
        _node_kind(lead, bool(weights), matrices, len(inputs)),
        module=_module_of(lead),
        ops=ops,
        weights=tuple(weights.values()),
        inputs=tuple(block.values[i].meta for i in inputs),
        outputs=tuple(block.values[i].meta for i in ops[-1].outputs),
        flops=sum(op_work(op, block.values).flops for op in ops),
    )


def _module_of(lead: Op) -> str:
    """Return where the op is in the block's code, and the class: `self_attn.q_proj (Linear)`."""
    path = lead.site.scope
    return f"{path} ({lead.module})" if path and lead.module else path or lead.module


def _name_and_subtitle(lead: Op, has_weight: bool, out: TensorMeta) -> tuple[str, str]:
    """Return a node's name (its module if it has a weight, else what it does), and below it the other and the shape."""
    path = lead.site.scope.split(".")
    module = module_path(path[-1])
    if module.isdecimal() and len(path) > 1:
        module = f"{path[-2]}.{module}"
    verb = operator(lead.fn).plain_title
    size = "×".join(map(str, out.shape)) or "scalar"
    return (module, f"{verb} · {size}") if has_weight and module else (verb, size)


def _node_kind(lead: Op, has_weight: bool, num_matrices: int, num_inputs: int) -> NodeKind:
    kind = operator(lead.fn).kind
    if kind is Kind.ATTENTION:
        return "attention"
    if kind is Kind.LOSS or (kind is Kind.UNKNOWN and "loss" in lead.fn):
        return "loss"
    if num_matrices:
        return "weight"
    if has_weight:
        return "norm"
    return "join" if num_inputs > 1 else "op"


def _build_edges(
    block: Block, runs: list[Run], nodes: list[Node], maker_of: Mapping[int, str], scope: str
) -> list[tuple[str, str]]:
    """Return the pairs of nodes between which an activation goes, each once."""
    pairs: dict[tuple[str, str], None] = {}
    readers = [(n.id, [i for op in n.ops for i in op.inputs]) for n in nodes]
    readers += [(f"run:{k}", [i for c in run.calls for i in c.inputs]) for k, run in enumerate(runs)]
    if scope:
        readers.append((f"{scope}:{OUT}", list(block.outputs)))
    for reader, values in readers:
        for i in values:
            src = maker_of.get(i)
            if src and src != reader and block.values[i].kind == "activation":
                pairs[src, reader] = None
    place = {n.id: i for i, n in enumerate(nodes)}
    return sorted((p for p in pairs if place[p[0]] < place[p[1]]), key=lambda p: (place[p[0]], place[p[1]]))


def lead_op(node: Node) -> Op | None:
    """Return the operation whose choices a node has."""
    return next((op for op in node.ops if is_heavy(op)), node.ops[0]) if node.ops else None


def node_choices(node: Node, coarse: CoarseGraph) -> list[tuple[str, str, str]]:
    """Return the ways to run the node's leading op along one mesh axis: (name of the split, operands, results)."""
    block, lead = find_block(node, coarse), lead_op(node)
    if lead is None:
        return []
    table = []
    for row in rows(lead, block.values):
        name = {"R": "replicate", "P": "pass a partial sum on"}.get(
            row.name
        ) or f"split {_dim_words(row.name, lead, block, coarse)}"
        ins = " ".join(str(p) for p, _ in row.inputs)
        table.append((name, ins, " ".join(str(p) for p, _ in row.outputs)))
    return table


def _dim_words(name: str, lead: Op, block: Block, coarse: CoarseGraph) -> str:
    """Name a dim of a rule: `d0` is the batch where it has its size, `out` the output features."""
    words = {"out": "output features", "in": "input features", "o": "output features", "i": "input features"}
    if name[:1] != "d" or not name[1:].isdecimal():
        return words.get(name, name)
    dim, shape = int(name[1:]), block.values[lead.outputs[0]].meta.shape
    size = shape[dim] if dim < len(shape) else 0
    load = coarse.graph.workload
    # A size alone would mislead: 8 heads in dim 2 are no batch of 8.
    known = {load.get("batch"): "batch", load.get("seq"): "tokens"} if dim < 2 else {}
    return known.get(size, f"dim {dim}")


def find_block(node: Node, coarse: CoarseGraph) -> Block:
    """Return the block that a node belongs to."""
    name, _, rest = node.id.rpartition(":")
    return coarse.blocks[name].block if rest and name in coarse.blocks else coarse.top.block


def node_facts(node: Node) -> list[tuple[str, str]]:
    """Return the lines of the hover card."""
    lines: list[tuple[str, str]] = []
    if node.outputs:
        lines.append(("result", format_tensor(node.outputs[0])))
    if node.flops:
        lines.append(("work", f"{units.flops(node.flops)} forward, whole"))
    if node.num_params:
        lines.append(("parameters", units.count(node.num_params)))
    return lines


def format_tensor(meta: TensorMeta) -> str:
    """Write a tensor: `bfloat16 [64, 8192, 4096]`."""
    return f"{meta.dtype} {units.shape(meta.shape)}"
