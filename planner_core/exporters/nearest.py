"""The nearest plan that a form of tensor parallelism can hold, with its price beside that of the given plan.

It is found by the same search with a restriction. The layers that the form shards are sharded as it does. Every other weight is
Replicate on the tensor axis. The residual stream is Replicate, or sharded by tokens. The other axes shard the batch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from planner_core.core import (
    Block,
    Cluster,
    DeviceMesh,
    Graph,
    InputError,
    Plan,
    R,
    Shard,
    Value,
    axis_names,
    join_name,
)
from planner_core.cost import CostModel, block_of, cost_model, cost_model_of, local_bytes
from planner_core.cost.communication import collective_time, wire_bytes
from planner_core.exporters.tp_layout import SPLIT_DIM, TpLayout, split_site, starred
from planner_core.models import graph_of
from planner_core.ops import operator
from planner_core.planning import Planner, Request, prepare
from planner_core.planning.methods import (
    AxisRules,
    Layout,
    PairTest,
    VendorRules,
    batch_split,
    sequence_split,
    sharded,
    summed,
    used_in_parts,
    whole,
)
from planner_core.search import search
from planner_core.search.network import AxisState, Network, only

EXPERTS = {"gate_up_proj": 1, "down_proj": 2}
"""The dim of fused experts that is their inner width."""


@dataclass(frozen=True, slots=True)
class Nearest:
    """The cost of the form's plan, and of the plan itself: seconds a step, bytes sent per GPU, bytes at the peak."""

    name: str
    mesh: str
    step_time_s: float
    wire_bytes: int
    peak_bytes: int
    plan_step_time_s: float
    plan_wire_bytes: int
    plan_peak_bytes: int
    fits: bool

    def to_json(self) -> dict[str, object]:
        """The object that the command line and the explorer read."""
        return asdict(self)

    def beside(self, plan: Plan) -> Nearest:
        """The same, compared with another plan."""
        cost = plan.cost
        return replace(
            self,
            plan_step_time_s=cost.step_time_s,
            plan_wire_bytes=_sent(plan),
            plan_peak_bytes=cost.memory_bytes["peak"],
        )

    def sentence(self) -> str:
        """A sentence about the difference."""
        rows = (
            (1e3, self.step_time_s, self.plan_step_time_s, "ms a step"), (1e-9, self.wire_bytes, self.plan_wire_bytes, "GB sent per GPU"),
            (2**-30, self.peak_bytes, self.plan_peak_bytes, "GiB at the peak"),
        )  # fmt: skip
        told = [
            f"{by * here:.4g} {unit}, the plan {by * there:.4g}{_percent(here, there)}"
            for by, here, there, unit in rows
        ]
        return "; ".join(told) + ("" if self.fits else "; it does not fit")


def _percent(here: float, there: float) -> str:
    if not there:
        return ""
    change = 100 * (here / there - 1)
    return " (the same)" if abs(change) < 0.05 else f" ({change:+.1f} %)"


@dataclass
class FormRules(VendorRules):
    """The restriction to what a form does. Results that layers gather (the classes of a head) are Replicate on the tensor axis, and so
    is the loss."""

    layout: TpLayout

    def apply(self, block: str, net: Network) -> None:
        """Add factors that forbid the other states."""
        super().apply(block, net)
        where = block_of(self.graph, block)
        wide = self._gathered_widths(block, where)
        axis = self.layout.axis
        for name, states in net.tensors.items():
            meta = where.values[int(name[1:])].meta
            if where.values[int(name[1:])].kind == "activation" and meta.shape and meta.shape[-1] in wide:
                good = np.array([pair[0] != Shard(len(meta.shape) - 1) for pair in states.pairs])
                net.factors.append(only(name, good[states.index[:, axis]]))
        for name, node in net.nodes.items():
            rows = [
                [r.name for o, r in zip(node.strategy.ops, row, strict=True) if operator(o.fn).of_logits]
                for row in node.strategy.rows
            ]
            if wide and any(rows):
                good = np.array(["classes" not in names for names in rows], dtype=bool)
                net.factors.append(only(name, good[node.index[:, axis]]))

    def _gathered_widths(self, block: str, where: Block) -> set[int]:
        prefix = next((c.prefix for c in self.graph.calls() if c.block == block), "")
        return {
            where.values[op.outputs[0]].meta.shape[-1] for op in where.ops
            if op.fn == "linear" and self.layout.styles.get(join_name(prefix, split_site(op.name)[0])) == "gathered"
        }  # fmt: skip


