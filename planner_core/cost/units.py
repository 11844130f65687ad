"""The units of a step (see `step_time`), and the messages in which each sends its weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from planner_core.core import Block, Call, Op
from planner_core.ops import CoarseGraph

SMALL_WEIGHT_DIMS = 1
"""Weights of at most this many dims (biases, norms) are never gathered at use. That would save less than a message costs."""

UNIT_ELEMENTS = 100_000_000
"""Elements of weights at which a unit outside of repeated blocks is large enough: that of FSDP's `size_based_auto_wrap_policy`."""


def split_into_units(top: Block) -> list[list[Op | Call]]:
    """Return the items of each unit of the top block, in running order: a call, or operators between two calls."""
    units: list[list[Op | Call]] = []
    for is_call, run in groupby(top.items, key=lambda item: isinstance(item, Call)):
        items = list(run)
        weights = [
            {v: math.prod(top.values[v].meta.shape) for v in item.inputs if top.values[v].kind == "parameter"}
            for item in items
        ]
        starts = range(len(items)) if is_call else unit_starts(weights)
        units += [items[first:last] for first, last in pairwise([*starts, len(items)])]
    return units


def unit_starts(weights: Sequence[Mapping[int, int]]) -> list[int]:
    """Return the positions at which units begin among operators that belong to no repeated block.

    A unit ends where its weights reach `UNIT_ELEMENTS`, if those after it do too. Otherwise layers that do not repeat would be gathered
    all at once. Example: four layers of 1 073 million elements and a head of 2 million are four units, and the head is in the last.

    Args:
        weights: For each operator the number of elements of each weight that it reads.
    """
    seen: set[int] = set()
    added = []
    for read in weights:
        added.append(sum(n for weight, n in read.items() if weight not in seen))
        seen.update(read)
    starts, here, left = [0], 0, sum(added)
    for position, num_elements in enumerate(added):
        if num_elements and here >= UNIT_ELEMENTS and left >= UNIT_ELEMENTS:
            starts.append(position)
            here = 0
        here, left = here + num_elements, left - num_elements
    return starts


class Ends(NamedTuple):
    """The operators of the top block that run before the first unit, and those that run after the last one.

    Nothing runs before the first ones that could hide the gathers of their weights. Nothing runs after them in backward that could hide
    the reductions of their gradients. The last ones begin backward: their weights, which were freed after forward, are gathered again
    right after the loss, when nothing runs beside.
    """

    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()


def ops_at_the_ends(coarse: CoarseGraph) -> Ends:
    """Return the operators of the top block whose group runs before the first call, and those whose group runs after the last one."""
    top = coarse.graph.top
    calls = top.call_positions
    if not calls:
        return Ends()
    groups = [group.items for group in coarse.top.groups]
    before = (p for items in groups if max(items) < calls[0] for p in items)
    after = (p for items in groups if min(items) > calls[-1] for p in items)
    return Ends(*(frozenset(op.name for op in top.ops_at(side)) for side in (before, after)))


def is_small(block: Block, value: int) -> bool:
    """Return whether a weight is a bias or a norm's."""
    return len(block.values[value].meta.shape) <= SMALL_WEIGHT_DIMS


def weights_at_the_ends(block: Block, before: Collection[str]) -> frozenset[int]:
    """Return the weights whose traffic once a step nothing hides: those that an operator `before` the units reads, and small ones, whose
    gradients travel when backward is over."""
    weights = {i for i, v in enumerate(block.values) if v.kind == "parameter"}
    first = {v for op in block.ops if op.name in before for v in op.inputs}
    return frozenset(i for i in weights if i in first or is_small(block, i))


@dataclass(frozen=True, slots=True)
class Buckets:
    """The weights of a block as they are sent: `passed` are values that the caller gives, `whole` is the number of elements of the
    block's own trained weights, and `small` that of those that travel with the small ones.

    The weights of a unit are gathered in one message, and their gradients are reduced in one message, so they pay one latency. Each
    weight bears its share of the message's time, as if all weights of the unit moved in the same way. If they do, the shares add
    up to one message. A weight that is an input of the block has a bucket of its own. Example: `q_proj` of Llama-3-8B has 16.8 of its
    layer's 218 million parameters. It bears 7.7 % of the time, latency included, of the message that carries all of them.

    Small gradients of all units travel in one message when backward is over. Those of the top block bear its latency.
    """

    block: Block
    passed: frozenset[int]
    whole: int
    small: int

    @staticmethod
    def of_block(block: Block) -> Buckets:
        """Return the buckets of a block."""
        passed = frozenset(block.inputs)
        sizes = {
            i: math.prod(v.meta.shape)
            for i, v in enumerate(block.values)
            if v.kind == "parameter" and v.grad and i not in passed
        }
        whole = sum(sizes.values())
        is_top = any(isinstance(item, Call) for item in block.items)
        small = sum(n for i, n in sizes.items() if is_small(block, i)) if is_top else whole
        return Buckets(block, passed, whole, small)

    def share(self, value: int) -> float:
        """Return the share of a weight in the bucket of its unit, by elements; 1 for any other value."""
        v = self.block.values[value]
        if v.kind != "parameter" or value in self.passed or not v.grad:
            return 1.0
        return math.prod(v.meta.shape) / (self.small if is_small(self.block, value) else self.whole)
