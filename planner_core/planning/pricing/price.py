"""Price a stated layout: search with the layout as a restriction, and price the plan that is found.

    statement -> graph of one micro-batch -> network on the layout's mesh -> forbid states -> search -> plan

A layout leaves few choices, and these are made best. Each suggestion is priced in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from planner_core.core import Cluster, Graph, Plan
from planner_core.cost import WAITED, check_offload, cost_model, exposed_parts
from planner_core.models import load_model
from planner_core.planning.fitting.micro_batches import settle
from planner_core.planning.methods import check_layout
from planner_core.planning.pipeline import choose
from planner_core.planning.pricing.speed import Speed, model_flops, speed_of
from planner_core.planning.pricing.statement import Statement, usual_attention
from planner_core.planning.request import Progress, Request
from planner_core.planning.session import STATED, Planner, prepare

COMPUTE, WAITS, TRAFFIC, OPTIMIZER, MEMORY = "compute", "waits", "weight traffic", "optimizer", "memory"


@dataclass
class Pricer:
    """Prices statements of one model on one cluster. Graphs and networks are made once."""

    model: str
    cluster: Cluster
    memory_gb: float | None = None
    say: Progress = lambda text: None
    load: Callable[..., Graph] = load_model
    graphs: dict[tuple[object, ...], Graph] = field(default_factory=dict)
    planners: dict[tuple[object, ...], Planner] = field(default_factory=dict)

    def planner(self, stated: Statement) -> Planner:
        """The planner of a statement: all that does not depend on the mesh. Raises InputError."""
        request = Request(
            self.model, cluster=self.cluster.to_json(), batch=stated.graph_batch, seq=stated.seq, optimizer=stated.optimizer,
            dtype=stated.dtype or self.cluster.gpu.training_dtype, layers=stated.layers, memory_gb=self.memory_gb,
        )  # fmt: skip
        graph = self._graph(request)
        assert request.dtype is not None
        workload = stated.workload(graph.workload["seq"], request.dtype, usual_attention(graph))
        key = (stated.graph_batch, stated.seq, request.dtype, stated.layers, workload)
        if key not in self.planners:
            made = prepare(request, graph, self.say)
            self.planners[key] = made.changed(workload=workload)
        return self.planners[key]

    def _graph(self, request: Request) -> Graph:
        """The graph of one micro-batch of a request."""
        assert request.batch is not None and request.accumulate is not None
        which = (request.batch // request.accumulate, request.seq, request.dtype, request.layers)
        if which not in self.graphs:
            self.say(f"graph of {self.model}")
            batch, seq, dtype, layers = which
            self.graphs[which] = self.load(self.model, batch=batch, seq=seq, dtype=dtype, layers=layers)
        return self.graphs[which]

    def plan(self, stated: Statement, name: str = STATED) -> Plan | None:
        """The best plan of a stated layout; None if the model's operators cannot follow the layout."""
        return self.planner(stated).of_layout(stated.layout, name)

    def speed(self, plan: Plan, stated: Statement) -> Speed:
        """The figures of a plan of a statement."""
        step = model_flops(self.planner(stated).graph) * stated.accumulate
        return speed_of(plan, step // plan.workload.get("accumulate", 1), self.cluster)

    def best(self, stated: Statement, known: Plan | None) -> Plan:
        """The best plan of a step of as many samples, its weights in buckets, over every mesh of at most two axes; or `known` if that is
        better. The number of micro-batches, recomputation and the ZeRO stage are chosen."""
        usual = self.planner(stated.but(rank_by_rank=False))
        asked = replace(
            usual.request, batch=stated.batch, accumulate=None, recompute="auto", zero=None, precision=stated.precision,
            expert_imbalance=stated.expert_imbalance, offload=stated.offload,
        )  # fmt: skip

        def as_run(planner: Planner) -> Planner:
            attention, compiled = usual.workload.attention, usual.workload.compiled
            return planner.changed(workload=replace(planner.workload, attention=attention, compiled=compiled))

        _, found = settle(asked, self._graph, choose, self.say, as_run=as_run)
        if known is None or (found.fits and not known.fits):
            return found
        better = known.fits > found.fits or known.cost.step_time_s < found.cost.step_time_s
        told = "laid out as stated, which is better than any plan on one or two axes"
        return replace(known, name=found.name, notes=(*known.notes, told)) if better else found


def check_statement(stated: Statement, cluster: Cluster) -> None:
    """Raise InputError if a statement does not suit its cluster."""
    stated.check()
    check_layout(stated.layout, cluster)
    check_offload(stated.workload(stated.seq or 1, stated.dtype or cluster.gpu.training_dtype), cluster)


def step_parts(plan: Plan, planner: Planner) -> dict[str, float]:
    """Seconds of a step by the resource for which it waits. They add up to the step's time."""
    model = cost_model(planner.cluster, plan.mesh, planner.workload)
    shown = exposed_parts(plan.blocks, planner.graph, model, planner.coarse)
    waits = sum(e.seconds for e in shown if e.why == WAITED)
    return {
        COMPUTE: plan.cost.compute_time_s, WAITS: waits, TRAFFIC: sum(e.seconds for e in shown) - waits,
        OPTIMIZER: plan.cost.optimizer_time_s,
    }  # fmt: skip


def limited_by(plan: Plan, planner: Planner) -> str:
    """The resource for which a step waits most; memory if the plan does not fit."""
    parts = step_parts(plan, planner)
    return max(parts, key=lambda what: parts[what]) if plan.fits else MEMORY
