"""Find the values to which the loss sends a gradient. Others, such as a second head or the last router's logits, have none.

A recording says whether a tensor *could* get a gradient (`requires_grad`). In a step, a tensor gets one only if a path of recorded
calls leads from it to the loss. All other calls run forward alone: without backward work, saved tensors and gradients to sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from planner_core.core import PER_CALL, Attr, Block, Call, Graph, Op, differentiable_inputs

Ports = frozenset[int]
"""Positions among a block's outputs."""


def keep_reached_gradients(graph: Graph) -> Graph:
    """The graph in which only those values have a gradient to which the loss sends one. If calls of one block differ in this, the
    block becomes several blocks."""
    return _GradientReach(graph).graph()


@dataclass(frozen=True, slots=True)
class _ReachedBlock:
    """A block as seen from the loss: its values and ops, which calls hand gradients on, and which inputs get a gradient."""

    block: Block
    wanted: dict[int, Ports]
    inputs: Ports


class _GradientReach:
    def __init__(self, source: Graph) -> None:
        self.source = source
        self.checkpoint_parts: dict[tuple[str, Ports], _ReachedBlock] = {}
        self.names: dict[tuple[str, Ports], str] = {}

    def graph(self) -> Graph:
        source = self.source
        top = self._reach_back(source.top, range(len(source.top.outputs)))
        values = list(top.block.values)
        items: list[Op | Call] = []
        blocks: dict[str, Block] = {}
        forms: dict[tuple[str, Ports, tuple[bool, ...]], Block] = {}
        numbers: dict[str, list[int]] = {}  # of each block made here, which calls of its source it stands for
        seen: Counter[str] = Counter()
        for position, item in enumerate(top.block.items):
            if isinstance(item, Call):
                part = self._reach_block(item.block, top.wanted[position])
                grads = tuple(values[v].grad for v in item.inputs)
                form = item.block, top.wanted[position], grads
                if form not in forms:  # calls of equal layers are of one form
                    forms[form] = _with_outside_gradients(part.block, grads)
                block = forms[form]
                for inner, outer in zip(
                    block.outputs, item.outputs, strict=True
                ):  # the block itself may go on from its result
                    values[outer] = replace(values[outer], grad=values[outer].grad or block.values[inner].grad)
                name = self._form_name(item.block, block, blocks)
                blocks[name] = replace(block, name=name)
                numbers.setdefault(name, []).append(seen[item.block])
                seen[item.block] += 1
                item = replace(item, block=name)
            items.append(item)
        kept = {name: _select_literals(block, numbers[name]) for name, block in blocks.items()}
        return replace(source, top=replace(top.block, values=tuple(values), items=tuple(items)), blocks=kept)

    def _reach_block(self, name: str, wanted: Ports) -> _ReachedBlock:
        if (name, wanted) not in self.checkpoint_parts:
            self.checkpoint_parts[name, wanted] = self._reach_back(self.source.blocks[name], wanted)
        return self.checkpoint_parts[name, wanted]

    def _form_name(self, name: str, block: Block, taken: dict[str, Block]) -> str:
        """The name of a form of a block: the block's own name for the first form, with a number for others. Equal forms are one."""
        free = name
        number = 1
        while free in taken and taken[free] != replace(block, name=free):
            number += 1
            free = f"{name}{number}"
            while free in self.source.blocks:
                number += 1
                free = f"{name}{number}"
        return free

    def _reach_back(self, block: Block, results: Iterable[int]) -> _ReachedBlock:
        """Backwards from `results`, positions among the block's outputs."""
        live = {block.outputs[k] for k in results if block.values[block.outputs[k]].grad}
        wanted: dict[int, Ports] = {}
        dead: set[int] = set()  # positions of ops that run forward alone
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
    """The block whose inputs have a gradient if the caller's tensors have one, even if it comes from other uses alone. A tensor has
    one state, inside the block and outside."""
    held = {v for v, grad in zip(block.inputs, grads, strict=True) if grad}
    return replace(block, values=tuple(replace(v, grad=v.grad or i in held) for i, v in enumerate(block.values)))


def _select_literals(block: Block, calls: list[int]) -> Block:
    """The block with those of its literals that belong to `calls` (see `PER_CALL`)."""

    def kept(attr: Attr) -> Attr:
        return (
            (PER_CALL, *(attr[1 + n] for n in calls)) if isinstance(attr, tuple) and attr[:1] == (PER_CALL,) else attr
        )

    items = [
        replace(i, attrs={k: kept(v) for k, v in i.attrs.items()}) if isinstance(i, Op) else i for i in block.items
    ]
    return replace(block, items=tuple(items))


def _forward_only(item: Op | Call) -> Op | Call:
    return replace(item, saved=(), saved_extra=()) if isinstance(item, Op) else item
