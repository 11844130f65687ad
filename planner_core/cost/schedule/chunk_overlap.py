"""How much of a plan's communication ATP's chunk overlap would hide (Cheng et al., 2023, section 3.4).

In forward the batch is cut into chunks. The reduction of one chunk's result runs beside the GEMM of the next chunk
(`atp.chunked_time_s`). In backward the reduction of a gradient runs beside the weight-gradient GEMMs of the operators that made
it. This is an estimate beside the plan's own time. Exported scripts do not run in chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner_core.core import Block, BlockPlan, Graph, Op
from planner_core.cost.communication.atp import chunked_time_s
from planner_core.cost.communication.collectives import collective_time
from planner_core.cost.model import CostModel
from planner_core.cost.resolved_ops import block_of
from planner_core.cost.step import op_seconds
from planner_core.cost.step_messages import WAIT, Message, messages, recomputed

CHUNKS = (2, 4, 8)
REDUCTIONS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds per step that chunks hide, forward and backward, and how many chunks hide the most."""

    chunks: int
    forward_s: float
    backward_s: float


def overlap(blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel) -> Overlap:
    """The overlap with 2, 4 or 8 chunks, whichever hides most; one chunk if chunks only add latency."""
    found = [m for m in messages(blocks, graph, model) if m.category == WAIT and m.kind in REDUCTIONS]
    backward = sum(_backward(m, blocks, graph, model) for m in found if m.phase == "backward")
    best = Overlap(1, 0.0, backward)
    for chunks in CHUNKS:
        forward = sum(_forward(m, chunks, blocks, graph, model) for m in found if m.phase == "forward")
        best = Overlap(chunks, forward, backward) if forward > best.forward_s else best
    return best


def _forward(m: Message, chunks: int, blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel) -> float:
    """Seconds that are hidden of the reduction of a result, less the latencies that the chunks add."""
    if not m.what.startswith("result"):
        return 0.0
    block = block_of(graph, m.label)
    gemm, _ = _seconds(block, _op(block, m.site), blocks, m.label, model)
    whole = collective_time(m.kind, m.num_bytes, model.links[m.axis])[0]
    cut = chunks * collective_time(m.kind, m.num_bytes // chunks, model.links[m.axis])[0]
    return m.count * max(0.0, gemm + whole - chunked_time_s(gemm, cut, chunks))


def _backward(m: Message, blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel) -> float:
    """Seconds that are hidden of the reduction of a gradient: at most those of the weight-gradient GEMMs, which are taken as half
    of the backward of their operators."""
    block = block_of(graph, m.label)
    op = _op(block, m.site)
    if m.what.startswith("gradient of operand"):
        users = [op]
    elif m.what.startswith("gradient of result"):
        users = [o for o in block.ops if set(o.inputs) & set(op.outputs)]
    else:
        return 0.0
    window = sum(_seconds(block, o, blocks, m.label, model)[1] / 2 for o in users if _multiplies(block, o))
    return m.count * min(window, collective_time(m.kind, m.num_bytes, model.links[m.axis])[0])


def _multiplies(block: Block, op: Op) -> bool:
    """Whether the op has a weight matrix."""
    return any(block.values[v].kind == "parameter" and len(block.values[v].meta.shape) > 1 for v in op.inputs)


def _op(block: Block, name: str) -> Op:
    return next(o for o in block.ops if o.name == name)


def _seconds(
    block: Block, op: Op, blocks: Mapping[str, BlockPlan], label: str, model: CostModel
) -> tuple[float, float]:
    return op_seconds(block, op, blocks[label], recomputed(block, blocks[label]), model)
