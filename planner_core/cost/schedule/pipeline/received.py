"""Which copies of tensors a block does not make where its operands come from another stage.

A tensor is received into a contiguous buffer, however its maker had laid it out. `contiguous` then returns its operand and copies nothing.

Example: T5 makes the bias of its positions with the heads innermost, so each layer's attention keeps a copy in order, 512 MiB for 4 096
tokens. The layers of a stage that receives the bias all keep the one buffer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from planner_core.core import Block, Graph, Op, root
from planner_core.ops import Kind, operator

KEEPS_LAYOUT = (Kind.ELEMENTWISE, Kind.CAST)
"""Kinds whose result lies in memory as their operands do."""


def without_copies(block: Block, received: Collection[int]) -> Block:
    """Return the block as it runs if the operands `received` are contiguous; the same one if it makes each copy nevertheless."""
    values, contiguous = list(block.values), set(received)
    for item in block.items:
        if not isinstance(item, Op):
            continue
        result = item.outputs[0]
        if item.fn == "contiguous" and item.inputs[0] in contiguous:
            contiguous.add(result)
            values[result] = replace(values[result], storage=root(block, item.inputs[0]))
        elif operator(item.fn).kind in KEEPS_LAYOUT and _operands_in_shape_of(block, item, result) <= contiguous:
            contiguous.add(result)
    return block if tuple(values) == block.values else replace(block, values=tuple(values))


def _operands_in_shape_of(block: Block, op: Op, result: int) -> set[int]:
    """Return the operands that have the shape of a result, and so give it their layout; the result itself if none has."""
    shape = block.values[result].meta.shape
    return {v for v in op.inputs if block.values[v].meta.shape == shape} or {result}


def without_copies_of_inputs(graph: Graph) -> Graph:
    """Return the graph in which each block receives all its operands. No stage keeps less; the same graph if none keeps less than here."""
    blocks = {name: without_copies(block, block.inputs) for name, block in graph.blocks.items()}
    return (
        graph if all(block is graph.blocks[name] for name, block in blocks.items()) else replace(graph, blocks=blocks)
    )


def received_operands(graph: Graph, takes: Collection[int]) -> dict[str, frozenset[int]]:
    """By block that a stage runs: the operands that are values among `takes` of the top block in every call."""
    received: dict[str, frozenset[int]] = {}
    for call in graph.calls():
        inner = graph.blocks[call.block].inputs
        of_call = frozenset(i for i, v in zip(inner, call.inputs, strict=True) if v in takes)
        received[call.block] = received.get(call.block, of_call) & of_call
    return received
