"""The cost of a finished plan: its collectives, the step's time unit by unit, and memory along the step.

The search and this file share the formulas of single operators and collectives, and the form of the step's time. But this file
reads the plan alone and goes through it operator by operator. So a test can compare the optimum of the search's network with
the cost of the plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner_core.core import (
    ITEM_BYTES,
    Block,
    BlockPlan,
    CollectiveKind,
    Cost,
    Graph,
    Op,
    P,
    Phase,
    R,
    SitePlan,
    Step,
    Traffic,
    largest_local_shape,
)
from planner_core.cost.communication.collectives import collective_time, wire_bytes
from planner_core.cost.compute import (
    copied_seconds,
    divided_seconds,
    has_kernels,
    kept_gradient_seconds,
    kernel_seconds,
    op_time,
    optimizer_seconds,
    weight_handout_seconds,
)
from planner_core.cost.memory.deep import peak_memory
from planner_core.cost.memory.saved import Rerun, is_recomputed
from planner_core.cost.model import CostModel
from planner_core.cost.resolved_ops import block_of, local_bytes, rows_at
from planner_core.cost.step_messages import (
    OVERLAPPED,
    Message,
    message_time,
    micro_batch_messages,
    once_per_step_messages,
    plan_messages,
    recomputed_ops,
    waited_message_seconds,
)
from planner_core.cost.step_time import NUM_COMPONENTS, Component, Floats
from planner_core.cost.units import Ends, ops_at_the_ends, weights_at_the_ends
from planner_core.ops import CoarseGraph, coarsen, memory_passes

SUM_ROUNDING_SHARE = 1e-12
"""The share of a sum of seconds that may be its rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedUnit:
    """One block variant of a plan as the step's time sees it. Its numbers are those of one copy and one micro-batch.

    `copies` of the `repeats` copies of the block run so. `each` are the collectives of a micro-batch, `once` those of a step that run
    beside compute, `alone` those of a step that nothing hides. `ends` are the operators before and after all units. `optimizer_s` is the
    optimizer's time of a step. `outside_s`: the seconds of a step in which the GPU has no work; the top block has
    them.
    """

    label: str
    copies: int
    repeats: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    outside_s: float
    each: tuple[Message, ...]
    once: tuple[Message, ...]
    alone: tuple[Message, ...]
    ends: Ends

    def overlaps_compute(self, m: Message) -> bool:
        """Return whether a message of a micro-batch runs beside compute."""
        regathers = m.phase == "backward" and not m.gradient
        return (
            m.category == OVERLAPPED
            and m.site not in self.ends.before
            and not (regathers and m.site in self.ends.after)
        )


def price(blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel, coarse: CoarseGraph | None = None) -> Cost:
    """Return the cost of one training step on one GPU; all GPUs are equal in the cost model.

    Args:
        blocks: The plan of each block variant, by label ("" is the top block).
        graph: The model, with the global shapes of one micro-batch.
        model: Cluster, mesh, workload and constants.
        coarse: The operators of `graph` in groups, if they are known already.

    Returns:
        Seconds per step, traffic per mesh axis, and bytes per GPU at the peak.

    Raises:
        InputError: The plan and the graph do not belong together.
    """
    return cost_of_units(price_units(blocks, graph, model, coarse), blocks, graph, model)


def cost_of_units(
    units: Sequence[PricedUnit],
    blocks: Mapping[str, BlockPlan],
    graph: Graph,
    model: CostModel,
    memory_bytes: Mapping[str, int] | None = None,
) -> Cost:
    """Return the cost of one training step, where the units of a plan are priced already. `memory_bytes`: what `peak_memory` returned of
    the plan, if that is known."""
    traffic = sum_traffic(plan_messages(blocks, graph, model), model)
    step = step_seconds(units, model)
    compute = model.workload.accumulate * sum(u.copies * (u.forward_s + u.backward_s) for u in units)
    optimizer, outside = sum(u.copies * u.optimizer_s for u in units), sum(u.copies * u.outside_s for u in units)
    return Cost(
        step_time_s=step,
        compute_time_s=compute,
        comm_time_s=sum(t.time_s for t in traffic),
        exposed_comm_time_s=_difference_above_rounding(step, compute + optimizer + outside),
        optimizer_time_s=optimizer,
        outside_time_s=outside,
        traffic=traffic,
        memory_bytes=dict(memory_bytes or peak_memory(blocks, graph, model)),
    )


def _difference_above_rounding(whole: float, part: float) -> float:
    """Return the rest of `whole`; 0 if it is no more than the rounding of sums."""
    return 0.0 if part >= whole * (1 - SUM_ROUNDING_SHARE) else whole - part


def step_seconds(units: Iterable[PricedUnit], model: CostModel) -> float:
    """Return the seconds of the step. `model` may have other links than those for which the plan was made."""
    return sum(u.copies * float(model.step_time.seconds(unit_totals(u, model))) for u in units)


