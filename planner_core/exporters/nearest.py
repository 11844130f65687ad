"""The nearest plan that a form of tensor parallelism can hold, with its price beside that of the given plan.

It is found by the same search with a restriction. The layers that the form shards are sharded as it does. Every other weight is
Replicate on the tensor axis. The residual stream is Replicate, or sharded by tokens. The other axes shard the batch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from planner_core.core import (
    Cluster,
    DeviceMesh,
    InputError,
    Plan,
    axis_names,
)
from planner_core.cost import cost_model_of
from planner_core.models import load_plan_graph
from planner_core.planning import Planner, Request, as_told, prepare, shards_data
from planner_core.planning.methods import (
    AxisRules,
    Layout,
    TpLayout,
    VendorRules,
    batch_split,
    sharded,
    summed,
    used_in_parts,
    whole,
)
from planner_core.search import search_within_budget


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
            (1e3, self.step_time_s, self.plan_step_time_s, "ms a step"),
            (1e-9, self.wire_bytes, self.plan_wire_bytes, "GB sent per GPU"),
            (2**-30, self.peak_bytes, self.plan_peak_bytes, "GiB at the peak"),
        )
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


def on_cluster(plan: Plan) -> bool:
    """Whether the plan's mesh fills its cluster. A plan that was scaled down for a few processes does not have links to price."""
    return plan.mesh.num_devices == Cluster.from_json(dict(plan.cluster)).num_gpus


def nearest(
    plan: Plan, layout: TpLayout, *, each_column: bool = False, sequence: bool = False, stage: int | None = None
) -> tuple[Plan, Nearest] | None:
    """The best plan that the form can hold, and its price; None if the search finds none.

    `each_column`: every column-sharded layer sums the gradient of its input by itself. `stage`: the ZeRO stage that the form tells its
    program for the data axes; None: a trainer gathers weights at use there if the plan does (FSDP2), and keeps all states whole if not
    (DDP), as `parallelize_module.remarks_of` says.
    """
    planner = _planner(plan)
    stage = (3 if layout.shards > 1 else 0) if stage is None else stage
    found = as_told(planner, plan, layout, each_column, stage=stage, sequence=sequence)
    if found is None:
        return None
    found = replace(found, name=f"{plan.name}, as this form holds it", method="export")
    return found, _priced(plan, found, planner)


def by_degrees(plan: Plan, layout: TpLayout, *, sequence: bool, may_shard: int = 0) -> tuple[Plan, Nearest] | None:
    """The plan of a program that takes only degrees: every layer is sharded as in Megatron-LM, with data parallelism. If the plan
    stores weights sharded over the data axes, they have ZeRO stage `may_shard`."""
    planner = _planner(plan)
    stage = may_shard if shards_data(plan, layout) else 0
    fsdp = layout.shards if may_shard == 3 else 1
    told = Layout(
        dp=layout.data // fsdp,
        fsdp=fsdp,
        tp=layout.size,
        sp=sequence and layout.size > 1,
        cp=layout.context,
        cp_type=layout.cp_type if layout.context > 1 else "ring",
        ep=layout.expert,
        zero=3 if may_shard == 3 and fsdp == 1 < layout.context else 1 if stage == 1 else 0,
    )
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
            ranks=1 if one else mesh.axis_sizes[0],
        )
        plans = _search(planner, mesh, rules, 0, "Megatron-LM")
        found += [plans] if plans else []
    best = min(found, key=lambda p: (not p.fits, p.cost.step_time_s), default=None)
    return (best, _priced(plan, best, planner)) if best else None


def without_file(plan: Plan) -> tuple[str, Nearest] | None:
    """The layout that every trainer runs without a file, and its price: data parallelism, with weights kept (DDP) or sharded (FSDP2)."""
    planner = _planner(plan)
    mesh = DeviceMesh(axis_names(1), (plan.mesh.num_devices,))
    ways = {"DDP": (summed, 0), "FSDP2": (sharded, 3)}
    found = {
        name: made
        for name, (weights, zero) in ways.items()
        if (made := _search(planner, mesh, AxisRules(planner.graph, (batch_split,), (weights,)), zero, name))
        is not None
    }
    best = min(found, key=lambda name: (not found[name].fits, found[name].cost.step_time_s), default=None)
    return (best, _priced(plan, found[best], planner)) if best else None


def _planner(plan: Plan) -> Planner:
    load = plan.workload
    request = Request(
        str(plan.model["name"]),
        cluster=dict(plan.cluster),
        batch=load["batch"],
        seq=load["seq"],
        dtype=load["dtype"],
        optimizer=load["optimizer"],
        recompute=load["recompute"],
        accumulate=load.get("accumulate", 1),
        offload=bool(load.get("offload")),
    )
    return prepare(request, load_plan_graph(plan)).changed(workload=replace(cost_model_of(plan).workload, chunks=1))


def _search(planner: Planner, mesh: DeviceMesh, rules: AxisRules, zero: int, name: str) -> Plan | None:
    problem = planner.problem(mesh, rules, zero=zero)
    answer = search_within_budget(problem, objective="time")
    return planner.plan(problem, answer, name, "export", "time") if answer.assignment is not None else None


def _priced(plan: Plan, found: Plan, planner: Planner) -> Nearest:
    peak = found.cost.memory_bytes["peak"]
    return Nearest(
        found.name,
        str(found.mesh),
        found.cost.step_time_s,
        _sent(found),
        peak,
        plan.cost.step_time_s,
        _sent(plan),
        plan.cost.memory_bytes["peak"],
        peak <= planner.budget,
    )


def _sent(plan: Plan) -> int:
    return sum(t.wire_bytes for t in plan.cost.traffic)
