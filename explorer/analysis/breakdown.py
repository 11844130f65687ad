"""Breaks a plan's figures into parts: the compute of every operation, every collective, everything that the step waits for. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from planner_core.core import Graph, Plan
from planner_core.cost import (
    Message,
    block_of,
    conversion_seconds,
    cost_model_of,
    exposed_parts,
    op_seconds,
    plan_messages,
    recomputed_ops,
    weight_seconds,
)
from planner_core.cost.communication import algorithms, wire_bytes


@dataclass(frozen=True, slots=True)
class OpTime:
    """Compute of one op in one copy of its block and one micro-batch; seconds on one GPU.

    `pads_s`: padding and dividing its operands, copying its gathered weights and adding up their gradients. `copies`: runs in a step.
    """

    op: str
    block: str
    copies: int
    forward_s: float
    backward_s: float
    pads_s: float

    @property
    def total_s(self) -> float:
        """The seconds of all copies."""
        return self.copies * (self.forward_s + self.backward_s + self.pads_s)


@dataclass(frozen=True, slots=True)
class ExposedWait:
    """Communication of all copies that the step waits for, at an op or for a weight."""

    where: str
    block: str
    why: str
    seconds: float


def op_times(plan: Plan, graph: Graph) -> list[OpTime]:
    """Return the compute of every op; the totals add up to the plan's compute time."""
    model = cost_model_of(plan)
    times = []
    for label, bp in plan.blocks.items():
        block = block_of(graph, label)
        repeated = recomputed_ops(block, bp)
        for op in block.ops:
            forward, backward = op_seconds(block, op, bp, repeated, model)
            padding_s = conversion_seconds(block, op, bp.sites[op.name], model)
            padding_s += sum(weight_seconds(block, op, bp.sites[op.name], op.name in repeated, model))
            times.append(
                OpTime(op.name, label, len(bp.prefixes) * model.workload.accumulate, forward, backward, padding_s)
            )
    return times


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """One collective of the plan with its price; `each_s` is that of its cheapest algorithm (see `Algorithm`)."""

    message: Message
    wire_bytes: int
    algorithm: str
    fixed_s: float
    s_per_byte: float
    each_s: float


def collective_times(plan: Plan, graph: Graph) -> list[CollectiveTime]:
    """Return every collective; times of all copies add up to the plan's communication, bytes to what it sends."""
    model = cost_model_of(plan)
    times = []
    for m in plan_messages(plan.blocks, graph, model):
        link = model.link(m.axes)
        if link.size == 1 or m.num_bytes <= 0:
            continue
        best = min(algorithms(m.kind, link), key=lambda a: a.seconds(m.num_bytes))
        wire_size = wire_bytes(m.kind, m.num_bytes, link.size)
        # A weight is a part of its bucket's message: a quarter of the bucket takes a quarter of its seconds, latency included.
        each_s = m.share * best.seconds(m.num_bytes / m.share)
        times.append(CollectiveTime(m, wire_size, best.name, best.fixed_s, best.s_per_byte, each_s))
    return times


def exposed_waits(plan: Plan, graph: Graph) -> list[ExposedWait]:
    """Return the communication that is not hidden, longest first; it adds up to the plan's exposed communication."""
    waits = [
        ExposedWait(e.site, e.label, f"{e.what}, {e.phase}: {e.cause}", e.seconds)
        for e in exposed_parts(plan.blocks, graph, cost_model_of(plan))
    ]
    return sorted(waits, key=lambda w: -w.seconds)
