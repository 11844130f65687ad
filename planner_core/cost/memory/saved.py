"""Which tensors autograd saves for the backward pass, also across the boundaries of blocks.

A tensor that one operator makes and another one saves is one storage, and counts once. Inside a block the operators say what
they save. For the results of a block, this module looks at their readers. (What a plan *keeps*, although its block is recomputed, is
`BlockPlan.kept`.)

Example: layer k returns h, and layer k + 1 normalises h. The norm saves its operand, so h is saved, but no operator of layer k says
so. In 32 layers 31 results are read by a norm of the same block and the last by the final norm: the block's result is saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from planner_core.core import Block, Call, Graph, Op, root
from planner_core.ops import last_saving


def viewed_operands(block: Block) -> dict[int, int]:
    """For each value that is a view: the operand of which it is a view. `root` follows these steps to their end.

    The single steps matter if a tensor is redistributed between two of them: a view of the new tensor keeps the new tensor.
    """
    viewed: dict[int, int] = {}
    for op in block.ops:
        for o in op.outputs:
            base = root(block, o)
            of = next((i for i in op.inputs if i != o and root(block, i) == base), None)
            if of is not None:
                viewed[o] = of
    return viewed


def saved_block_inputs(block: Block) -> set[int]:
    """Return the input activations of a block whose storage its operators save."""
    # Both the value and its root count: a view that is saved holds the memory that it looks at.
    saved = {root(block, v) for op in block.ops for v in op.saved} | {v for op in block.ops for v in op.saved}
    return {v for v in block.inputs if block.values[v].kind == "activation" and (v in saved or root(block, v) in saved)}


def values_saved_by_calls(graph: Graph) -> set[int]:
    """Return the values of the top block that a called block saves."""
    inputs = {name: saved_block_inputs(b) for name, b in graph.blocks.items()}
    return {
        outer
        for call in graph.calls()
        for inner, outer in zip(graph.blocks[call.block].inputs, call.inputs, strict=True)
        if inner in inputs[call.block]
    }


def results_saved_by_readers(graph: Graph, in_all_copies: bool) -> Mapping[str, set[int]]:
    """By block: the results that their reader saves, in most copies of the block, or in all of them."""
    top = graph.top
    saved = values_saved_by_calls(graph) | {
        v for op in top.ops for s in op.saved for v in (s, root(top, s)) if v not in op.outputs
    }
    votes: dict[str, Counter[int]] = {name: Counter() for name in graph.blocks}
    calls: Counter[str] = Counter()
    for item in top.items:
        if isinstance(item, Call):
            calls[item.block] += 1
            votes[item.block].update(
                i for i, o in zip(graph.blocks[item.block].outputs, item.outputs, strict=True) if o in saved
            )
    # All copies share one network, so the majority decides. Example: 31 of 32 results go to a copy that saves them: 2 * 31 > 32.
    least = {name: calls[name] if in_all_copies else calls[name] // 2 + 1 for name in graph.blocks}
    return {name: {v for v, n in votes[name].items() if n >= least[name]} for name in graph.blocks}


@dataclass(frozen=True, slots=True)
class Rerun:
    """Which parts of an operator run again when its block is recomputed. Its operands are always redistributed again.

    `computes`: its kernels. `sends`: the collectives inside it. `delivers`: the redistributions of its results.
    """

    computes: bool
    sends: bool
    delivers: bool


def rerun_ops(block: Block, kept: Collection[str]) -> Mapping[str, Rerun]:
    """Return the operators that the recomputation reaches, if the results of the operators in `kept` were kept.

    torch's checkpoint stops as soon as all saved tensors are there again, so at the last operator that saves something. The
    kernel of that operator does not run, since autograd saves its operands before; unless the operator saves what it makes.
    """
    last, reruns = last_saving(block), {}
    for i, op in enumerate(block.ops[: last + 1]):
        is_rerun = op.name not in kept
        saves_results = bool(op.saved_extra) or any(v in op.outputs for v in op.saved)
        # No recomputed operator reads the results of the last one, so they are not delivered: collectives behind it are not repeated.
        reruns[op.name] = Rerun(is_rerun and (i < last or saves_results), is_rerun, is_rerun and i < last)
    return reruns


def is_recomputed(op: Op, reruns: Mapping[str, Rerun]) -> bool:
    """Return whether the kernels of an operator run again."""
    return op.name in reruns and reruns[op.name].computes


def lasting_weights(block: Block, ops: Sequence[Op]) -> tuple[set[int], set[int]]:
    """Return the weights that a unit of these ops gathers and that outlive it.

    The first set: weights that another unit views. The second: weights with a view that autograd saves.
    """
    results = {v for op in ops for v in op.outputs}
    names = {op.name for op in ops}
    later = {v for item in block.items if isinstance(item, Call) or item.name not in names for v in item.inputs}
    saved = {v for op in ops for v in op.saved}
    # `mass @ mass.T` saves both factors, which are one memory, so the view is not named there.
    views = {v for op in ops for v in results.intersection(op.inputs) if root(block, v) in op.saved}
    passed_on = results & (later | set(block.outputs))
    return {root(block, v) for v in passed_on}, {root(block, v) for v in results & saved | views}
