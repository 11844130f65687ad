"""Find the values to which the loss sends a gradient. Others, such as a second head or the last router's logits, have none.

In a recording, `requires_grad` means that a tensor *could* get a gradient. In a step, it gets one only if a path of recorded
calls leads from it to the loss. Other calls run forward only: without backward work, saved tensors and gradients to sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from planner_core.core import Block, Call, Graph, Op, differentiable_inputs, numbered_names

Ports = frozenset[int]
"""Positions among a block's outputs."""


def keep_reached_gradients(graph: Graph) -> Graph:
    """Clear the gradient of values to which the loss sends none. A block whose calls differ in this becomes several blocks."""
    return _GradientReach(graph).graph()


@dataclass(frozen=True, slots=True)
class _ReachedBlock:
    """A block as reached from the loss.

    wanted  for each call in it, by position, which of the call's outputs get a gradient
    inputs  the block's inputs that get one
    """

    block: Block
    wanted: dict[int, Ports]
    inputs: Ports


class _GradientReach:
    def __init__(self, source: Graph) -> None:
        self.source = source
        self.reached: dict[tuple[str, Ports], _ReachedBlock] = {}

    def graph(self) -> Graph:
        source = self.source
        top = self._reach_back(source.top, range(len(source.top.outputs)))
        values = list(top.block.values)
        items: list[Op | Call] = []
        blocks: dict[str, Block] = {}
        forms: dict[tuple[str, Ports, tuple[bool, ...]], Block] = {}
        for position, item in enumerate(top.block.items):
            if isinstance(item, Call):
                part = self._reach_block(item.block, top.wanted[position])
                grads = tuple(values[v].grad for v in item.inputs)
                form = item.block, top.wanted[position], grads
                if form not in forms:  # calls of equal layers are of one form
                    forms[form] = _with_outside_gradients(part.block, grads)
                block = forms[form]
                # The block itself may use its result further, so the caller's tensor has a gradient if either has.
                for inner, outer in zip(block.outputs, item.outputs, strict=True):
                    values[outer] = replace(values[outer], grad=values[outer].grad or block.values[inner].grad)
                name = self._form_name(item.block, block, blocks)
                blocks[name] = replace(block, name=name)
                item = replace(item, block=name)
            items.append(item)
        return replace(source, top=replace(top.block, values=tuple(values), items=tuple(items)), blocks=blocks)

    def _reach_block(self, name: str, wanted: Ports) -> _ReachedBlock:
        if (name, wanted) not in self.reached:
            self.reached[name, wanted] = self._reach_back(self.source.blocks[name], wanted)
        return self.reached[name, wanted]

    def _form_name(self, name: str, block: Block, taken: dict[str, Block]) -> str:
        """Name a form of a block: the block's name for the first form, with a number for others. Equal forms share a name."""
        # Other blocks of the model may have a name with a number already, such as Block2, and are written later.
        free = (n for n in numbered_names(name) if n == name or n not in self.source.blocks)
        return next(n for n in free if n not in taken or taken[n] == replace(block, name=n))

    def _reach_back(self, block: Block, results: Iterable[int]) -> _ReachedBlock:
        """Walk a block backward from `results`, positions among its outputs."""
        live = {block.outputs[k] for k in results if block.values[block.outputs[k]].grad}
        wanted: dict[int, Ports] = {}
        dead: set[int] = set()  # positions of ops that run forward only
        # From the end: when an item is reached, all readers of its results have been seen, so `live` is complete for them.
        for position in reversed(range(len(block.items))):
            item = block.items[position]
            hands_on = frozenset(k for k, v in enumerate(item.outputs) if v in live)
            if isinstance(item, Call):
                wanted[position] = hands_on
                part = self._reach_block(item.block, hands_on)
                live.update(v for k, v in enumerate(item.inputs) if k in part.inputs and block.values[v].grad)
            elif hands_on:
                live.update(v for v in differentiable_inputs(item.inputs, item.attrs) if block.values[v].grad)
            else:
                dead.add(position)
        values = tuple(replace(v, grad=v.grad and i in live) for i, v in enumerate(block.values))
        items = tuple(_forward_only(i) if p in dead else i for p, i in enumerate(block.items))
        inputs = frozenset(k for k, v in enumerate(block.inputs) if v in live)
        return _ReachedBlock(replace(block, values=values, items=items), wanted, inputs)


def _with_outside_gradients(block: Block, grads: Sequence[bool]) -> Block:
    """Give inputs of a block a gradient if the caller's tensors have one, even if other uses alone cause it.

    A tensor has one state, inside the block and outside.
    """
    reached = {v for v, grad in zip(block.inputs, grads, strict=True) if grad}
    return replace(block, values=tuple(replace(v, grad=v.grad or i in reached) for i, v in enumerate(block.values)))


def _forward_only(item: Op | Call) -> Op | Call:
    return replace(item, saved=(), saved_extra=()) if isinstance(item, Op) else item
