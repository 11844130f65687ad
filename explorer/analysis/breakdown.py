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
    messages,
    op_seconds,
    recomputed_ops,
    weight_seconds,
)
from planner_core.cost.communication import algorithms, wire_bytes


@dataclass(frozen=True, slots=True)
class OpTime:
    """Compute of one op in one copy of its block and one micro-batch; seconds on one GPU. `pads_s`: padding and dividing
    its operands, copying its gathered weights and adding up their gradients. `copies` counts how often it runs in a step."""

    op: str
    block: str
    copies: int
    forward_s: float
    backward_s: float
    pads_s: float

    @property
    def total_s(self) -> float:
        """Of all copies."""
        return self.copies * (self.forward_s + self.backward_s + self.pads_s)


@dataclass(frozen=True, slots=True)
class ExposedWait:
    """Communication of all copies that the step waits for, at an op or for a weight."""

    where: str
    block: str
    why: str
    seconds: float


def op_times(plan: Plan, graph: Graph) -> list[OpTime]:
    """Every op; the totals add up to the plan's compute time."""
    model = cost_model_of(plan)
    found = []
    for label, bp in plan.blocks.items():
        block = block_of(graph, label)
        again = recomputed_ops(block, bp)
        for op in block.ops:
            forward, backward = op_seconds(block, op, bp, again, model)
            pads = conversion_seconds(block, op, bp.sites[op.name], model)
            pads += sum(weight_seconds(block, op, bp.sites[op.name], op.name in again, model))
            found.append(OpTime(op.name, label, len(bp.prefixes) * model.workload.accumulate, forward, backward, pads))
    return found


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """One collective of the plan with its price: `each_s` is that of its cheapest algorithm (see `Algorithm`)."""

    message: Message
    wire_bytes: int
    algorithm: str
    fixed_s: float
    s_per_byte: float
    each_s: float


def collective_times(plan: Plan, graph: Graph) -> list[CollectiveTime]:
    """Every collective; times of all copies add up to the plan's communication, bytes to what it sends."""
    model = cost_model_of(plan)
    found = []
    for m in messages(plan.blocks, graph, model):
        link = model.links[m.axis]
        if link.size == 1 or m.num_bytes <= 0:
            continue
        best = min(algorithms(m.kind, link), key=lambda a: a.seconds(m.num_bytes))
        wire = wire_bytes(m.kind, m.num_bytes, link.size)
        each = m.share * best.seconds(m.num_bytes / m.share)
        found.append(CollectiveTime(m, wire, best.name, best.fixed_s, best.s_per_byte, each))
    return found


def exposed_waits(plan: Plan, graph: Graph) -> list[ExposedWait]:
    """The communication that is not hidden, longest first; the seconds add up to the plan's exposed communication."""
    found = [
        ExposedWait(e.site, e.label, f"{e.what}, {e.phase}: {e.why}", e.seconds)
        for e in exposed_parts(plan.blocks, graph, cost_model_of(plan))
    ]
    return sorted(found, key=lambda w: -w.seconds)
