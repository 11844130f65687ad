"""The units of a step (see `step_time`): copies of repeated blocks, and the block around them."""

from __future__ import annotations

from planner_core.core import Call, Op
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
