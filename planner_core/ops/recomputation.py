"""Policies of recomputation: which results of a block are kept for backward, so that only the rest is recomputed.

    none             all that autograd saves is kept; nothing is recomputed
    keep-matmuls     results of attention and of products with a weight are kept
    selective        results of attention and of every second product with a weight are kept (torchtitan's `selective` by operator)
    keep-attention   results of attention alone are kept
    full             only the block's operands are kept

`kept_ops` is the one place that says what a policy keeps. Costs, search, memory simulation and run follow from it. A result is kept
as it is delivered: if a product is Partial and summed over an axis, the sum is kept, so that neither the product nor the sum is
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from planner_core.core import RECOMPUTE, Block, Op, root
from planner_core.ops.operators import Kind, writes_in_place
from planner_core.ops.registry import operator

KeepTest = Callable[[Op, int], bool]
"""Says whether a policy keeps the result of an op. The number counts the block's products with a weight, from 0; -1 is attention."""

KEEP_TESTS: Mapping[str, KeepTest] = {
    "keep-matmuls": lambda op, number: True,
    "selective": lambda op, number: number < 0 or number % 2 == 0,
    "keep-attention": lambda op, number: number < 0,
    "full": lambda op, number: False,
}


def kept_ops(block: Block, policy: str) -> tuple[str, ...]:
    """Names of the ops of a block whose results a policy keeps; none for "none" and "full".

    Three kinds of results are not kept: those that the recomputation does not read, since it stops at the last op that saves
    something; those that a later op writes in place; and those that the block returns, which the caller has.
    """
    if policy == "none":
        return ()
    pick, last, given = KEEP_TESTS[policy], last_saving(block), _values_written_in_place(block) | set(block.outputs)
    # `number` counts the products with a weight from 0: "selective" keeps 0, 2, 4, ... as torchtitan's policy does.
    names, number = [], -1
    for k, op in enumerate(block.ops):
        attends = operator(op.fn).kind is Kind.ATTENTION
        number += _multiplies_a_weight(block, op)
        wanted = (attends or _multiplies_a_weight(block, op)) and pick(op, -1 if attends else number)
        if (
            wanted
            and k < last
            and len(op.outputs) == 1
            and block.values[op.outputs[0]].grad
            and op.outputs[0] not in given
        ):
            names.append(op.name)
    return tuple(names)


def last_saving(block: Block) -> int:
    """Position of the last op that saves something for backward, where torch's checkpoint stops; -1 if none does."""
    return max((i for i, op in enumerate(block.ops) if op.saved or op.saved_extra), default=-1)


def _multiplies_a_weight(block: Block, op: Op) -> bool:
    """Return whether an op is a product with a weight that saves only its operands. (A layer of experts saves more.)"""
    if (
        operator(op.fn).kind not in (Kind.PRODUCT, Kind.CONVOLUTION)
        or op.saved_extra
        or set(op.saved) & set(op.outputs)
    ):
        return False
    return any(_is_matrix_weight(block, v) for v in op.inputs)


def _is_matrix_weight(block: Block, value: int) -> bool:
    return block.values[root(block, value)].kind == "parameter" and len(block.values[value].meta.shape) > 1


def _values_written_in_place(block: Block) -> set[int]:
    """Return the values whose memory an op writes in place."""
    written = {root(block, op.inputs[0]) for op in block.ops if writes_in_place(op.fn) and op.inputs}
    return {v for op in block.ops for v in op.outputs if root(block, v) in written}


def recompute_policies(block: Block, asked: str) -> dict[str, tuple[str, ...]]:
    """Return the policies that copies of a block may have under the workload's `asked`, each with the ops whose results it keeps.

    Of several policies that keep the same results only the last is returned. A checkpoint of the model's own code keeps its operands alone.
    """
    if block.recomputed:
        return {"full": ()}
    if asked != "auto":
        return {asked: kept_ops(block, asked)}
    # Example: a block of one product keeps the same with "keep-matmuls" and "selective". One of them is enough for the search.
    policies = {p: kept_ops(block, p) for p in RECOMPUTE if p != asked}
    # The last one recomputes most, and "none" stays in any case, since nothing is recomputed by it.
    last_with = {ops: p for p, ops in policies.items() if p != "none"}
    return {p: ops for p, ops in policies.items() if p == "none" or last_with[ops] == p}
