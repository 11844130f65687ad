"""A loss of logits as a run computes it, if it does not do so as the model's own code does (`--loss`).

    eager       as the model's code: a float32 copy of the logits, their log-softmax, and two copies more in backward
    fused       one kernel that reads the logits in their dtype, and writes their gradient in their place
    whole       one float32 copy of all logits, in whose place the gradient is written, as Megatron-LM does
    gathered    as the model's code, of logits that every tensor-parallel rank has whole; they and those of the micro-batch before are
                held until later passes overwrite them (the pipeline of Aleph Alpha's Scaling has two such buffers on the last stage)
    chunked:N   head and loss of one of N parts of the tokens after the other, forward and backward at once (Liger, Unsloth)

A run whose blocks are compiled compiles the loss too, unless it states its loss: that reads the logits in their dtype, and writes their
gradient beside them.

Example: 8 192 tokens x 128 256 words in bfloat16 are 2.1 GB of logits. Eager the loss takes 14.7 GB beside them, fused nothing, whole
4.2 GB, and in eight parts all together take 0.26 GB.
"""

from __future__ import annotations

from dataclasses import replace

from planner_core.core import Block, Graph, InputError, Op, TensorMeta, Value, named, root
from planner_core.ops import AS_RUN, WHOLE_LOGITS, Kind, operator

EAGER, FUSED, WHOLE, GATHERED, CHUNKED, COMPILED = "eager", "fused", "whole", "gathered", "chunked", "compiled"


def with_stated_loss(graph: Graph, stated: str, compiled: bool) -> Graph:
    """Return the graph with its loss computed as stated. `compiled`: the loss is in a compiled block. Raises InputError for a model without
    such a loss."""
    kind, _, parts = stated.partition(":")
    kind = COMPILED if compiled and kind == EAGER else kind
    losses = [op for block in graph.all_blocks for op in _find_losses(block)]
    if kind == EAGER or any(AS_RUN in op.attrs for op in losses):
        return graph
    if not losses:
        if kind == COMPILED:
            return graph
        raise InputError(
            named("loss", stated), f": {graph.name} has no cross-entropy of logits; leave ", named("loss"), " out"
        )
    of_code = next((b for b in graph.blocks.values() if _find_losses(b)), None)
    if of_code is not None and kind == CHUNKED:
        raise InputError(
            named("loss", stated),
            f": {graph.name} computes its loss in parts by its own code ({of_code.name}); leave ",
            named("loss"),
            " out",
        )
    top, *others = (_replace_losses(block, kind, int(parts or 1)) for block in graph.all_blocks)
    return replace(graph, top=top, blocks={block.name: block for block in others})


def _find_losses(block: Block) -> list[Op]:
    return [op for op in block.ops if operator(op.fn).is_logits_loss]


def _replace_losses(block: Block, kind: str, parts: int) -> Block:
    for loss in _find_losses(block):
        block = _replace_loss(block, loss, kind, parts)
    return block


def _replace_loss(block: Block, loss: Op, kind: str, parts: int) -> Block:
    if kind == GATHERED:
        # A buffer each for this micro-batch and the one before: the pass after next overwrites it, and backward does not free it.
        buffer = TensorMeta(block.values[loss.inputs[0]].meta.shape, _logits_dtype(block, loss))
        there = replace(loss, saved_extra=(*loss.saved_extra, buffer, buffer), attrs={**loss.attrs, WHOLE_LOGITS: True})
        return replace(block, items=tuple(there if item is loss else item for item in block.items))
    logits = root(block, loss.inputs[0])
    values, ops = list(block.values), {loss.name: _loss_as_run(block, loss, kind)}
    maker = {v: op for op in block.ops for v in op.outputs}
    cast = maker.get(logits)
    if kind != WHOLE and cast is not None and operator(cast.fn).kind is Kind.CAST:
        # no float32 copy is made: the cast is a view of the logits, and so is what was made of it
        narrow = root(block, cast.inputs[0])
        ops[cast.name] = replace(cast, attrs={**cast.attrs, AS_RUN: kind}, saved=())
        for i, v in enumerate(values):
            if root(block, i) == logits:
                dtype = values[narrow].meta.dtype
                values[i] = replace(v, meta=TensorMeta(v.meta.shape, dtype), storage=narrow)
        logits = narrow
    if kind == CHUNKED:
        values = [
            replace(v, parts=parts) if root(block, i) == logits or _is_view_of(values, i, logits) else v
            for i, v in enumerate(values)
        ]
    return replace(block.with_ops(ops), values=tuple(values))


def _logits_dtype(block: Block, loss: Op) -> str:
    """Return the dtype in which the logits are made."""
    logits = root(block, loss.inputs[0])
    cast = next((op for op in block.ops if logits in op.outputs and operator(op.fn).kind is Kind.CAST), None)
    return block.values[cast.inputs[0] if cast else logits].meta.dtype


def _is_view_of(values: list[Value], value: int, base: int) -> bool:
    return values[value].storage == base


def _loss_as_run(block: Block, loss: Op, kind: str) -> Op:
    """Return the loss with what it keeps: the logits, and a number for each token."""
    logits, targets = loss.inputs[0], loss.inputs[1:]
    tokens = TensorMeta(block.values[logits].meta.shape[:1], "float32")
    saved_logits = () if kind == CHUNKED else (logits,)
    return replace(loss, saved=(*targets, *saved_logits), saved_extra=(tokens,), attrs={**loss.attrs, AS_RUN: kind})
