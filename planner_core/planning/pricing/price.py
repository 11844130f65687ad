"""Price a stated layout: search with the layout as a restriction, and price the plan that is found.

    statement -> graph of one micro-batch -> network on the layout's mesh -> forbid states -> search -> plan

A layout leaves few choices, and these are made best. Each suggestion is priced in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from planner_core.core import PUBLISHED_STACKS, SOFTWARE, Cluster, Graph, InputError, Plan, Software
from planner_core.cost import WAITED, check_offload, cost_model, exposed_parts, with_host
from planner_core.models import VOCABULARY, has_own_inputs, load_model, with_adapters, with_config
from planner_core.planning.fitting.micro_batches import choose_micro_batches
from planner_core.planning.methods import Layout, check_layout
from planner_core.planning.pricing.speed import Speed, model_flops, speed_of
from planner_core.planning.pricing.statement import Statement
from planner_core.planning.request import Progress, Request
from planner_core.planning.session import STATED, Planner, prepare

OWN_DTYPE = "own"
"""Stands for the dtype that a model with example inputs has, until it is known."""
COMPUTE, WAITS, TRAFFIC, OPTIMIZER, MEMORY = "compute", "waits", "weight traffic", "optimizer", "memory"
BUBBLE, OUTSIDE, HOST = "bubble", "outside", "host"


@dataclass
class Pricer:
    """Prices statements of one model on one cluster. Graphs and networks are made once.

    `given`: the model comes with example inputs, which fix the samples and tokens of a micro-batch and its dtype (None: as its name
    says)."""

    model: str
    cluster: Cluster
    memory_gb: float | None = None
    say: Progress = lambda text: None
    load: Callable[..., Graph] = load_model
    graphs: dict[tuple[object, ...], Graph] = field(default_factory=dict)
    planners: dict[tuple[object, ...], Planner] = field(default_factory=dict)
    given: bool | None = None

    def __post_init__(self) -> None:
        self.given = has_own_inputs(self.model) if self.given is None else self.given

    def usual_micro_batch(self, layout: Layout) -> int:
        """The samples of a rank's micro-batch where none are stated: those of the example inputs, else 1. Raises InputError."""
        if not self.given:
            return 1
        graph = self._as_given(None)
        batch = graph.workload["batch"]
        if batch % layout.data:
            raise InputError(
                f"the example inputs of {graph.name} have {_samples(batch)}, which cannot be dealt to the {layout.data} data-parallel "
                f"ranks of {layout}; give inputs of {layout.data} samples or a multiple"
            )
        return batch // layout.data

    def planner(self, stated: Statement) -> Planner:
        """The planner of a statement: all that does not depend on the mesh. Raises InputError."""
        request = Request(
            self.model,
            cluster=self.cluster.to_json(),
            batch=stated.graph_batch,
            seq=stated.seq,
            optimizer=stated.optimizer,
            dtype=stated.dtype or (None if self.given else self.cluster.gpu.training_dtype),
            layers=stated.layers,
            memory_gb=self.memory_gb,
        )
        graph = self._padded(self._adapted(self._graph(request), stated, request), stated, request)
        stated = with_usual_stack(stated, graph)
        request = replace(request, **software_of(stated))
        workload = stated.workload(graph.workload["seq"], request.dtype or OWN_DTYPE)
        key = (
            stated.graph_batch,
            stated.seq,
            request.dtype,
            stated.layers,
            workload,
            stated.lora,
            stated.nf4,
            graph.config.get(VOCABULARY),
        )
        if key not in self.planners:
            made = prepare(request, graph, self.say)
            self.planners[key] = made.changed(workload=replace(workload, dtype=made.workload.dtype))
        return self.planners[key]

    def _graph(self, request: Request) -> Graph:
        """The graph of one micro-batch of a request. Raises InputError for samples or tokens that example inputs do not have."""
        assert request.batch is not None and request.accumulate is not None
        which = (request.batch // request.accumulate, request.seq, request.dtype, request.layers)
        if self.given:
            graph = self._as_given(request.layers)
            for what, number, option in zip(("batch", "seq"), which[:2], ("micro-batch", "seq"), strict=True):
                if number not in (None, graph.workload[what]):
                    raise InputError(
                        f"the example inputs of {graph.name} have {what} {graph.workload[what]}, and --{option} makes it {number}; "
                        f"leave --{option} out, or give other inputs"
                    )
            return graph
        if which not in self.graphs:
            self.say(f"graph of {self.model}")
            batch, seq, dtype, layers = which
            self.graphs[which] = self.load(self.model, batch=batch, seq=seq, dtype=dtype, layers=layers)
        return self.graphs[which]

    def _adapted(self, graph: Graph, stated: Statement, request: Request) -> Graph:
        """The graph with adapters of the stated rank beside its linear layers, whose weights are frozen; as it is if none is stated."""
        which = (request.batch, request.seq, request.dtype, request.layers, stated.lora, stated.nf4, "adapters")
        if which not in self.graphs:
            self.graphs[which] = with_adapters(graph, stated.lora, stated.nf4)
        return self.graphs[which]

    def _padded(self, graph: Graph, stated: Statement, request: Request) -> Graph:
        """The graph with a vocabulary that divides over the tensor-parallel ranks, as tools pad theirs; as it is if it does already."""
        words, multiple = graph.config.get(VOCABULARY), math.lcm(stated.vocab_multiple, stated.layout.tp)
        if self.given or not isinstance(words, int) or words % multiple == 0:
            return graph
        padded = -(-words // multiple) * multiple
        which = (request.batch, request.seq, request.dtype, request.layers, stated.lora, stated.nf4, padded)
        if which not in self.graphs:
            self.say(f"graph of {self.model} with {padded} words")
            told = (
                f"the vocabulary of {words} words is padded to {padded}, a multiple of {multiple}, so that tensor-parallel ranks hold "
                f"equal parts; a checkpoint keeps {words}"
            )
            made = with_config(graph, **{VOCABULARY: padded})
            self.graphs[which] = replace(made, assumptions=(*graph.assumptions, told))
        return self.graphs[which]

    def _as_given(self, layers: int | None) -> Graph:
        """The graph of a model that comes with example inputs, at their sizes and in its own dtype."""
        if (layers,) not in self.graphs:
            self.say(f"graph of {self.model}")
            self.graphs[layers,] = self.load(self.model, batch=None, seq=None, dtype=None, layers=layers)
        return self.graphs[layers,]

    def plan(self, stated: Statement, name: str = STATED) -> Plan | None:
        """The best plan of a stated layout, as long as its host lets it take; None if the model's operators cannot follow the layout."""
        planner = self.planner(stated)
        plan = planner.of_layout(stated.layout, name)
        return None if plan is None else on_host(plan, planner)

    def speed(self, plan: Plan, stated: Statement) -> Speed:
        """The figures of a plan of a statement."""
        step = model_flops(self.planner(stated).graph) * stated.accumulate
        return speed_of(plan, step // plan.workload.get("accumulate", 1), self.cluster)

    def best(self, stated: Statement, known: Plan | None) -> Plan:
        """The best plan of a step of as many samples, its weights in buckets, over every mesh of at most two axes; or `known` if that is
        better. The number of micro-batches, recomputation and the ZeRO stage are chosen."""
        usual = self.planner(stated.but(rank_by_rank=False))
        asked = replace(
            usual.request,
            batch=stated.batch,
            accumulate=None,
            recompute="auto",
            zero=None,
            precision=stated.precision,
            expert_imbalance=stated.expert_imbalance,
            offload=stated.offload,
            **software_of(usual.workload),
        )
        # a graph of example inputs holds one micro-batch, of which there may be several but no smaller ones
        asked = replace(asked, accumulate=stated.accumulate) if self.given else asked
        graph = (
            self._as_given(stated.layers)
            if self.given
            else lambda request: self._adapted(self._graph(request), stated, request)
        )
        planner, found = choose_micro_batches(asked, graph, self.say)
        found = on_host(found, planner)
        if known is None or (found.fits and not known.fits):
            return found
        better = known.fits > found.fits or known.cost.step_time_s < found.cost.step_time_s
        told = "laid out as stated, which is better than any plan on one or two axes"
        return replace(known, name=found.name, notes=(*known.notes, told)) if better else found


def _samples(number: int) -> str:
    return "1 sample" if number == 1 else f"{number} samples"


def with_usual_stack(stated: Statement, graph: Graph) -> Statement:
    """The statement with a stack, if it states none: of an architecture whose published runs are of another time, that of these runs."""
    known = PUBLISHED_STACKS.get(str(graph.config.get("model_type"))) if stated.stack is None else None
    return stated.but(stack=known) if known else stated


def software_of(stated: Software) -> dict[str, Any]:
    """What a statement or a workload says of its software, by name."""
    return {name: getattr(stated, name) for name in SOFTWARE}


def check_statement(stated: Statement, cluster: Cluster) -> None:
    """Raise InputError if a statement does not suit its cluster."""
    stated.check()
    check_layout(stated.layout, cluster)
    check_offload(stated.workload(stated.seq or 1, stated.dtype or cluster.gpu.training_dtype), cluster)


def on_host(plan: Plan, planner: Planner) -> Plan:
    """A plan with its waits for the host, as its planner's software issues kernels."""
    ranks = plan.pipeline.ranks if plan.pipeline else 1
    model = cost_model(planner.cluster, plan.mesh, planner.workload, ranks)
    return with_host(plan, planner.graph, model, planner.coarse)


def step_parts(plan: Plan, planner: Planner) -> dict[str, float]:
    """Seconds of a step by the resource for which it waits. They add up to the step's time."""
    if plan.pipeline:
        return stage_parts(plan)
    model = cost_model(planner.cluster, plan.mesh, planner.workload)
    shown = exposed_parts(plan.blocks, planner.graph, model, planner.coarse)
    waits = sum(e.seconds for e in shown if e.why == WAITED)
    return {
        COMPUTE: plan.cost.compute_time_s - plan.cost.host_wait_s,
        WAITS: waits,
        TRAFFIC: sum(e.seconds for e in shown) - waits,
        OPTIMIZER: plan.cost.optimizer_time_s,
        **_outside(plan),
    }


def stage_parts(plan: Plan) -> dict[str, float]:
    """The same of a plan with stages, on the rank that works longest: the time in which it waits for other stages is apart."""
    cost = plan.cost
    bubble = cost.pipeline.bubble_s if cost.pipeline else 0.0
    waits = max(0.0, cost.exposed_comm_time_s - bubble)
    parts = {COMPUTE: cost.compute_time_s, WAITS: waits, OPTIMIZER: cost.optimizer_time_s, **_outside(plan)}
    return {**parts, BUBBLE: cost.step_time_s - sum(parts.values())}


def _outside(plan: Plan) -> dict[str, float]:
    """Seconds in which the GPU has no work, if there are any: it waits for the host, or for a loader and a logger."""
    return {what: s for what, s in ((HOST, plan.cost.host_wait_s), (OUTSIDE, plan.cost.outside_time_s)) if s}


def limited_by(plan: Plan, planner: Planner) -> str:
    """The resource for which a step waits most; memory if the plan does not fit."""
    parts = {what: s for what, s in step_parts(plan, planner).items() if what != OUTSIDE}
    return max(parts, key=lambda what: parts[what]) if plan.fits else MEMORY
