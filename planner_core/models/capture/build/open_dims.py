"""Dims whose size depends on the values of a batch: a mask picks that many elements, say. No plan splits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner_core.core import Block, Op
from planner_core.ops import OPEN_DIMS

Blocks = Mapping[str, Block]


def with_open_dims(blocks: Blocks, fewer: Blocks) -> dict[str, Block] | None:
    """The blocks, with OPEN_DIMS for each op that has such dims. `fewer`: the blocks of a pass in which masks picked one element less.
    None if that pass did other operations."""
    if blocks.keys() != fewer.keys():
        return None
    found = {}
    for name, block in blocks.items():
        other = fewer[name]
        if _calls(block) != _calls(other) or len(block.values) != len(other.values):
            return None
        found[name] = _opened(block, other)
    return found


def _calls(block: Block) -> list[object]:
    return [(i.fn if isinstance(i, Op) else i.block, i.inputs, i.outputs) for i in block.items]


def _opened(block: Block, fewer: Block) -> Block:
    open_dims = [
        [d for d, (n, m) in enumerate(zip(a.meta.shape, b.meta.shape, strict=True)) if n != m]
        for a, b in zip(block.values, fewer.values, strict=True)
    ]
    if not any(open_dims):
        return block

    def marked(op: Op) -> Op:
        dims = tuple((i, d) for i, v in enumerate((*op.inputs, *op.outputs)) for d in open_dims[v])
        return replace(op, attrs={**op.attrs, OPEN_DIMS: dims}) if dims else op

    return replace(block, items=tuple(marked(i) if isinstance(i, Op) else i for i in block.items))
