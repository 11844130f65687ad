"""What a block that runs through torch.compile keeps for backward: a minimum cut, as torch's partitioner finds it.

Backward needs some values of forward. Each of them is kept, or made again from what is kept, in the kernel that needs it. What is cheap to
make again are the operators that compile fuses (`ops.traffic`); results of products, attention, experts, lookups and random numbers are
not made again. Nor is what a kernel of backward that is not fused reads, such as an operand of a product: it would have to lie in memory
for it (`ban_recompute_materialized_backward`). So the values that are kept part what forward is given from what backward needs, and take
the least memory of all that do: a minimum cut of vertices, weighted by bytes (`min_cut_rematerialization_partition` of
`torch._functorch.partitioners`).

Example: of a Llama layer autograd keeps float32 copies in its norms and both sides of `silu(gate) * up`. Compiled it keeps the residual
stream twice, both normed inputs, q, k, v, attention's result, gate, up and their product: 139 of 213 KB a token for Llama-3-8B.
"""

from __future__ import annotations

from dataclasses import replace

from planner_core.core import Block, Op, root
from planner_core.ops import FUSED, Kind, is_free, operator

RECOMPUTED_KINDS = FUSED - {Kind.RANDOM, Kind.LOSS}
"""Kinds of operators that backward runs again in its own kernels."""
SOURCE, SINK = "given", "needed"


def compiled_block(block: Block) -> Block:
    """Return the block with what its operators keep if it is compiled."""
    needed = {v for op in block.ops for v in _needed_activations(block, op)}
    cut = _minimum_cut(block, needed)
    items, first = [], dict[int, str]()
    for op in block.ops:
        for v in op.inputs:
            first.setdefault(root(block, v), op.name)
    for item in block.items:
        if not isinstance(item, Op) or not (item.saved or any(root(block, v) in cut for v in item.inputs)):
            items.append(item)
            continue
        # Weights and constants lie in memory anyway, so an operator keeps them as before.
        already = [v for v in item.saved if block.values[v].kind != "activation" or _keeps_value(block, item, v, cut)]
        read = [
            v for v in item.inputs if root(block, v) in cut and first[root(block, v)] == item.name and v not in already
        ]
        items.append(replace(item, saved=tuple(dict.fromkeys((*already, *read)))))
    return replace(block, items=tuple(items))


def _keeps_value(block: Block, op: Op, value: int, cut: set[int]) -> bool:
    """Return whether an operator goes on to keep a value: one of the cut that it reads for a kernel that is not fused, or makes."""
    return root(block, value) in cut and (value in op.outputs or not _is_recomputed(op))


def _needed_activations(block: Block, op: Op) -> set[int]:
    """Return the activations that the backward of an operator reads."""
    if not block.has_backward(op):
        return set()
    return {r for v in op.saved if block.values[r := root(block, v)].kind == "activation"}


def _is_recomputed(op: Op) -> bool:
    return is_free(op) or operator(op.fn).kind in RECOMPUTED_KINDS


def _minimum_cut(block: Block, needed: set[int]) -> set[int]:
    """Return the values to keep. Each value is two vertices, and what it takes to keep it is the capacity between them."""
    import networkx as nx  # takes 0.1 s, and few requests compile

    net: nx.DiGraph = nx.DiGraph()
    recomputable = {v for op in block.ops if _is_recomputed(op) for v in op.outputs if root(block, v) == v}
    recomputable -= {v for op in block.ops if not _is_recomputed(op) for v in _needed_activations(block, op)}
    activations = {root(block, i) for i, v in enumerate(block.values) if v.kind == "activation"}
    for v in activations:
        # To cut between the two vertices of a value is to keep it; an edge without a capacity cannot be cut.
        net.add_edge((v, "in"), (v, "out"), capacity=block.values[v].meta.num_bytes)
        if v not in recomputable:
            net.add_edge(SOURCE, (v, "in"))
        if v in needed:
            net.add_edge((v, "out"), SINK)
    for op in block.ops:
        if not _is_recomputed(op):
            continue
        for o in {root(block, v) for v in op.outputs} & activations:
            for i in {root(block, v) for v in op.inputs} & activations - {o}:
                net.add_edge((i, "out"), (o, "in"))
    if SOURCE not in net or SINK not in net:
        return set()
    _, (given, _) = nx.minimum_cut(net, SOURCE, SINK)
    return {v for v in activations if (v, "in") in given and (v, "out") not in given}
