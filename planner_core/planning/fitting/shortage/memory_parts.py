"""What fills a plan's memory, and what is not in it.

The memory of a plan holds what is computed from weights. Inputs, masks and positions are small beside it in most models. Some make
more of them: BROS makes a sinusoid of 192 numbers for each pair of tokens. `note_uncounted_memory` says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from planner_core.core import (
    ITEM_BYTES,
    Graph,
    Note,
    NoteKind,
    Op,
    Plan,
    Value,
    local_shape,
    root,
)
from planner_core.cost import block_of, cost_model_of
from planner_core.cost.memory import PeakTensor, tensors_at_peak
from planner_core.ops import operator
from planner_core.planning.planner import Planner

MIN_SHARE, MIN_BYTES = 0.02, 2**24
"""Tensors that are not in the planned memory are named from this share of a plan's peak on, and from so many bytes on."""
MAX_FILLERS = 3
FILLERS = {
    "params": "the weights",
    "optimizer": "the optimizer's states",
    "grads": "the gradients of weights",
    "activations": "what the layers keep for backward",
    "buffers": "gathered weights, and tensors of the operators at work",
}
"""What a kind of tensors at the peak is called in a sentence."""


def describe_memory(plan: Plan, graph: Graph, budget: float | None) -> str:
    """Return the largest parts of the fullest GPU's memory, in words. Example: "of 76.0 GiB, 62.0 are the logits of 10,240 tokens x 152,064
    words, 9.1 the weights and 3.2 the optimizer's states; a GPU may hold 73.3 GiB". `budget`: None where the limit is said already."""
    staged = plan.cost.pipeline is not None
    # The fullest stage is not one graph whose tensors have names, so the logits are among what its last stage keeps.
    sizes = _bytes_of_kinds(plan) if staged else _bytes_of_tensors(plan, graph)
    most = sorted(sizes.items(), key=lambda part: -part[1])[:MAX_FILLERS]
    parts = [f"{_gib(size)} {'are ' if k == 0 else ''}{name}" for k, (name, size) in enumerate(most) if size]
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
    where = " of the fullest stage" if staged else ""
    return f"of {_gib(plan.cost.memory_bytes['peak'])} GiB{where}, {listed}" + (
        "" if budget is None else f"; a GPU may hold {_gib(budget)} GiB"
    )


def _gib(num_bytes: float) -> str:
    """Write bytes in GiB with one place, from a hundred on with none."""
    return f"{num_bytes / 2**30:.{0 if num_bytes >= 100 * 2**30 else 1}f}"


def _bytes_of_kinds(plan: Plan) -> dict[str, int]:
    return {words: plan.cost.memory_bytes[kind] for kind, words in FILLERS.items() if kind in plan.cost.memory_bytes}


def _bytes_of_tensors(plan: Plan, graph: Graph) -> dict[str, int]:
    """Return the bytes at the peak, by what fills them; the logits are a part of their own."""
    sizes: dict[str, int] = {}
    shapes, losses = _logit_shapes(graph), {op.name for op in graph.top.ops if operator(op.fn).is_logits_loss}
    rows = tensors_at_peak(plan.blocks, graph, cost_model_of(plan))
    whole = next((h for h in rows if not h.block and h.shape in shapes), None)
    logits = f"the logits of {_tokens_of_logits(whole):,} tokens x {whole.shape[-1]:,} words" if whole else "the logits"
    for tensor in rows:
        of_logits = not tensor.block and (tensor.shape in shapes or tensor.op in losses)
        name = logits if of_logits else FILLERS[tensor.kind]
        sizes[name] = sizes.get(name, 0) + tensor.total_bytes
    return sizes


def note_memory(plan: Plan, planner: Planner) -> tuple[Note, ...]:
    """Return a note about what fills the memory of a plan that does not fit."""
    if plan.fits:
        return ()
    is_limit_said = any(note.kind is NoteKind.SHORTAGE for note in plan.notes)
    return (Note(describe_memory(plan, planner.graph, None if is_limit_said else planner.budget)),)


def _logit_shapes(graph: Graph) -> set[tuple[int, ...]]:
    """Return the shapes of the logits of a loss, as they are made and as the loss takes them."""
    logits = {op.inputs[0] for op in graph.top.ops if operator(op.fn).is_logits_loss}
    roots = {root(graph.top, v) for v in logits}
    casts = {op.inputs[0] for op in graph.top.ops if roots & {root(graph.top, v) for v in op.outputs}}
    every = [v for i, v in enumerate(graph.top.values) if i in logits | roots or i in casts]
    words = {v.meta.shape[-1] for i, v in enumerate(graph.top.values) if i in logits}
    return {v.meta.shape for v in every if len(v.meta.shape) > 1 and v.meta.shape[-1] in words}


def _tokens_of_logits(logits: PeakTensor) -> int:
    """Tokens whose logits one GPU holds in one tensor."""
    return max(1, logits.num_bytes // (ITEM_BYTES[logits.dtype] * logits.shape[-1]))


def note_uncounted_memory(plan: Plan, graph: Graph) -> tuple[str, ...]:
    """Return a note about the operator that takes most bytes of constants that are not in the planned memory, if these are many of the
    peak's."""
    num_bytes, op, largest = max(
        _uncounted_by_op(plan, graph), key=lambda uncounted: uncounted[0], default=(0, None, None)
    )
    if op is None or largest is None or num_bytes < max(MIN_BYTES, MIN_SHARE * plan.cost.memory_bytes["peak"]):
        return ()
    shape = " x ".join(f"{n:,}" for n in largest.meta.shape)
    return (
        f"a constant that the model computes is not in the planned memory: {num_bytes / 2**30:.2f} GiB per GPU at {op.name} alone "
        f"({largest.meta.dtype}, {shape} on all GPUs together)",
    )


def _uncounted_by_op(plan: Plan, graph: Graph) -> Iterator[tuple[int, Op, Value]]:
    """For each operator that takes such tensors: their bytes on one GPU, and the largest of them."""
    for label, plan_of_block in plan.blocks.items():
        block = block_of(graph, label)
        for op in block.ops:
            constants: dict[int, tuple[int, Value]] = {}
            for value, edge in zip(op.inputs, plan_of_block.sites[op.name].inputs, strict=True):
                operand = block.values[value]
                # The memory walk counts what the top block computes (`cost.memory.storages`).
                counted = not label and block.values[root(block, value)].computed
                if operand.kind == "constant" and not counted:
                    part = math.prod(local_shape(operand.meta.shape, edge.dst.forward, plan.mesh.axis_sizes))
                    constants[root(block, value)] = (part * ITEM_BYTES[operand.meta.dtype], operand)
            if constants:
                yield sum(n for n, _ in constants.values()), op, max(constants.values(), key=lambda f: f[0])[1]
