"""The graph of a deep model with other samples, of one capture of the deep model and two of the same model with few layers.

A repeated block does not depend on how often it is repeated. So a model with few layers shows how each size depends on the samples, and
the deep model is captured with one number of samples only.

Example: of a T5 of 2 x 1 001 layers a capture takes 7 s, and one of 2 x 3 layers 0.1 s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner_core.core import Block, Call, Graph, Op, PlannerError, TensorMeta, Value

_Sizes = dict[int, TensorMeta]


def with_samples(deep: Graph, batch: int, open_few: Callable[[int, int], Graph | None]) -> Graph | None:
    """Return the graph `deep` with another number of samples; None if few layers do not show how its sizes depend on it.

    `open_few` opens the same model with a number of samples and of layers.
    """
    layers = _few_layers(deep)
    if layers is None:
        return None
    try:
        few, other = (open_few(b, layers) for b in (deep.workload["batch"], batch))
    except PlannerError:  # the depth of this model cannot be set
        return None
    return _with_sizes_of(other, deep, few) if few and other else None


def _few_layers(graph: Graph) -> int | None:
    """Return the least number of layers that has each repeated block three times, by the numbers in the names of its copies; None if that
    is more than half of the model's, or copies have no numbers.

    Example: of 64 layers, each fourth of which attends to all tokens, 12 have both kinds of layers three times.
    """
    places: dict[str, list[int]] = {}
    for call in graph.calls():
        number = next((part for part in reversed(call.prefix.split(".")) if part.isdecimal()), None)
        if number is None:
            return None
        places.setdefault(call.block, []).append(int(number))
    if not places:
        return None
    # The first layer of a T5 also makes what all layers add to their scores. Two others show what layers have in common.
    layers = 1 + max(sorted(of_block)[:3][-1] for of_block in places.values())
    return layers if 2 * layers <= 1 + max(map(max, places.values())) else None


def _with_sizes_of(other: Graph, deep: Graph, few: Graph) -> Graph | None:
    """Return the graph `deep` with the samples of the graph `other`. `few` has the layers of `other` and the samples of `deep`.

    None if a part of the deep model is not in the other two: a block, an operator outside of the blocks, or a size of theirs.
    """
    known, wanted = few.top, other.top
    is_alike = (
        deep.blocks == few.blocks
        and few.blocks.keys() == other.blocks.keys()
        and deep.loss == few.loss
        and few.assumptions == other.assumptions
        and few.buffer_bytes == other.buffer_bytes
        and list(map(_without_sizes, known.items)) == list(map(_without_sizes, wanted.items))
        and list(map(_value_without_sizes, known.values)) == list(map(_value_without_sizes, wanted.values))
        and [_form_of_op(op) for op in deep.top.ops] == [_form_of_op(op) for op in known.ops]
        and all(mine.attrs == theirs.attrs for mine, theirs in zip(deep.top.ops, known.ops, strict=True))
    )
    sizes = _find_sizes(deep, few, known) if is_alike else None
    new_sizes = _find_sizes(deep, other, wanted) if is_alike else None
    if sizes is None or new_sizes is None or any(deep.top.values[v].meta != meta for v, meta in sizes.items()):
        return None
    # What nothing uses is not found in the others. A weight has the same size with any samples.
    if any(v not in sizes and value.kind != "parameter" for v, value in enumerate(deep.top.values)):
        return None
    values = tuple(replace(value, meta=new_sizes.get(v, value.meta)) for v, value in enumerate(deep.top.values))
    new_ops = iter(wanted.ops)
    items = tuple(_with_arguments_of(next(new_ops), item) if isinstance(item, Op) else item for item in deep.top.items)
    top = replace(deep.top, values=values, items=items)
    return replace(deep, top=top, blocks=other.blocks, workload=other.workload)


def _with_arguments_of(other: Op, op: Op) -> Op:
    return replace(op, attrs=other.attrs, saved_extra=other.saved_extra)


def _without_sizes(item: Op | Call) -> Op | Call:
    """Return what of an item does not depend on the samples."""
    return replace(item, attrs={}, saved_extra=()) if isinstance(item, Op) else item


def _form_of_op(op: Op) -> tuple[object, ...]:
    """Return what of an operator depends neither on the samples nor on the numbers of values."""
    return op.name, op.fn, op.module, len(op.inputs), len(op.outputs), len(op.saved)


def _value_without_sizes(value: Value) -> Value:
    return replace(value, meta=TensorMeta((), value.meta.dtype))


def _find_sizes(deep: Graph, few: Graph, top: Block) -> _Sizes | None:
    """Return the sizes that the values of the deep model's top block have in a model of few layers; None if one has several."""
    sizes: _Sizes = {}
    for item, block, others in _match_ends(deep, few, top):
        for value, other in zip(item, others, strict=True):
            meta = block.values[other].meta
            if sizes.setdefault(value, meta) != meta:
                return None
    return sizes


def _match_ends(deep: Graph, few: Graph, top: Block) -> list[tuple[tuple[int, ...], Block, tuple[int, ...]]]:
    """Return the operands and results of each item of the deep model's top block, with the block and the values that have their sizes."""
    ops = iter(top.ops)
    matches: list[tuple[tuple[int, ...], Block, tuple[int, ...]]] = []
    for item in deep.top.items:
        if isinstance(item, Op):
            other = next(ops)
            matches.append(
                ((*item.inputs, *item.outputs, *item.saved), top, (*other.inputs, *other.outputs, *other.saved))
            )
        else:
            block = few.blocks[item.block]
            matches.append(((*item.inputs, *item.outputs), block, (*block.inputs, *block.outputs)))
    return matches
