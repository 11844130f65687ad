"""A model's graph with what its operators keep for backward on one GPU under one software.

Capture says what autograd keeps of each operator as PyTorch runs it with a fused attention kernel. Some software keeps other tensors; then
`Op.saved` and `Op.saved_extra` are those that it keeps. Names, operands and results stay, so a plan fits both graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from planner_core.core import PACKED, Block, Gpu, Graph, Op, TensorMeta, Workload
from planner_core.cost.compute.compiled import compiled_block
from planner_core.cost.compute.norm_kernels import with_norm_kernels
from planner_core.cost.compute.sdpa import MATH, SOFTMAX, attention_kernel
from planner_core.cost.compute.stated_loss import with_stated_loss
from planner_core.ops import AS_RUN, Kind, operator

KERNEL, WHOLE_BLOCKS = "kernel", "whole"


def graph_as_run(graph: Graph, gpu: Gpu, workload: Workload) -> Graph:
    """Return the graph as it runs. One that is so already stays as it is. Raises InputError for a loss that the model does not have."""
    if graph.as_run:
        return graph
    software = workload.resolved()
    # A run that states its loss says how it runs beside compiled blocks too: torchtitan of 2024 compiled its blocks, and not its loss.
    graph = with_stated_loss(graph, software.loss, workload.compiled and workload.loss is None)

    def with_software(block: Block) -> Block:
        block = _with_kernels(block, software.attention, gpu)
        block = _with_packed_qkv(block) if software.qkv == PACKED else block
        if workload.compiled:
            return compiled_block(block)
        return with_norm_kernels(block) if software.norms == KERNEL else block

    blocks = {name: with_software(block) for name, block in graph.blocks.items()}
    if software.checkpoints == WHOLE_BLOCKS:
        # Of the repeated blocks alone: the top block is not recomputed.
        blocks = {name: _recompute_whole_block(block) for name, block in blocks.items()}
    return replace(graph, top=with_software(graph.top), blocks=blocks, as_run=True)


def _with_packed_qkv(block: Block) -> Block:
    """Return the block whose attention keeps three tensors more: what q and k were made of, and its result in the order of the next
    product."""
    packed = {
        op.name: replace(op, saved_extra=(*op.saved_extra, *(block.values[op.inputs[0]].meta,) * 3))
        for _, op in _find_attentions([block])
    }
    return block.with_ops(packed)


def _recompute_whole_block(block: Block) -> Block:
    """Return a block whose recomputation reaches its last operator: that one keeps a number, for which the others are run again."""
    last = max((k for k, item in enumerate(block.items) if isinstance(item, Op)), default=-1)
    op = block.items[last] if block.items else None
    if not isinstance(op, Op):
        return block
    ends = replace(op, saved_extra=(*op.saved_extra, TensorMeta((1,), "float32")))
    return replace(block, items=(*block.items[:last], ends, *block.items[last + 1 :]))


def keeps_other_tensors(graph: Graph, gpu: Gpu, workload: Workload) -> bool:
    """Return whether operators of a graph keep other tensors as it runs than as it was captured."""
    other = graph_as_run(graph, gpu, workload)
    every = zip(graph.all_blocks, other.all_blocks, strict=True)
    return any(
        (a.saved, a.saved_extra) != (b.saved, b.saved_extra)
        for x, y in every
        for a, b in zip(x.ops, y.ops, strict=True)
    )


def attentions_by_kernel(graph: Graph, gpu: Gpu, workload: Workload) -> dict[str, list[tuple[Block, Op]]]:
    """Return the attentions of a graph by the kernel that each takes."""
    stated, by_kernel = workload.resolved().attention, dict[str, list[tuple[Block, Op]]]()
    for block, op in _find_attentions(graph.all_blocks):
        by_kernel.setdefault(attention_kernel(op, block.values, stated, gpu), []).append((block, op))
    return by_kernel


def _find_attentions(blocks: Iterable[Block]) -> Iterator[tuple[Block, Op]]:
    return ((b, op) for b in blocks for op in b.ops if operator(op.fn).kind is Kind.ATTENTION)


def _with_kernels(block: Block, stated: str, gpu: Gpu) -> Block:
    changed = {
        op.name: _with_math_kernel(block, op) if name == MATH else _with_softmax(block, op)
        for _, op in _find_attentions([block])
        if (name := attention_kernel(op, block.values, stated, gpu)) in (MATH, SOFTMAX)
    }
    return block.with_ops(changed) if changed else block


def _with_math_kernel(block: Block, op: Op) -> Op:
    """Return an attention that runs as products and a softmax in float32: it keeps both factors of both products, in float32 (torch's
    `_scaled_dot_product_attention_math`). Example: T5-large with 8 samples of 512 tokens keeps 185 MB a layer, where a fused kernel keeps
    42 MB."""
    q, k, v = (block.values[i].meta for i in op.inputs[:3])
    scores = (*q.shape[:-1], k.shape[-2])
    saved = tuple(TensorMeta(shape, "float32") for shape in (q.shape, k.shape, v.shape, scores))
    return replace(op, saved=(), saved_extra=saved, attrs={**op.attrs, AS_RUN: MATH})


def _with_softmax(block: Block, op: Op) -> Op:
    """Return an attention with a softmax kernel of its own: it keeps the operands, and the softmax in their dtype."""
    q, k = (block.values[i].meta for i in op.inputs[:2])
    scores = TensorMeta((*q.shape[:-1], k.shape[-2]), q.dtype)
    return replace(op, saved=op.inputs[:3], saved_extra=(scores,))
