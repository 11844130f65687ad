"""The units of a step (see `step_time`): copies of repeated blocks, and the block around them, and what they send at once."""

from __future__ import annotations

import math

from planner_core.core import Block, Call, Op
from planner_core.ops import CoarseGraph


def ops_before_the_units(coarse: CoarseGraph) -> frozenset[str]:
    """Ops of the top block whose group runs before the first call.

    Nothing runs before them that could hide their weights' gathers, and nothing after them in backward that could hide the
    reduction of their gradients.
    """
    items = coarse.graph.top.items
    first = next((i for i, item in enumerate(items) if isinstance(item, Call)), 0)
    early = (p for group in coarse.top.groups if max(group.items) < first for p in group.items)
    return frozenset(op.name for p in early if isinstance(op := items[p], Op))


def bucket_share(block: Block, value: int) -> float:
    """The part of its unit's bucket that a weight is.

    A unit's weights are gathered together, and so are their gradients reduced: they pay one latency. Each weight bears its
    part of the message's time, as if the others of the unit moved alike; where all do, the parts add up to the time of
    one message. A weight that is passed into the block is a bucket of its own.
    """
    passed = set(block.inputs)
    v = block.values[value]
    if value in passed or not v.grad:
        return 1.0
    own = (i for i, other in enumerate(block.values) if other.kind == "parameter" and other.grad and i not in passed)
    return math.prod(v.meta.shape) / sum(math.prod(block.values[i].meta.shape) for i in own)


def sent_share(block: Block, value: int) -> float:
    """The part of what is sent at once that a value is: a weight's of its bucket, all of any other."""
    return bucket_share(block, value) if block.values[value].kind == "parameter" else 1.0