def sum_traffic(sent: Iterable[Message], model: CostModel) -> tuple[Traffic, ...]:
    """Messages summed up by phase, kind and mesh axes."""
    # Messages of different operators that are equal are priced once.
    counts: Counter[tuple[Phase, CollectiveKind, tuple[int, ...], int, float, float]] = Counter()
    for m in sent:
        counts[m.phase, m.kind, m.axes, m.num_bytes, m.share, m.load] += m.count
    traffic: dict[tuple[Phase, CollectiveKind, tuple[int, ...]], Traffic] = {}
    for (phase, kind, axes, num_bytes, share, load), count in counts.items():
        link = model.link(axes)
        seconds, algorithm = collective_time(kind, load * num_bytes, link, share)
        old = traffic.get((phase, kind, axes), Traffic(phase, kind, axes, 0, 0, 0, 0.0, algorithm))
        total = old.num_bytes + count * num_bytes
        traffic[phase, kind, axes] = Traffic(
            phase,
            kind,
            axes,
            old.count + count,
            total,
            wire_bytes(kind, total, link.size),
            old.time_s + count * seconds,
            # a row of several sizes has the algorithm that carries the most bytes
            algorithm if count * num_bytes > old.num_bytes else old.algorithm,
        )
    return tuple(sorted(traffic.values(), key=lambda t: (_PHASES[t.phase], t.axes, t.kind)))


_PHASES = {"forward": 0, "backward": 1, "optimizer": 2}


def price_units(
    blocks: Mapping[str, BlockPlan],
    graph: Graph,
    model: CostModel,
    coarse: CoarseGraph | None = None,
    ends: Ends | None = None,
) -> list[PricedUnit]:
    """Return every block variant of a plan as a unit. `ends`: the operators before and behind all units, if they are known already."""
    ends = ops_at_the_ends(coarse or coarsen(graph)) if ends is None else ends
    repeats = graph.num_repeats
    units = []
    for label, bp in blocks.items():
        block, block_ends = block_of(graph, label), Ends() if label else ends
        reruns = recomputed_ops(block, bp)
        each = [op_and_weight_seconds(block, op, bp, reruns, model) for op in block.ops]
        once = tuple(once_per_step_messages(block, bp, model))
        ends_at = weights_at_the_ends(block, block_ends.before)
        # Nothing is left to compute when the weights that the first operators read get their gradients, so their messages run alone;
        # those of all weights do in a stack that sums when backward is over.
        names = {m.weight for m in once} if model.late_sums else {block.values[i].name for i in ends_at}
        units.append(
            PricedUnit(
                label=label,
                copies=len(bp.prefixes),
                repeats=repeats.get(block.name, 1) if label else 1,
                forward_s=sum(f for f, _ in each),
                backward_s=sum(b for _, b in each),
                optimizer_s=_optimizer_seconds(block, bp, model),
                outside_s=0.0 if label else model.software.outside_s,
                each=tuple(micro_batch_messages(block, bp, model)),
                once=tuple(m for m in once if m.weight not in names),
                alone=tuple(m for m in once if m.weight in names),
                ends=block_ends,
            )
        )
    return units


def unit_totals(unit: PricedUnit, model: CostModel) -> Floats:
    """[component]: the totals of one copy, without memory."""
    c, m = Component, model.workload.accumulate
    totals = np.zeros(NUM_COMPONENTS)
    totals[c.FORWARD], totals[c.BACKWARD] = unit.forward_s, unit.backward_s
    # A row of n copies hides each copy's traffic behind its neighbour, but the first gather and the last reduction have none: one copy's
    # worth of traffic a step stays. Divided by n here, since the caller multiplies by the copies.
    ends = 0.0
    for message in unit.each:
        seconds, forward = message_time(message, model), message.phase == "forward"
        if unit.overlaps_compute(message):
            totals[c.FORWARD_TRAFFIC if forward else c.BACKWARD_TRAFFIC] += seconds
        else:
            totals[c.FORWARD if forward else c.BACKWARD] += waited_message_seconds(message, model)
        totals[c.COMMUNICATION] += m * seconds
        if message.category == OVERLAPPED and (forward or message.gradient):
            ends += seconds
    for message in unit.once:
        seconds = message_time(message, model)
        totals[c.FORWARD_ONCE if message.phase == "forward" else c.BACKWARD_ONCE] += seconds
        totals[c.COMMUNICATION] += seconds
        ends += seconds
    alone = sum(message_time(message, model) for message in unit.alone)
    totals[c.COMMUNICATION] += alone
    totals[c.STEP] = unit.optimizer_s + unit.outside_s + alone + (ends / unit.repeats if unit.repeats > 1 else 0.0)
    return totals


def _optimizer_seconds(block: Block, bp: BlockPlan, model: CostModel) -> float:
    """Return the seconds of the optimizer for one copy's own weights."""
    total = 0.0
    for value in block.values:
        param = bp.params.get(value.name) if value.kind == "parameter" and value.grad else None
        if param is not None:
            elements = math.prod(largest_local_shape(value.meta.shape, param.stored, model.sizes))
            total += float(optimizer_seconds(np.array(float(elements)), ITEM_BYTES[value.meta.dtype], model))
            holders = math.prod(model.sizes[axis] for axis in param.once_gathered_axes)
            total += float(weight_handout_seconds(np.array(float(holders)), model))
    return total


