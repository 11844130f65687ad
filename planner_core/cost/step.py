"""What a plan takes: every collective counted, times added up, memory walked. Reads the plan alone, not the search.

Search and price share the formulas of single moves and ops, but this file goes through the finished plan op by
op, so that a test can hold the optimum of the network against the price of the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner_core.core import (
    ITEM_BYTES,
    Block,
    BlockPlan,
    Call,
    Cost,
    Edge,
    Graph,
    InputError,
    Op,
    Placements,
    R,
    Shard,
    SitePlan,
    Step,
    Traffic,
)
from planner_core.cost.communication.collectives import collective_time, wire_bytes
from planner_core.cost.communication.redistribution import step_bytes
from planner_core.cost.compute.roofline import op_time, op_work
from planner_core.cost.memory.peak import walk
from planner_core.cost.memory.saved import run_again
from planner_core.cost.model import CostModel
from planner_core.cost.resolved_ops import local_bytes, rows_at, split_parts
from planner_core.ops import CoarseBlock, CoarseGraph, coarsen_block, looked_up

WAIT, HIDE = "wait", "hide"
"""Traffic that the next op waits for, and weight traffic that can hide behind compute."""


@dataclass(frozen=True, slots=True)
class Message:
    """One collective of one op: where it comes from, so that a total can be opened to its parts."""

    site: str
    what: str
    phase: str
    kind: str
    axis: int
    num_bytes: int
    count: int
    category: str
    label: str = ""
    weight: str = ""


def block_of(graph: Graph, label: str) -> Block:
    """The block that a plan's label means; raises InputError for a label the model does not have."""
    name = label.partition("#")[0]
    if not name:
        return graph.top
    if name not in graph.blocks:
        raise InputError(f"the plan has a block {name!r} that the model {graph.name} does not; plan this model again")
    return graph.blocks[name]


def price(
    blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel, coarse: CoarseGraph | None = None
) -> Cost:  # fmt: skip
    """Cost of one training step on the fullest GPU (all GPUs are alike here). `coarse` spares coarsening `graph` again."""
    compute = sum(compute_time(graph, label, bp, model) * len(bp.prefixes) for label, bp in blocks.items())
    found = list(messages(blocks, graph, model))
    traffic: dict[tuple[str, str, int], Traffic] = {}
    counts: Counter[tuple[str, str, int, int]] = Counter()
    for m in found:
        counts[m.phase, m.kind, m.axis, m.num_bytes] += m.count
    for (phase, kind, axis, num_bytes), count in counts.items():
        seconds, algorithm = collective_time(kind, num_bytes, model.links[axis])
        wire = wire_bytes(kind, num_bytes, model.sizes[axis])
        old = traffic.get((phase, kind, axis), Traffic(phase, kind, axis, 0, 0, 0, 0.0, algorithm))
        traffic[phase, kind, axis] = Traffic(
            phase, kind, axis, old.count + count, old.num_bytes + count * num_bytes, old.wire_bytes + count * wire,
            old.time_s + count * seconds, algorithm if count * num_bytes > old.num_bytes else old.algorithm,
        )  # fmt: skip
    comm = sum(t.time_s for t in traffic.values())
    shown = exposed(found, blocks, graph, model, coarse)
    return Cost(
        compute + shown, compute, comm, shown, tuple(sorted(traffic.values(), key=_order)), walk(blocks, graph, model)
    )


def exposed(
    found: Iterable[Message], blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel, coarse: CoarseGraph | None = None
) -> float:  # fmt: skip
    """Seconds of communication that show: all that an op waits for, and what of a weight's traffic exceeds `overlap`
    of the compute of the ops that use it."""
    found = list(found)
    waited = sum(message_time(m, model) for m in found if m.category == WAIT)
    return waited + sum(w.exposed_s for w in weight_traffic(found, blocks, graph, model, coarse))


def message_time(m: Message, model: CostModel) -> float:
    """Seconds of all copies of a message."""
    return m.count * collective_time(m.kind, m.num_bytes, model.links[m.axis])[0]


@dataclass(frozen=True, slots=True)
class WeightTraffic:
    """The messages of one weight, of all copies of its block, and the seconds behind which they hide.

    `group` is the op group that uses the weight, empty where several do (then nothing hides).
    """

    label: str
    group: str
    weight: str
    forward_s: float
    backward_s: float
    window_s: float

    @property
    def exposed_s(self) -> float:
        """What shows."""
        return max(0.0, self.forward_s + self.backward_s - self.window_s)


