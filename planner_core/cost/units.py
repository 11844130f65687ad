"""The units of a step (see `step_time`), and the messages in which each sends its weights."""

from __future__ import annotations

import math

from planner_core.core import Block, Call, Op
from planner_core.ops import CoarseGraph


def ops_before_the_units(coarse: CoarseGraph) -> frozenset[str]:
    """The operators of the top block whose group runs before the first call.

    Nothing runs before them that could hide the gathers of their weights. Nothing runs after them in backward that could hide the
    reductions of their gradients.
    """
    items = coarse.graph.top.items
    first = next((i for i, item in enumerate(items) if isinstance(item, Call)), 0)
    early = (p for group in coarse.top.groups if max(group.items) < first for p in group.items)
    return frozenset(op.name for p in early if isinstance(op := items[p], Op))


def bucket_share(block: Block, value: int) -> float:
    """The share of a weight in the bucket of its unit, by elements.

    The weights of a unit are gathered in one message, and their gradients are reduced in one message, so they pay one latency. Each
    weight bears its share of the message's time, as if all weights of the unit moved in the same way. If they do, the shares add
    up to one message. A weight that is an input of the block has a bucket of its own.
    """
    passed = set(block.inputs)
    v = block.values[value]
    if value in passed or not v.grad:
        return 1.0
    own = (i for i, other in enumerate(block.values) if other.kind == "parameter" and other.grad and i not in passed)
    return math.prod(v.meta.shape) / sum(math.prod(block.values[i].meta.shape) for i in own)


def sent_share(block: Block, value: int) -> float:
    """The share of a value in its message: `bucket_share` of a weight, 1 for any other value."""
    return bucket_share(block, value) if block.values[value].kind == "parameter" else 1.0
