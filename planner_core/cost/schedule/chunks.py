"""Products that run in chunks, so that the sum of one chunk over GPUs runs beside the product of the next.

Source: Cheng et al., "ATP: Adaptive Tensor Parallelism for Foundation Models" (2023), section 3.4. ATP cuts the batch. Here the features of
the result are cut, which a rank always has: y [tokens, 4096] is made as 4 parts [tokens, 1024]. The first is summed over the ranks (to
all, or each rank gets its share of the tokens) while the second is made, and so on. Then the parts are joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from planner_core.core import Block, BlockPlan, Edge, Graph, Op, P, Shard, SitePlan, local_shape
from planner_core.cost.model import CostModel
from planner_core.cost.resolved_ops import block_of
from planner_core.cost.step import price_units, site_time, step_seconds
from planner_core.cost.step_messages import result_messages, waited_message_seconds
from planner_core.ops import operator


def in_chunks(block: Block, bp: BlockPlan, model: CostModel) -> BlockPlan:
    """Return the plan of a block with its products in `Workload.chunks` parts, where the next operator gets the result sooner so. Results
    that are kept for recomputation are made at once."""
    if model.workload.chunks == 1:
        return bp
    sites = {op.name: bp.sites[op.name] for op in block.ops}
    cut = {op.name: _site_in_chunks(block, op, sites[op.name], model) for op in block.ops if op.name not in bp.kept}
    return replace(bp, sites=sites | cut)


def seconds_in_chunks(blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel) -> float:
    """Return the seconds of a step of a plan, if its products run in chunks where that is faster."""
    cut = {label: in_chunks(block_of(graph, label), bp, model) for label, bp in blocks.items()}
    return step_seconds(price_units(cut, graph, model), model)


def _site_in_chunks(block: Block, op: Op, site: SitePlan, model: CostModel) -> SitePlan:
    """Return the site with its product in chunks, if its result can be delivered so and is there sooner; else as it is."""
    edge, chunks = site.outputs[0], model.workload.chunks
    if not can_run_in_chunks(block, op, edge, model.sizes, chunks):
        return site
    cut = replace(site, outputs=(replace(edge, chunks=chunks),))
    # Small products take longer than one, and each part pays a latency. So a cut must win by its whole price, not by what it hides.
    seconds = [site_time(block, op, s, model)[0] + sum(_waited_seconds(block, op, s, model)) for s in (site, cut)]
    return cut if seconds[1] < seconds[0] else site


def can_run_in_chunks(block: Block, op: Op, edge: Edge, sizes: tuple[int, ...], chunks: int) -> bool:
    """Tell whether an operator can make its result in `chunks` parts of the last dim that are sent one by one along `edge`.

    Its terms must be summed over one mesh axis, into whole tensors or into parts of another dim. `sizes`: those of the mesh axes.
    """
    if not operator(op.fn).chunkable or len(edge.forward) != 1 or edge.segments:
        return False
    (step,), shape = edge.forward, block.values[op.outputs[0]].meta.shape
    features = local_shape(shape, edge.src.forward, sizes)[-1]
    # Along the features themselves the parts would be cut twice: by chunks, and by the ranks that each get a share.
    summed = step.src == P and step.dst != Shard(len(shape) - 1) and sizes[step.axis] > 1
    return summed and features % chunks == 0


def _waited_seconds(block: Block, op: Op, site: SitePlan, model: CostModel) -> Iterator[float]:
    """Yield the seconds of the redistributions of an operator's results in forward that the next operator waits for."""
    for m in result_messages(block, op, site, None, model):
        if m.phase == "forward":
            yield waited_message_seconds(m, model)
