"""Norms that run as one kernel (`Stack.norms`): what they keep, and what they read and write.

The kernel reads its operand in its own dtype, keeps it and a number for each token, and writes the result. The operators of the model's
code keep a float32 copy and the normed tensor besides.

Example: a norm of LLaMA-13B (5 120 wide) keeps 4 x 5 120 + 2 x 5 120 bytes a token as operators, beside its result. As a kernel it keeps
its operand, which the sum of the residual stream made anyway.
"""

from __future__ import annotations

from dataclasses import replace

from planner_core.core import Block, Op, TensorMeta
from planner_core.ops import AS_RUN, NORM_KERNEL, Kind, find_norms, operator


def with_norm_kernels(block: Block) -> Block:
    """Return the block with each norm of several operators as one kernel."""
    values, changed = list(block.values), dict[str, Op]()
    for ops in find_norms(block):
        maker = {v: op for op in ops for v in op.outputs}
        first = next(v for op in ops for v in op.inputs if v not in maker and values[v].kind == "activation")
        for op in ops:
            if operator(op.fn).kind is Kind.CAST and op.inputs[0] == first:
                # the kernel reads its operand in its own dtype, so this cast is a view of it
                (copy,) = op.outputs
                meta = TensorMeta(values[copy].meta.shape, values[first].meta.dtype)
                values[copy] = replace(values[copy], meta=meta, storage=values[first].storage)
            saved = tuple(
                v
                for v in op.saved
                if values[v].kind == "parameter"
                or v not in maker
                or maker[v].fn == "rsqrt"
                or values[v].storage == values[first].storage
            )
            changed[op.name] = replace(op, saved=saved, attrs={**op.attrs, AS_RUN: NORM_KERNEL})
    return replace(block.with_ops(changed), values=tuple(values))