def weight_traffic(
    found: Iterable[Message], blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel, coarse: CoarseGraph | None = None
) -> list[WeightTraffic]:  # fmt: skip
    """The traffic of every weight, and what it hides behind."""
    weights: dict[tuple[str, str, str], list[float]] = {}
    known = {"": coarse.top, **coarse.blocks} if coarse else {}
    leaders = {
        name: _leaders(known.get(name) or coarsen_block(block_of(graph, name)))
        for name in {label.partition("#")[0] for label in blocks}
    }
    lead = {label: leaders[label.partition("#")[0]] for label in blocks}
    again = {label: recomputed(block_of(graph, label), bp) for label, bp in blocks.items()}
    for m in found:
        if m.category != WAIT:
            users = lead[m.label].users(m.weight)
            group = lead[m.label].group.get(m.site) or (users[0] if len(users) == 1 else "")
            both = weights.setdefault((m.label, group, m.weight), [0.0, 0.0])
            both[m.phase != "forward"] += message_time(m, model)
    rows = []
    for (label, group, weight), (forward, backward) in weights.items():
        window = 0.0
        if group:
            block = block_of(graph, label)
            window = model.overlap * len(blocks[label].prefixes) * sum(
                sum(op_seconds(block, op, blocks[label], again[label], model)) for op in lead[label].members[group]
            )  # fmt: skip
        rows.append(WeightTraffic(label, group, weight, forward, backward, window))
    return rows


@dataclass(frozen=True, slots=True)
class _Leaders:
    """Groups of a block: op name -> group, group -> ops, and parameter -> groups that use it."""

    group: Mapping[str, str]
    members: Mapping[str, tuple[Op, ...]]
    used_by: Mapping[str, tuple[str, ...]]

    def users(self, weight: str) -> tuple[str, ...]:
        return self.used_by.get(weight, ())


def _leaders(coarse: CoarseBlock) -> _Leaders:
    block = coarse.block
    members = {g.name: tuple(op for i in g.items if isinstance(op := block.items[i], Op)) for g in coarse.groups}
    group = {op.name: name for name, ops in members.items() for op in ops}
    used: dict[str, list[str]] = {}
    for name, ops in members.items():
        for weight in {block.values[v].name for op in ops for v in op.inputs if block.values[v].kind == "parameter"}:
            used.setdefault(weight, []).append(name)
    for item in block.items:
        for v in item.inputs if isinstance(item, Call) else ():
            if block.values[v].kind == "parameter":
                used.setdefault(block.values[v].name, []).extend(("", ""))  # called blocks use it too
    return _Leaders(group, members, {w: tuple(g) for w, g in used.items()})


def op_seconds(block: Block, op: Op, bp: BlockPlan, again: Mapping[str, bool], model: CostModel) -> tuple[float, float]:
    """Seconds forward and backward of one op of one copy; what runs `again` (see `recomputed`) counts as backward."""
    forward, backward = site_time(block, op, bp.sites[op.name], model)
    return forward, backward + (forward if op.name in again else 0.0)


def recomputed(block: Block, bp: BlockPlan) -> Mapping[str, bool]:
    """Ops of a block that run again in backward, and whether their results are sent again."""
    return run_again(block) if bp.recompute == "full" else {}


def _order(t: Traffic) -> tuple[str, int, str]:
    return {"forward": "0", "backward": "1", "optimizer": "2"}[t.phase], t.axis, t.kind


# --- compute -----------------------------------------------------------------------------------------


def compute_time(graph: Graph, label: str, bp: BlockPlan, model: CostModel) -> float:
    """Seconds of compute of one copy of a block, forward and backward (and recomputation)."""
    block = block_of(graph, label)
    again = recomputed(block, bp)
    total = 0.0
    for op in block.ops:
        total += sum(op_seconds(block, op, bp, again, model)) + touch_time(block, op, bp.sites[op.name], model)
    return total


def site_time(block: Block, op: Op, site: SitePlan, model: CostModel) -> tuple[float, float]:
    """Seconds forward and backward of one op on one GPU."""
    parts = split_parts(block, op, site, model)
    ends = [
        *zip(op.inputs, (e.dst for e in site.inputs), strict=True),
        *zip(op.outputs, (e.src for e in site.outputs), strict=True),
    ]
    table = looked_up(op)  # its rows are as many bytes as the result
    num_bytes = sum(local_bytes(block, v, state.forward, model) for i, (v, state) in enumerate(ends) if i != table)
    forward, backward = op_time(op_work(op, block.values), np.array([parts]), np.array([float(num_bytes)]), model)
    return float(forward[0]), float(backward[0])


