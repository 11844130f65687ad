"""What a stated layout takes: the planner's own price of the plan that it finds when only this layout is left.

    statement -> graph of one micro-batch -> network on the layout's mesh -> states the layout forbids -> search -> plan

A layout leaves hardly any choice, and what it leaves is chosen best. The same goes for each suggestion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from planner_core.core import Block, Cluster, Graph, Op, Plan
from planner_core.cost import WAITED, cost_model, exposed_parts
from planner_core.models import load_model
from planner_core.ops import Kind, operator
from planner_core.planning.methods import Layout, check_layout
from planner_core.planning.pipeline import choose
from planner_core.planning.pricing.speed import Speed, model_flops, speed_of
from planner_core.planning.pricing.statement import Statement
from planner_core.planning.request import Progress, Request
from planner_core.planning.session import Planner, meshes, prepare
from planner_core.search import search

COMPUTE, WAITS, TRAFFIC, OPTIMIZER, MEMORY = "compute", "waits", "weight traffic", "optimizer", "memory"
STATED = "our current setup"


@dataclass
class Pricer:
    """Prices statements of one model on one cluster; graphs and networks are made once."""

    model: str
    cluster: Cluster
    memory_gb: float | None = None
    say: Progress = lambda text: None
    load: Callable[..., Graph] = load_model
    graphs: dict[tuple[object, ...], Graph] = field(default_factory=dict)
    planners: dict[tuple[object, ...], Planner] = field(default_factory=dict)

    def planner(self, stated: Statement) -> Planner:
        """Everything about a statement that does not depend on the mesh. Raises InputError."""
        request = Request(
            self.model, cluster=self.cluster.to_json(), batch=stated.graph_batch, seq=stated.seq, optimizer=stated.optimizer,
            dtype=stated.dtype or self.cluster.gpu.training_dtype, layers=stated.layers, memory_gb=self.memory_gb,
        )  # fmt: skip
        which = (stated.graph_batch, stated.seq, request.dtype, stated.layers)
        if which not in self.graphs:
            self.say(f"graph of {self.model}")
            self.graphs[which] = self.load(
                self.model, batch=stated.graph_batch, seq=stated.seq, dtype=request.dtype, layers=stated.layers
            )
        graph = self.graphs[which]
        assert request.dtype is not None
        workload = stated.workload(graph.workload["seq"], request.dtype)
        key = (*which, workload)
        if key not in self.planners:
            made = prepare(request, graph, self.say)
            self.planners[key] = replace(made, workload=workload, networks={}, problems={})
        return self.planners[key]

    def plan(self, stated: Statement, name: str = STATED) -> Plan | None:
        """The best plan of a stated layout; None where the model's operators cannot follow it."""
        return plan_of_layout(self.planner(stated), stated.layout, name)

    def speed(self, plan: Plan, stated: Statement) -> Speed:
        """The figures of a plan of a statement."""
        return speed_of(plan, model_flops(self.planner(stated).graph), self.cluster)

    def best(self, stated: Statement, known: Plan | None) -> Plan:
        """The planner's own plan of the same workload, over every mesh of at most two axes; `known` if that is better."""
        planner = self.planner(stated)
        options = meshes(planner.request, planner.cluster)
        found = choose(planner, options, self.say)
        if known is None or (found.fits and not known.fits):
            return found
        better = known.fits > found.fits or known.cost.step_time_s < found.cost.step_time_s
        told = "laid out as stated, which is better than any plan on one or two axes"
        return replace(known, name=found.name, notes=(*known.notes, told)) if better else found


def plan_of_layout(planner: Planner, layout: Layout, name: str = STATED) -> Plan | None:
    """The plan of a layout that fits if one does; None where there is none at all."""
    problem = planner.problem(
        layout.mesh(), layout.restriction(planner.graph), stages=layout.stages, joined=layout.joined
    )
    if problem.impossible:
        return None
    answer = planner.solve(problem, "time")
    if answer.assignment is None:
        answer = search(problem, objective="time")
    return None if answer.assignment is None else planner.plan(problem, answer, name, "layout", "time")


def check_statement(stated: Statement, cluster: Cluster) -> None:
    """Raises InputError for what cannot be stated of a cluster."""
    stated.check()
    check_layout(stated.layout, cluster)


# --- why a layout is not legal, and what limits one that is -----------------------------------------------------


def reasons(graph: Graph, layout: Layout) -> list[str]:
    """Why the model's operators cannot follow a layout."""
    found = dict.fromkeys(_reasons(graph, layout))
    return list(found) or [f"no way to run every operator of this model follows {layout}; try other degrees"]


def _reasons(graph: Graph, layout: Layout) -> Iterator[str]:
    tp = layout.tp
    for block, op in _ops(graph):
        if operator(op.fn).kind is not Kind.ATTENTION:
            continue
        shapes = [block.values[v].meta.shape for v in op.inputs[:2]]
        for shape, what in zip(shapes, ("attention heads", "key and value heads"), strict=True):
            heads = shape[-3] if len(shape) > 3 else 1
            if heads % tp:
                yield f"{heads} {what} cannot be dealt to tp={tp} ranks; give a divisor of {heads}"
    if layout.sp and graph.workload["seq"] % tp:
        yield f"a sequence of {graph.workload['seq']} tokens cannot be split over tp={tp} ranks; give a divisor"


def _ops(graph: Graph) -> Iterator[tuple[Block, Op]]:
    for block in (graph.top, *graph.blocks.values()):
        yield from ((block, op) for op in block.ops)


def step_parts(plan: Plan, planner: Planner) -> dict[str, float]:
    """Seconds of a step that each resource is waited for: they add up to the step's time."""
    model = cost_model(planner.cluster, plan.mesh, planner.workload)
    shown = exposed_parts(plan.blocks, planner.graph, model, planner.coarse)
    waits = sum(e.seconds for e in shown if e.why == WAITED)
    return {
        COMPUTE: plan.cost.compute_time_s, WAITS: waits, TRAFFIC: sum(e.seconds for e in shown) - waits,
        OPTIMIZER: plan.cost.optimizer_time_s,
    }  # fmt: skip


def limited_by(plan: Plan, planner: Planner) -> str:
    """What most of a step waits for; memory where the plan does not fit."""
    parts = step_parts(plan, planner)
    return max(parts, key=lambda what: parts[what]) if plan.fits else MEMORY
