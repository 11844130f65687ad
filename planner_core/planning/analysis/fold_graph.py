"""A folded model as a graph for other programs: networkx, DOT and GraphML.

Nodes are groups of operations that share a placement, edges are tensors that pass between them. Folded, a group of a
repeated block is one node with `repeats` copies, and an edge counts how often its tensor passes in the whole model. So the
sum of `repeats` over nodes and of `count` over edges is what the unfolded graph has.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner_core.core import Block, Call, join_name
from planner_core.ops import CoarseBlock, Group
from planner_core.planning.library import Folded

if TYPE_CHECKING:
    from networkx import MultiDiGraph

NodeKey = tuple[str, str]
"""(the block, or the copy of it, and the group's name); the top block is ""."""


@dataclass(frozen=True, slots=True)
class _Wire:
    """A tensor that passes from one group to another."""

    src: NodeKey
    dst: NodeKey
    shape: str
    dtype: str
    num_bytes: int


def to_networkx(folded: Folded, *, unfolded: bool = False) -> MultiDiGraph:
    """Turn a folded model into a networkx graph.

    Args:
        folded: What `fold` returned.
        unfolded: Whether every copy of a block has nodes of its own.

    Returns:
        A directed multigraph. A node has `label`, `block` ("" at the top), `fn` (the leading operation), `module` (the class
        that calls it), `ops` (how many operations), `weights` (names, separated by spaces), `parameters` (elements) and
        `repeats` (copies in the whole model). An edge has `shape` (such as "16x4096x4096"), `dtype`, `bytes` (of the whole
        tensor) and `count` (how often it passes in the whole model). All values are plain numbers and text.

    Raises:
        ImportError: networkx is not installed.

    Example:
        >>> graph = shardscope.to_networkx(shardscope.fold("llama-3-8b"))
        >>> sum(repeats for _, repeats in graph.nodes(data="repeats"))
        551
    """
    from networkx import MultiDiGraph

    graph = MultiDiGraph(name=folded.graph.name)
    repeats = folded.repeats
    for block, scope, coarse in _scoped_groups(folded, unfolded):
        for group in coarse.groups:
            facts = _group_attributes(coarse.block, group)
            copies = repeats[block] if block and not unfolded else 1
            graph.add_node(_node_name((scope, group.name), unfolded), block=block, repeats=copies, **facts)
    # Copies of a block share nodes in a folded graph, so their equal wires are one edge that counts them.
    for wire, count in Counter(_all_wires(folded, unfolded)).items():
        graph.add_edge(
            _node_name(wire.src, unfolded),
            _node_name(wire.dst, unfolded),
            shape=wire.shape,
            dtype=wire.dtype,
            bytes=wire.num_bytes,
            count=count,
        )
    return graph


def to_graphml(folded: Folded, *, unfolded: bool = False) -> str:
    """Turn a folded model into GraphML, which Gephi, yEd, Cytoscape and others open.

    Args:
        folded: What `fold` returned.
        unfolded: Whether every copy of a block has nodes of its own.

    Returns:
        The XML text of the graph of `to_networkx`.

    Raises:
        ImportError: networkx is not installed.

    Example:
        >>> "<graphml" in shardscope.to_graphml(shardscope.fold("gpt2-xl"))
        True
    """
    from networkx import generate_graphml

    return "\n".join(generate_graphml(to_networkx(folded, unfolded=unfolded))) + "\n"


def to_dot(folded: Folded, *, unfolded: bool = False) -> str:
    """Turn a folded model into DOT, which Graphviz draws.

    Args:
        folded: What `fold` returned.
        unfolded: Whether every copy of a block has nodes of its own.

    Returns:
        The text of a digraph; each repeated block is a cluster of its own, labelled with its copies.

    Raises:
        ImportError: networkx is not installed.

    Example:
        >>> print(shardscope.to_dot(shardscope.fold("gpt2-xl")).splitlines()[0])
        digraph "gpt2-xl" {
    """
    graph = to_networkx(folded, unfolded=unfolded)
    clusters: dict[str, list[str]] = {}
    for node, facts in graph.nodes(data=True):
        clusters.setdefault(facts["block"] if not unfolded else "", []).append(
            f"{_quote_dot(node)} [label={_quote_dot(facts['label'])}];"
        )
    lines = [
        f"digraph {_quote_dot(folded.graph.name)} {{",
        "  node [shape=box];",
        *("  " + n for n in clusters.pop("", [])),
    ]
    for index, (block, nodes) in enumerate(clusters.items()):
        title = _quote_dot(f"{block} x{folded.repeats[block]}")
        lines += [f"  subgraph cluster_{index} {{", f"    label={title};", *("    " + n for n in nodes), "  }"]
    for src, dst, facts in graph.edges(data=True):
        lines.append(f"  {_quote_dot(src)} -> {_quote_dot(dst)} [label={_quote_dot(facts['shape'])}];")
    return "\n".join([*lines, "}", ""])


def _quote_dot(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _node_name(node: NodeKey, unfolded: bool) -> str:
    """`LlamaDecoderLayer:mlp.up_proj/linear`, or `model.layers.0.mlp.up_proj/linear` in an unfolded graph."""
    scope, name = node
    return join_name(scope, name) if unfolded or not scope else f"{scope}:{name}"


def _scoped_groups(folded: Folded, unfolded: bool) -> Iterator[tuple[str, str, CoarseBlock]]:
    """(block, the scope of its nodes, its groups)."""
    yield "", "", folded.coarse.top
    if not unfolded:
        yield from ((name, name, block) for name, block in folded.coarse.blocks.items())
        return
    yield from ((call.block, call.prefix, folded.coarse.blocks[call.block]) for call in folded.graph.calls())


def _group_attributes(block: Block, group: Group) -> dict[str, Any]:
    ops = block.ops_at(group.items)
    # A group has the name of its leading operation.
    lead = next(op for op in ops if op.name == group.name)
    weights = [v for op in ops for v in dict.fromkeys(block.parameters_of(op))]
    return {
        "label": f"{lead.site.scope.rpartition('.')[2]} {lead.fn}".strip(),
        "fn": lead.fn,
        "module": lead.module,
        "ops": len(ops),
        "weights": " ".join(dict.fromkeys(w.name for w in weights)),
        "parameters": sum(math.prod(w.meta.shape) for w in weights),
    }


def _all_wires(folded: Folded, unfolded: bool) -> Iterator[_Wire]:
    """Yield every tensor that passes between two groups of the whole model, in order; equal ones where copies share nodes."""
    makers: dict[int, NodeKey] = {}  # value of the top block -> the group that makes it
    top = folded.coarse.top
    for item in top.nodes:
        if isinstance(item, Group):
            yield from _wires_into(top.block, item, "", makers)
            continue
        call = top.block.items[item]
        assert isinstance(call, Call)
        inner = folded.coarse.blocks[call.block]
        scope = call.prefix if unfolded else call.block
        # A block has numbers of its own, so the makers of its inputs are carried over the call, and those of its results back.
        inside = {i: makers[v] for i, v in zip(inner.block.inputs, call.inputs, strict=True) if v in makers}
        for group in inner.groups:
            yield from _wires_into(inner.block, group, scope, inside)
        makers.update({v: inside[i] for i, v in zip(inner.block.outputs, call.outputs, strict=True) if i in inside})


def _wires_into(block: Block, group: Group, scope: str, makers: dict[int, NodeKey]) -> Iterator[_Wire]:
    """Yield what a group takes from others, each tensor once; then its own results are noted in `makers`."""
    ops = block.ops_at(group.items)
    results: Mapping[int, None] = dict.fromkeys(v for op in ops for v in op.outputs)
    taker = (scope, group.name)
    for v in dict.fromkeys(v for op in ops for v in op.inputs):
        if v in makers and v not in results and block.values[v].kind == "activation":
            meta = block.values[v].meta
            yield _Wire(makers[v], taker, "x".join(map(str, meta.shape)), meta.dtype, meta.num_bytes)
    makers.update(dict.fromkeys(results, taker))
