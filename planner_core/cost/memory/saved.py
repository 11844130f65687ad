"""Which tensors autograd keeps for the backward pass, seen across the boundaries of blocks.

A tensor that one op makes and another keeps is one storage and counts once. Inside a block the ops tell; for a
block's results this looks at who reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from planner_core.core import Block, Call, Graph, Op, root
from planner_core.ops import last_saving


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


@dataclass(frozen=True, slots=True)
class Rerun:
    """What of an op happens a second time when its block runs again; its operands are taken again in any case.

    `computes`: its kernels; `sends`: the collectives inside it; `delivers`: what its results send on their way.
    """

    computes: bool
    sends: bool
    delivers: bool


def run_again(block: Block, kept: Collection[str] = ()) -> Mapping[str, Rerun]:
    """Ops that recomputation reaches, where the results of the ops in `kept` are there still.

    torch's checkpoint stops as soon as everything saved is there again: at the last op that saves something. That one is
    only reached: autograd saves its operands before its kernel starts, unless the op saves what it makes.
    """
    last, found = last_saving(block), {}
    for i, op in enumerate(block.ops[: last + 1]):
        made = op.name not in kept
        own = bool(op.saved_extra) or any(v in op.outputs for v in op.saved)
        found[op.name] = Rerun(made and (i < last or own), made, made and i < last)
    return found


def computes_again(op: Op, again: Mapping[str, Rerun]) -> bool:
    """Whether an op's kernels run a second time."""
    return op.name in again and again[op.name].computes