def on_cluster(plan: Plan) -> bool:
    """Whether the plan's mesh fills its cluster. A plan that was scaled down for a few processes does not have links to price."""
    return plan.mesh.num_devices == Cluster.from_json(dict(plan.cluster)).num_gpus


def nearest(
    plan: Plan, layout: TpLayout, *, each_column: bool = False, sequence: bool = False
) -> tuple[Plan, Nearest] | None:
    """The best plan that the form can hold, and its price; None if the search finds none.

    `each_column`: every column-sharded layer sums the gradient of its input by itself.
    """
    planner = _planner(plan)
    data = sharded if _shards_data(plan, layout) else summed
    axes = range(len(plan.mesh.axis_sizes))
    rules = FormRules(
        planner.graph,
        tuple((sequence_split if sequence else whole) if a == layout.axis else batch_split for a in axes),
        tuple(_follows(planner.graph, layout) if a == layout.axis else data for a in axes),
        layout,
    )
    found = _search(planner, plan.mesh, rules, 3 if data is sharded else 0, f"{plan.name}, as this form holds it")
    if found is None:
        return None
    more_s, more_bytes = _each_column(planner, found, layout) if each_column else (0.0, 0)
    return found, _priced(plan, found, planner, more_s, more_bytes)


def by_degrees(plan: Plan, layout: TpLayout, *, sequence: bool, may_shard: int = 0) -> tuple[Plan, Nearest] | None:
    """The plan of a program that takes only degrees: every layer is sharded as in Megatron-LM, with data parallelism. If the plan
    stores weights sharded over the data axes, they have ZeRO stage `may_shard`."""
    planner = _planner(plan)
    stage = may_shard if _shards_data(plan, layout) else 0
    fsdp = layout.shards if may_shard == 3 else 1
    told = Layout(
        dp=layout.data // fsdp, fsdp=fsdp, tp=layout.size, sp=sequence and layout.size > 1, cp=layout.context,
        cp_type=layout.cp_type if layout.context > 1 else "ring", ep=layout.expert,
        zero=3 if may_shard == 3 and fsdp == 1 < layout.context else 1 if stage == 1 else 0,
    )  # fmt: skip
    try:
        found = planner.of_layout(told, "by degrees")
    except InputError:  # experts that do not go by its ranks
        return None
    return (found, _priced(plan, found, planner)) if found else None