# --- compute -----------------------------------------------------------------------------------------


def op_and_weight_seconds(
    block: Block, op: Op, bp: BlockPlan, reruns: Mapping[str, Rerun], model: CostModel
) -> tuple[float, float]:
    """Return the seconds of compute, forward and backward, of one operator of one copy: the sum of `op_seconds`, `weight_seconds` and
    `conversion_seconds`."""
    forward, backward = op_seconds(block, op, bp, reruns, model)
    weights = weight_seconds(block, op, bp.sites[op.name], op.name in reruns, model)
    return forward + weights[0] + conversion_seconds(block, op, bp.sites[op.name], model), backward + weights[1]


def op_seconds(
    block: Block, op: Op, bp: BlockPlan, reruns: Mapping[str, Rerun], model: CostModel
) -> tuple[float, float]:
    """Return the seconds forward and backward of one operator of one copy. What `reruns` (see `recomputed_ops`) counts as backward."""
    forward, backward = site_time(block, op, bp.sites[op.name], model)
    return forward, backward + (forward if is_recomputed(op, reruns) else 0.0)


def site_time(block: Block, op: Op, site: SitePlan, model: CostModel) -> tuple[float, float]:
    """Return the seconds forward and backward of one op on one GPU."""
    over = memory_passes(block, model.fused)[op.name]
    axis_rows = rows_at(block, op, site)
    chunks = max(e.chunks for e in site.outputs)
    kernels = kernel_seconds(op, block.values, axis_rows, model, chunks) if has_kernels(op) else (0.0, 0.0)
    ends = [
        *zip(op.inputs, (e.dst for e in site.inputs), strict=True),
        *zip(op.outputs, (e.src for e in site.outputs), strict=True),
    ]
    sizes = [local_bytes(block, v, state.forward, model) for v, state in ends]
    moved = [sum(n * size for n, size in zip(p, sizes, strict=True)) for p in (over.forward, over.backward)]
    moved[0] += sum(
        2 * local_bytes(block, v, e.dst.forward, model)  # the parts of a result that is made in chunks are joined
        for v, e in zip(op.outputs, site.outputs, strict=True)
        if e.chunks > 1
    )
    forward, backward = op_time(op, _as_arrays(kernels), _as_arrays(moved), model)
    return float(forward[0]), float(backward[0])


def _as_arrays(pair: Sequence[float]) -> tuple[Floats, Floats]:
    """Forward and backward as arrays of one."""
    return np.array([pair[0]], dtype=np.float64), np.array([pair[1]], dtype=np.float64)


def weight_seconds(block: Block, op: Op, site: SitePlan, recomputed: bool, model: CostModel) -> tuple[float, float]:
    """Return the seconds of one micro-batch, forward and backward, that the compute stream spends on an operator's weights: copies around
    gathers and scatters, and sums of gradients."""
    forward = backward = 0.0
    for value, edge in zip(op.inputs, site.inputs, strict=True):
        v = block.values[value]
        if v.kind != "parameter":
            continue
        whole = float(local_bytes(block, value, edge.dst.forward, model))
        gathered = copied_seconds(whole if _needs_message(edge.forward, model) else 0.0, model)
        forward += gathered
        backward += gathered if recomputed or value in op.saved else 0.0
        if v.grad:
            item = ITEM_BYTES[v.meta.dtype]
            summed, updated = model.workload.gradient_item(item), model.workload.updated_item(item)
            gradient = local_bytes(block, value, edge.dst.gradient, model) / item * summed
            if _needs_message(edge.backward, model):
                backward += copied_seconds(gradient, model)
            else:
                is_sent_later = any(p == P and n > 1 for p, n in zip(edge.src.gradient, model.sizes, strict=True))
                # What is not sent at all is added to the gradient that the optimizer takes.
                stands = gradient if is_sent_later else gradient * (updated / summed)
                copied = stands if is_sent_later or updated > item else 0.0
                backward += kept_gradient_seconds(stands, copied, model)
            # By way of a part, R to S to P, nothing is divided: the last step fills up with zeros what another axis has scattered before.
            if any((step.src, step.dst) == (R, P) and model.sizes[step.axis] > 1 for step in edge.backward):
                backward += divided_seconds(gradient, model)
    return forward, backward


def _needs_message(steps: Iterable[Step], model: CostModel) -> bool:
    return any(step.collective and model.sizes[step.axis] > 1 for step in steps)


def conversion_seconds(block: Block, op: Op, site: SitePlan, model: CostModel) -> float:
    """Return the seconds to pad or divide an operand that is delivered in another state than the operator takes it."""
    total = 0.0
    for value, edge in zip(op.inputs, site.inputs, strict=True):
        if block.values[value].kind == "activation" and edge.src != edge.dst:
            total += local_bytes(block, value, edge.src.forward, model) / model.cluster.gpu.bytes_per_s
    return total
