"""Which tensors autograd keeps for the backward pass, seen across the boundaries of blocks.

A tensor that one op makes and another keeps is one storage and counts once. Inside a block the ops tell; for a
block's results this looks at who reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from planner_core.core import Block, Call, Graph, Op


def root(block: Block, value: int) -> int:
    """The value whose memory `value` shares, following views of views."""
    while True:
        storage = block.values[value].storage
        if storage < 0 or storage == value:
            return value
        value = storage


def viewed(block: Block) -> dict[int, int]:
    """For each value that is a view, the operand it is a view of: one step of the way that `root` goes.

    The steps matter where a tensor is redistributed on the way: what is a view of the new tensor keeps that one.
    """
    found: dict[int, int] = {}
    for op in block.ops:
        for o in op.outputs:
            base = root(block, o)
            of = next((i for i in op.inputs if i != o and root(block, i) == base), None)
            if of is not None:
                found[o] = of
    return found


def kept_inputs(block: Block) -> set[int]:
    """Activations given to a block whose storage its ops keep."""
    kept = {root(block, v) for op in block.ops for v in op.saved} | {v for op in block.ops for v in op.saved}
    return {v for v in block.inputs if block.values[v].kind == "activation" and (v in kept or root(block, v) in kept)}


def kept_by_calls(graph: Graph) -> set[int]:
    """Values of the top block that a called block keeps."""
    inputs = {name: kept_inputs(b) for name, b in graph.blocks.items()}
    return {
        outer
        for call in graph.calls()
        for inner, outer in zip(graph.blocks[call.block].inputs, call.inputs, strict=True)
        if inner in inputs[call.block]
    }


def kept_results(graph: Graph) -> Mapping[str, set[int]]:
    """Per block, the results that their reader keeps, in most of the block's copies."""
    top = graph.top
    kept = kept_by_calls(graph) | {
        v for op in top.ops for s in op.saved for v in (s, root(top, s)) if v not in op.outputs
    }
    votes: dict[str, Counter[int]] = {name: Counter() for name in graph.blocks}
    calls: Counter[str] = Counter()
    for item in top.items:
        if isinstance(item, Call):
            calls[item.block] += 1
            votes[item.block].update(
                i for i, o in zip(graph.blocks[item.block].outputs, item.outputs, strict=True) if o in kept
            )
    return {name: {v for v, n in votes[name].items() if 2 * n > calls[name]} for name in graph.blocks}


def run_again(block: Block) -> Mapping[str, bool]:
    """Ops that recomputation runs again, and whether it delivers their results again too.

    torch's checkpoint stops as soon as everything kept is there again: at the last op that keeps something.
    """
    names = [op.name for op in block.ops]
    last = max((i for i, op in enumerate(block.ops) if op.saved or op.saved_extra), default=-1)
    return {name: i < last for i, name in enumerate(names[: last + 1])}


def computes_again(op: Op, again: Mapping[str, bool]) -> bool:
    """Whether an op's kernels run a second time, of those that recomputation reaches (see `run_again`).

    The last one is only reached: autograd keeps its operands before its kernel starts, and the recomputation stops there
    unless the op keeps what it makes.
    """
    if op.name not in again:
        return False
    return again[op.name] or bool(op.saved_extra) or any(v in op.outputs for v in op.saved)