def instead(plan: Plan) -> tuple[Plan, Nearest] | None:
    """Megatron-LM's plan on the mesh that suits it best, for a form that cannot hold the given plan at all."""
    planner = _planner(plan)
    n, node = plan.mesh.num_devices, planner.cluster.levels[0].size
    sizes = [s for s in (2, 4, 8, 16) if s <= node and n % s == 0]
    options = [DeviceMesh(axis_names(2), (n // s, s)) if s < n else DeviceMesh(axis_names(1), (n,)) for s in sizes]
    found = []
    for mesh in options:
        one = len(mesh.axis_sizes) == 1
        rules = VendorRules(
            planner.graph,
            (whole,) if one else (batch_split, whole),
            (used_in_parts,) if one else (summed, used_in_parts),
        )
        plans = _search(planner, mesh, rules, 0, "Megatron-LM")
        found += [plans] if plans else []
    best = min(found, key=lambda p: (not p.fits, p.cost.step_time_s), default=None)
    return (best, _priced(plan, best, planner)) if best else None


def without_file(plan: Plan) -> tuple[str, Nearest] | None:
    """What every trainer does without a file, and its price: data parallelism, with weights kept (DDP) or sharded (FSDP2)."""
    planner = _planner(plan)
    mesh = DeviceMesh(axis_names(1), (plan.mesh.num_devices,))
    ways = {"DDP": (summed, 0), "FSDP2": (sharded, 3)}
    found = {
        name: made for name, (weights, zero) in ways.items()
        if (made := _search(planner, mesh, AxisRules(planner.graph, (batch_split,), (weights,)), zero, name)) is not None
    }  # fmt: skip
    best = min(found, key=lambda name: (not found[name].fits, found[name].cost.step_time_s), default=None)
    return (best, _priced(plan, found[best], planner)) if best else None


def _planner(plan: Plan) -> Planner:
    load = plan.workload
    request = Request(
        str(plan.model["name"]), cluster=dict(plan.cluster), batch=load["batch"], seq=load["seq"], dtype=load["dtype"],
        optimizer=load["optimizer"], recompute=load["recompute"], accumulate=load.get("accumulate", 1), offload=bool(load.get("offload")),
    )  # fmt: skip
    return prepare(request, graph_of(plan)).changed(workload=replace(cost_model_of(plan).workload, chunks=1))


def _shards_data(plan: Plan, layout: TpLayout) -> bool:
    """Whether weights that are used whole on another axis than the tensor axis are stored in parts there."""
    params = (p for block in plan.blocks.values() for p in block.params.values())
    return any(
        isinstance(s, Shard) and a != layout.axis and (a in p.gathered or a in p.gathered_once)
        for p in params for a, s in enumerate(p.stored)
    )  # fmt: skip


def _follows(graph: Graph, layout: TpLayout) -> PairTest:
    dims: dict[int, int | None] = {}
    first = {c.block: c.prefix for c in reversed(list(graph.calls()))}
    for block in (graph.top, *graph.blocks.values()):
        for value in block.values:
            if value.kind == "parameter":
                dims[id(value)] = _dim(join_name(first.get(block.name, ""), value.name), layout)

    def follows(v: Value, pair: AxisState) -> bool:
        dim = dims.get(id(v))
        wanted = R if dim is None else Shard(dim)
        return bool(pair[0] == wanted == pair[2])

    return follows


def _dim(name: str, layout: TpLayout) -> int | None:
    """The dim along which the form shards a parameter."""
    module, _, last = name.rpartition(".")
    if module in layout.experts:
        return EXPERTS.get(last)
    style = layout.styles.get(module)
    if style is None or (last == "bias" and SPLIT_DIM[style] == 1):
        return None
    return SPLIT_DIM[style]


def _search(planner: Planner, mesh: DeviceMesh, rules: AxisRules, zero: int, name: str) -> Plan | None:
    problem = planner.problem(mesh, rules, zero=zero)
    answer = search(problem, objective="time")
    return planner.plan(problem, answer, name, "export", "time") if answer.assignment is not None else None


def _each_column(planner: Planner, found: Plan, layout: TpLayout) -> tuple[float, int]:
    """Seconds and bytes of the backward all_reduces that one sum for a shared input would save."""
    seconds, sent = 0.0, 0
    model = cost_model(planner.cluster, found.mesh, planner.workload)
    inputs = _column_inputs(planner.graph, found, model, layout)
    for group in layout.groups:
        size = inputs.get(starred(group.columns[0]), 0)
        more = len(group.columns) - 1
        seconds += more * collective_time("all_reduce", size, model.links[layout.axis])[0]
        sent += more * wire_bytes("all_reduce", size, layout.size)
    return seconds, sent


def _column_inputs(graph: Graph, found: Plan, model: CostModel, layout: TpLayout) -> dict[str, int]:
    """Bytes of the input of every linear layer on one GPU, by the layer's name."""
    sizes: dict[str, int] = {}
    for label, bp in found.blocks.items():
        block = block_of(graph, label)
        for op in (op for op in block.ops if op.fn == "linear"):
            scope = join_name(bp.prefixes[0], split_site(op.name)[0])
            sizes[starred(scope)] = local_bytes(block, op.inputs[0], bp.sites[op.name].inputs[0].dst.forward, model)
    return sizes


def _priced(plan: Plan, found: Plan, planner: Planner, more_s: float = 0.0, more_bytes: int = 0) -> Nearest:
    peak = found.cost.memory_bytes["peak"]
    return Nearest(
        found.name, str(found.mesh), found.cost.step_time_s + more_s, _sent(found) + more_bytes, peak, plan.cost.step_time_s, _sent(plan),
        plan.cost.memory_bytes["peak"], peak <= planner.budget,
    )  # fmt: skip


def _sent(plan: Plan) -> int:
    return sum(t.wire_bytes for t in plan.cost.traffic)