def touch_time(block: Block, op: Op, site: SitePlan, model: CostModel) -> float:
    """Padding or dividing an operand that arrives in another state than the op runs with."""
    total = 0.0
    for value, edge in zip(op.inputs, site.inputs, strict=True):
        if block.values[value].kind == "activation" and edge.src != edge.dst:
            total += local_bytes(block, value, edge.src.forward, model) / model.cluster.gpu.bytes_per_s
    return total


# --- messages ----------------------------------------------------------------------------------------


def messages(blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel) -> Iterator[Message]:
    """Every collective of one step; those of a repeated block once, with the number of its copies as count."""
    for label, bp in blocks.items():
        block = block_of(graph, label)
        again = recomputed(block, bp)
        for op in block.ops:
            for m in _site_messages(block, op, bp.sites[op.name], again, model):
                yield replace(m, count=m.count * len(bp.prefixes), label=label)
        for m in _sync_messages(block, bp, model):
            yield replace(m, label=label)


def _site_messages(
    block: Block, op: Op, site: SitePlan, rerun: Mapping[str, bool], model: CostModel
) -> Iterator[Message]:
    again = op.name in rerun
    for position, (value, edge) in enumerate(zip(op.inputs, site.inputs, strict=True)):
        v = block.values[value]
        weight = v.kind == "parameter"
        category = HIDE if weight else WAIT
        what = v.name if weight else f"operand {position}"
        there = list(_steps(block, value, edge, edge.forward, edge.src.forward, model))
        regather = weight and v.grad and value in op.saved
        for phase, moves in (("forward", there), ("backward", there if regather or again else [])):
            yield from (
                Message(op.name, what, phase, kind, axis, n, 1, category, "", v.name) for kind, axis, n in moves
            )
        for kind, axis, n in _steps(block, value, edge, edge.backward, edge.dst.gradient, model):
            yield Message(op.name, f"gradient of {what}", "backward", kind, axis, n, 1, category, "", v.name)
    for position, (value, edge) in enumerate(zip(op.outputs, site.outputs, strict=True)):
        there = list(_steps(block, value, edge, edge.forward, edge.src.forward, model))
        for phase, moves in (("forward", there), ("backward", there if rerun.get(op.name) else [])):
            yield from (
                Message(op.name, f"result {position}", phase, kind, axis, n, 1, WAIT) for kind, axis, n in moves
            )
        for kind, axis, n in _steps(block, value, edge, edge.backward, edge.dst.gradient, model):
            yield Message(op.name, f"gradient of result {position}", "backward", kind, axis, n, 1, WAIT)
    yield from _internal_messages(block, op, site, model, again)


def _internal_messages(block: Block, op: Op, site: SitePlan, model: CostModel, again: bool) -> Iterator[Message]:
    chosen = rows_at(block, op, site)
    for axis, row in enumerate(chosen):
        for c in row.internal if model.sizes[axis] > 1 else ():
            others = int(
                np.prod(
                    [
                        n
                        for a, (r, n) in enumerate(zip(chosen, model.sizes, strict=True))
                        if a != axis and r.label in c.shrinks
                    ],
                    dtype=int,
                )
            )
            phases = (c.phase, "backward") if again and c.phase == "forward" else (c.phase,)
            for phase in phases:
                yield Message(op.name, f"inside {op.fn}", phase, c.kind, axis, c.num_bytes // others, c.count, WAIT)


def _steps(
    block: Block, value: int, edge: Edge, steps: tuple[Step, ...], start: Placements, model: CostModel
) -> Iterator[tuple[str, int, int]]:
    """(kind, axis, bytes) of the steps that send messages."""
    meta = block.values[value].meta
    here = list(start)
    for step in steps:
        if step.collective and model.sizes[step.axis] > 1:
            yield (
                step.collective,
                step.axis,
                step_bytes(meta.shape, ITEM_BYTES[meta.dtype], tuple(here), step.axis, model.sizes),
            )
        here[step.axis] = step.dst


def _sync_messages(block: Block, bp: BlockPlan, model: CostModel) -> Iterator[Message]:
    by_name = {v.name: i for i, v in enumerate(block.values) if v.kind == "parameter" and i not in block.inputs}
    for name, param in bp.params.items():
        if name not in by_name:
            raise InputError(
                f"the plan places a parameter {name!r} that the model does not have; plan this model again"
            )
        value = by_name[name]
        stored = tuple(p if isinstance(p, Shard) else R for p in param.stored)
        for axis in param.sync:
            if model.sizes[axis] > 1:
                n = local_bytes(block, value, stored, model)
                yield Message(name, "gradient sum", "backward", "all_reduce", axis, n, len(bp.prefixes), HIDE, "", name)
