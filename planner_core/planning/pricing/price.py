"""Price a stated layout: restrict the search to the layout, and price the plan that it returns.

    statement -> graph of one micro-batch -> network on the layout's mesh -> forbid states -> search -> plan

A layout leaves few choices; the search makes these optimally. Suggestions are priced in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from planner_core.core import (
    PUBLISHED_STACKS,
    Cluster,
    Graph,
    InputError,
    Note,
    Plan,
    Sentence,
    divisors,
    memory_amount,
    named,
)
from planner_core.cost import WAITED, check_offload, cost_model, exposed_parts
from planner_core.models import VOCABULARY, brings_inputs, default_sizes, load_model, pad_vocabulary, with_adapters
from planner_core.planning.fitting.for_tool import follow_tp_layout
from planner_core.planning.fitting.host_waits import choose_shortest_step
from planner_core.planning.fitting.micro_batches import choose_micro_batches
from planner_core.planning.methods import Layout, check_layout
from planner_core.planning.planner import STATED, Planner, prepare_planner
from planner_core.planning.pricing.configs.fields import Setup
from planner_core.planning.pricing.speed import Speed, count_model_flops, measure_speed
from planner_core.planning.pricing.statement import Statement
from planner_core.planning.request import Progress, Request

DTYPE_OF_INPUTS = "own"
"""Placeholder for the dtype of a model with example inputs, before its graph is loaded."""
COMPUTE, EXPOSED_COMM, WEIGHT_TRAFFIC, OPTIMIZER, MEMORY = "compute", "waits", "weight traffic", "optimizer", "memory"
BUBBLE, OUTSIDE, HOST = "bubble", "outside", "host"


@dataclass
class Pricer:
    """Prices statements of one model on one cluster. Graphs and planners are built once for each workload.

    `has_inputs`: whether the model comes with example inputs, which fix the samples, tokens and dtype of a micro-batch. None: judged by
    the model's name."""

    model: str
    cluster: Cluster
    memory_gb: float | None = None
    say: Progress = lambda text: None
    load: Callable[..., Graph] = load_model
    graphs: dict[tuple[object, ...], Graph] = field(default_factory=dict)
    planners: dict[tuple[object, ...], Planner] = field(default_factory=dict)
    has_inputs: bool | None = None

    def __post_init__(self) -> None:
        self.has_inputs = brings_inputs(self.model) if self.has_inputs is None else self.has_inputs

    def state_setup(
        self, setup: Setup, layout: Layout, overrides: Mapping[str, Any], batch: int | None
    ) -> tuple[Statement, tuple[Sentence, ...]]:
        """Return the run of a setup with notes on its micro-batch if that is assumed, and on what its file leaves open.

        The options `overrides`, the `layout` and the samples of a step, `batch`, count in place of the setup's own. Raises InputError."""
        number_stated = not {"micro_batch", "accumulate"}.isdisjoint({*setup.options, *overrides})
        # Example inputs have a size.
        is_assumed = not (batch is None or number_stated or self.has_inputs or setup.batch)
        if batch is not None:
            setup = setup.with_batch(batch, layout)
            # Example inputs are one micro-batch, so they say of how many of these a step is.
            if self.has_inputs and "micro_batch" not in overrides:
                overrides = {**overrides, "micro_batch": self._share_of_inputs(layout)}
        stated, notes = self.state_run(layout, setup.override_options(layout, overrides))
        # Stages are of the file's own ranks; a layout that is given beside the file states its own.
        if layout is setup.layout:
            stated = self.deal_stages(setup, stated)
        if stated.split_layers is not None and not stated.names_layers:
            degrees = f"{setup.where} names the layers that tensor ranks split, of which {layout} does not tell; priced by degrees"
            stated, notes = stated.but(split_layers=None), (*notes, Sentence(degrees))
        if is_assumed and layout.pp > 1:
            assumed = f"micro-batch {stated.micro_batch} is assumed, with which stages stand idle least; "
            notes += (Sentence(assumed, named("micro_batch"), " states another"),)
        elif is_assumed:
            stated, notes = self._shrink_to_fit(stated)
        if setup.where and "recompute" not in {*setup.options, *overrides}:
            silent = f"{setup.where} does not say whether layers are recomputed, which the training script does; priced without, and "
            notes += (Sentence(silent, named("recompute", "full"), " beside it prices it"),)
        if setup.own_dtype and "dtype" not in overrides:
            silent = (
                f"{setup.where} states no dtype, without which {setup.tool} computes in {setup.own_dtype}; priced in "
            )
            priced = f"{self.cluster.gpu.training_dtype}, and "
            notes += (Sentence(silent, priced, named("dtype", setup.own_dtype), " beside it prices that"),)
        return stated, notes

    def deal_stages(self, setup: Setup, stated: Statement) -> Statement:
        """Return the run of a setup with the stages that its tool makes of the model's layers. Raises InputError where it refuses them."""
        if setup.stages is None:
            return stated
        layers = sum(self.planner(stated).graph.num_repeats.values())
        return stated.but(layout=setup.stages.deal(stated.layout, layers, setup.where))

    def _shrink_to_fit(self, stated: Statement) -> tuple[Statement, tuple[Sentence, ...]]:
        """Return the run with the largest micro-batch that fits, and a note if that is not a rank's whole share of the batch. Where none
        fits, with the one of least memory. Raises InputError."""
        check_statement(stated, self.cluster)
        plan, share = self.plan(stated), stated.micro_batch
        # The whole share at once runs the fewest and largest kernels, so it is the first to be looked at.
        if plan is None or plan.fits:
            return stated, ()
        peak = plan.cost.memory_bytes["peak"]
        smaller = [stated.but(micro_batch=n, accumulate=share // n) for n in reversed(divisors(share)[:-1])]
        shown, best = stated, plan
        for run in smaller:
            other = self.plan(run)
            if other is not None and (other.fits or other.cost.memory_bytes["peak"] < best.cost.memory_bytes["peak"]):
                shown, best = run, other
            if best.fits:
                break
        if not best.fits:
            tried = (
                f"the one of least memory, since none of {share} samples or fewer fits"
                if smaller
                else "a rank's share of the batch"
            )
            assumed = f"micro-batch {shown.micro_batch} is assumed, which is {tried}; "
            return shown, (Sentence(assumed, named("micro_batch"), " states another"),)
        note = Sentence(
            f"micro-batch {shown.micro_batch} is assumed, the largest that fits: {share} samples at once need ",
            memory_amount(peak),
            " per GPU; ",
            named("micro_batch"),
            " states another",
        )
        return shown, (note,)

    def state_run(self, layout: Layout, options: Mapping[str, Any]) -> tuple[Statement, tuple[Sentence, ...]]:
        """Return the run of a layout, and a note on its micro-batch if that is assumed. Raises InputError.

        Args:
            options: Values of `Statement`. Without `micro_batch` among them, a step has the default batch of `plan`, so that the two step
                times can be compared; or the number of samples nearest to it that the data-parallel ranks share evenly.
        """
        if "micro_batch" in options:
            return Statement(layout, **options), ()
        if self.has_inputs:
            return self._state_run_of_inputs(layout, options)
        batch, number = default_sizes(self.model, self.cluster.num_gpus)[0], options.get("accumulate")
        # 64 samples on fsdp=24 are 3 samples of a rank: 72 in a step, which is nearer than 48.
        samples = max(1, round(batch / (layout.data * max(1, number or 1))))
        # As `Layout.count_micro_batches`: with stages, ranks stand idle less with many micro-batches than with large ones.
        sizes = (1, samples) if layout.pp > 1 and number is None else (samples, 1 if number is None else number)
        stated = Statement(layout, **{**options, "micro_batch": sizes[0], "accumulate": sizes[1]})
        if stated.batch == batch:
            assumed = f"micro-batch {stated.micro_batch} is assumed, as a step has {_count_samples(batch)} in a plan by default; "
            return stated, (Sentence(assumed, named("micro_batch"), " states another"),)
        why = f"a step has {_count_samples(stated.batch)}: {layout.data} data-parallel ranks"
        count = () if number is None else (" with ", named("accumulate", number))
        missed = f" do not share the {batch} that a plan has by default evenly; "
        return stated, (Sentence(why, *count, missed, named("micro_batch"), " states others"),)

    def _state_run_of_inputs(
        self, layout: Layout, options: Mapping[str, Any]
    ) -> tuple[Statement, tuple[Sentence, ...]]:
        """Return the run of a layout on example inputs, which are one micro-batch; with stages a step has as few as their schedule runs."""
        stated = Statement(layout, self._share_of_inputs(layout), **options)
        if layout.pp == 1 or "accumulate" in options:
            return stated, ()
        stated = stated.but(accumulate=layout.pp)
        assumed = f"the example inputs are one micro-batch, and {layout.pp} of them are assumed for {layout.pp} stages, so a step has "
        return stated, (Sentence(assumed, f"{_count_samples(stated.batch)}; ", named("accumulate"), " states another"),)

    def _share_of_inputs(self, layout: Layout) -> int:
        """Return the samples of the example inputs that each data-parallel rank has. Raises InputError."""
        graph = self._graph_of_inputs(None)
        batch: int = graph.workload["batch"]
        if batch % layout.data:
            raise InputError(
                f"the example inputs of {graph.name} have {_count_samples(batch)}, which cannot be dealt to the {layout.data} "
                f"data-parallel ranks of {layout}; give inputs of {layout.data} samples or a multiple"
            )
        return batch // layout.data

    def planner(self, stated: Statement) -> Planner:
        """Return the planner of a statement, which holds everything that does not depend on the mesh. Raises InputError."""
        request = Request(
            self.model,
            cluster=self.cluster.to_json(),
            batch=stated.graph_batch,
            seq=stated.seq,
            optimizer=stated.optimizer,
            dtype=stated.dtype or (None if self.has_inputs else self.cluster.gpu.training_dtype),
            layers=stated.layers,
            memory_gb=self.memory_gb,
        )
        graph = self._pad_vocabulary(self._add_adapters(self._load_graph(request), stated, request), stated, request)
        stated = with_published_stack(stated, graph)
        request = replace(request, **stated.stated_software())
        workload = stated.workload(graph.workload["seq"], request.dtype or DTYPE_OF_INPUTS)
        # The vocabulary is a part of the key, since it is padded to a multiple of the tensor ranks.
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
        # Suggestions change one thing each, so most of them share a graph, and many a planner with all its networks.
        if key not in self.planners:
            planner = prepare_planner(request, graph, self.say)
            # The statement's workload in place of the request's, which knows no `rank_by_rank`; only the planner knows the dtype of inputs.
            self.planners[key] = planner.changed(workload=replace(workload, dtype=planner.workload.dtype))
        return self.planners[key]

    def _load_graph(self, request: Request) -> Graph:
        """Return the graph of one micro-batch of a request. Raises InputError for samples or tokens that example inputs do not have."""
        key = _graph_key(request)
        if self.has_inputs:
            graph = self._graph_of_inputs(request.layers)
            for name, number, option in zip(("batch", "seq"), key[:2], ("micro_batch", "seq"), strict=True):
                if number not in (None, graph.workload[name]):
                    raise InputError(
                        f"the example inputs of {graph.name} have {name} {graph.workload[name]}, and ",
                        named(option),
                        f" makes it {number}; leave ",
                        named(option),
                        " out, or give other inputs",
                    )
            return graph
        if key not in self.graphs:
            self.say(f"graph of {self.model}")
            batch, seq, dtype, layers = key
            self.graphs[key] = self.load(self.model, batch=batch, seq=seq, dtype=dtype, layers=layers)
        return self.graphs[key]

    def _add_adapters(self, graph: Graph, stated: Statement, request: Request) -> Graph:
        """Return the graph with adapters of the stated rank on its linear layers, whose weights are frozen; unchanged if no rank is
        stated."""
        key = (*_graph_key(request), stated.lora, stated.nf4, "adapters")
        if key not in self.graphs:
            self.graphs[key] = with_adapters(graph, stated.lora, stated.nf4)
        return self.graphs[key]

    def _pad_vocabulary(self, graph: Graph, stated: Statement, request: Request) -> Graph:
        """Return the graph with its vocabulary padded to a multiple, as tools pad theirs, so that it divides over tensor-parallel ranks."""
        # The least common multiple of what the tool pads to and of the tensor ranks: 128 with tp=6 makes it a multiple of 384.
        words, multiple = graph.config.get(VOCABULARY), math.lcm(stated.vocab_multiple, stated.layout.tp)
        if self.has_inputs or not isinstance(words, int) or words % multiple == 0:
            return graph
        key = (*_graph_key(request), stated.lora, stated.nf4, multiple)
        if key not in self.graphs:
            self.say(f"graph of {self.model} with another vocabulary")
            self.graphs[key] = pad_vocabulary(graph, multiple)
        return self.graphs[key]

    def _graph_of_inputs(self, layers: int | None) -> Graph:
        """Return the graph of a model with example inputs, at their sizes and in its own dtype."""
        # A key of one entry is never that of `_graph_key`, which has four.
        if (layers,) not in self.graphs:
            self.say(f"graph of {self.model}")
            self.graphs[layers,] = self.load(self.model, batch=None, seq=None, dtype=None, layers=layers)
        return self.graphs[layers,]

    def plan(self, stated: Statement, name: str = STATED) -> Plan | None:
        """Return the best plan of a stated layout; None if the model's operators cannot follow the layout."""
        planner, layout = self.planner(stated), stated.layout
        if stated.split_layers is None or not stated.names_layers:
            return planner.of_layout(layout, name)
        mesh, axis = layout.mesh(), [role for role, _ in layout.degrees].index("tensor")
        styled, stage = (
            stated.split_layers.layout(planner.graph, axis, layout.tp, layout.data),
            3 if layout.fsdp > 1 else layout.zero,
        )
        return follow_tp_layout(
            planner, mesh, styled, each_column=True, stage=stage, sequence=layout.sp, name=name, method="layout"
        )

    def speed(self, plan: Plan, stated: Statement) -> Speed:
        """Return the figures of a plan of a statement."""
        # The best plan may cut the same samples into another number of micro-batches, and `measure_speed` takes the FLOPs of one.
        step = count_model_flops(self.planner(stated).graph) * stated.accumulate
        return measure_speed(plan, step // plan.accumulate, self.cluster)

    def best(self, stated: Statement, known: Plan | None) -> Plan:
        """Return the best plan for the same samples a step over every mesh of at most two axes, or `known` if that is better.

        The search chooses the number of micro-batches, recomputation and the ZeRO stage; weights go in buckets."""
        # How a stack hands out updated weights is of the stated run. The best plan is not charged for it.
        bucketed = self.planner(stated.but(rank_by_rank=False))
        request = replace(
            bucketed.request,
            batch=stated.batch,
            accumulate=None,
            recompute="auto",
            zero=None,
            precision=stated.precision,
            expert_imbalance=stated.expert_imbalance,
            offload=stated.offload,
            **bucketed.workload.stated_software(),
        )
        # A graph of example inputs holds one micro-batch; a step may have several, but none of another size.
        request = replace(request, accumulate=stated.accumulate) if self.has_inputs else request
        graph = (
            self._graph_of_inputs(stated.layers)
            if self.has_inputs
            else lambda request: self._add_adapters(self._load_graph(request), stated, request)
        )
        _, plan = choose_shortest_step(request, graph, *choose_micro_batches(request, graph, self.say), self.say)
        if known is None or plan.fits != known.fits:
            return plan if known is None or plan.fits else replace(known, name=plan.name, role=plan.role)
        if not plan.fits:  # what does not fit is compared by memory: nobody can run the faster one
            return min(plan, known, key=lambda p: p.cost.memory_bytes["peak"])
        # A statement may have more axes than the search.
        known_is_better = known.cost.step_time_s < plan.cost.step_time_s
        note = "laid out as stated, which is better than any plan on one or two axes"
        return (
            replace(known, name=plan.name, role=plan.role, notes=(*known.notes, Note(note)))
            if known_is_better
            else plan
        )


def _graph_key(request: Request) -> tuple[int, int | None, str | None, int | None]:
    """Return the samples of a global micro-batch, the tokens, dtype and layers: all that a graph depends on."""
    assert request.batch is not None and request.accumulate is not None
    return request.batch // request.accumulate, request.seq, request.dtype, request.layers


def _count_samples(number: int) -> str:
    return "1 sample" if number == 1 else f"{number} samples"


def with_published_stack(stated: Statement, graph: Graph) -> Statement:
    """Return the statement with a stack if it has none: the stack of the architecture's published runs, where those ran older software."""
    stack = PUBLISHED_STACKS.get(str(graph.config.get("model_type"))) if stated.stack is None else None
    return stated.but(stack=stack) if stack else stated


def check_statement(stated: Statement, cluster: Cluster) -> None:
    """Raise InputError if a statement does not suit its cluster."""
    stated.check()
    check_layout(stated.layout, cluster)
    check_offload(stated.workload(stated.seq or 1, stated.dtype or cluster.gpu.training_dtype), cluster)


def split_step(plan: Plan, planner: Planner) -> dict[str, float]:
    """Split the seconds of a step by the resource that it waits for. The parts add up to the step."""
    if plan.pipeline:
        return split_pipeline_step(plan)
    model = cost_model(planner.cluster, plan.mesh, planner.workload)
    exposed = exposed_parts(plan.blocks, planner.graph, model, planner.coarse)
    waits = sum(e.seconds for e in exposed if e.why == WAITED)
    return {
        COMPUTE: plan.cost.gpu_compute_s,
        EXPOSED_COMM: waits,
        WEIGHT_TRAFFIC: sum(e.seconds for e in exposed) - waits,
        OPTIMIZER: plan.cost.optimizer_time_s,
        **_idle_parts(plan),
    }


def split_pipeline_step(plan: Plan) -> dict[str, float]:
    """Split the step of a plan with stages on its busiest rank. The bubble, in which it waits for other stages, is a part of its own."""
    cost = plan.cost
    bubble = cost.pipeline.bubble_s if cost.pipeline else 0.0
    waits = max(0.0, cost.exposed_comm_time_s - bubble)
    parts = {COMPUTE: cost.gpu_compute_s, EXPOSED_COMM: waits, OPTIMIZER: cost.optimizer_time_s, **_idle_parts(plan)}
    # Files of plans that are older than this sum have a mean over ranks as their bubble, which may be more than what is left.
    return {**parts, BUBBLE: min(bubble, cost.exposed_comm_time_s)}


def _idle_parts(plan: Plan) -> dict[str, float]:
    """Return the seconds in which the GPU has no work, where there are any: it waits for the host, or for a loader and a logger."""
    return {what: s for what, s in ((HOST, plan.cost.host_wait_s), (OUTSIDE, plan.cost.outside_time_s)) if s}


def limiting_resource(plan: Plan, planner: Planner) -> str:
    """Return the resource that a step waits for most, or memory if the plan does not fit."""
    # Seconds outside of the GPU's work are a line of their own and no plan changes them, so they never name what limits a run.
    parts = {what: s for what, s in split_step(plan, planner).items() if what != OUTSIDE}
    return max(parts, key=lambda what: parts[what]) if plan.fits else MEMORY
