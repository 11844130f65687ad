"""Price a stated layout: restrict the search to the layout, and price the plan that it returns.

    statement -> graph of one micro-batch -> network on the layout's mesh -> forbid states -> search -> plan

A layout leaves few choices; the search makes these optimally. Suggestions are priced in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from planner_core.core import (
    PUBLISHED_STACKS,
    Cluster,
    Graph,
    Note,
    Plan,
    Sentence,
    divisors,
    memory_amount,
    named,
)
from planner_core.cost import check_offload
from planner_core.models import VOCABULARY, brings_inputs, load_model
from planner_core.planning.fitting.for_tool import follow_tp_layout
from planner_core.planning.fitting.host_waits import choose_shortest_step
from planner_core.planning.fitting.micro_batches import choose_micro_batches
from planner_core.planning.methods import Layout, check_layout
from planner_core.planning.planner import STATED, Planner, prepare_planner
from planner_core.planning.pricing.configs.fields import Setup
from planner_core.planning.pricing.speed import Speed, count_model_flops, measure_speed
from planner_core.planning.pricing.stated_model import ExampleInputs, GraphSpec, ModelGraphs, NamedModel, StatedModel
from planner_core.planning.pricing.statement import Statement
from planner_core.planning.request import Progress, request_of

PlannerKey = tuple[Statement, int | None]
"""A run on one rank, and the words of the vocabulary: all that a planner depends on."""


@dataclass
class Pricer:
    """Prices statements of one model on one cluster. Graphs and planners are built once for each workload.

    `has_inputs`: whether the model comes with example inputs, which fix the samples, tokens and dtype of a micro-batch. None: judged by
    the model's name."""

    model: str
    cluster: Cluster
    memory_gb: float | None = None
    report_progress: Progress = lambda text: None
    load: Callable[..., Graph] = load_model
    graphs: dict[GraphSpec, Graph] = field(default_factory=dict)
    planners: dict[PlannerKey, Planner] = field(default_factory=dict)
    has_inputs: bool | None = None
    stated_model: StatedModel = field(init=False)

    def __post_init__(self) -> None:
        graphs = ModelGraphs(self.model, self.load, self.report_progress, self.graphs)
        has_inputs = brings_inputs(self.model) if self.has_inputs is None else self.has_inputs
        self.stated_model = ExampleInputs(graphs) if has_inputs else NamedModel(graphs, self.cluster)

    def state_setup(
        self, setup: Setup, layout: Layout, overrides: Mapping[str, Any], batch: int | None
    ) -> tuple[Statement, tuple[Sentence, ...]]:
        """Return the run of a setup with notes on its micro-batch if that is assumed, and on what its file leaves open.

        The options `overrides`, the `layout` and the samples of a step, `batch`, count in place of the setup's own. Raises InputError."""
        # Example inputs are one micro-batch, so they say of how many of these a step is.
        if batch is not None and "micro_batch" not in overrides:
            overrides = {**overrides, **self.stated_model.fixed_micro_batch(layout)}
        number_stated = not {"micro_batch", "accumulate"}.isdisjoint({*setup.options, *overrides})
        is_assumed = not (batch is None or number_stated or setup.batch)
        if batch is not None:
            setup = setup.with_batch(batch, layout)
        stated, notes = self.stated_model.state_run(layout, setup.override_options(layout, overrides))
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

    def planner(self, stated: Statement) -> Planner:
        """Return the planner of a statement, which holds everything that does not depend on the mesh. Raises InputError."""
        graph = self.stated_model.graph(stated)
        # Of the layout a planner knows the samples of a micro-batch, and the vocabulary, which is padded to a multiple of the tensor ranks.
        run = with_published_stack(stated, graph).but(
            layout=Layout(), micro_batch=stated.graph_batch, vocab_multiple=1, split_layers=None
        )
        key = run, graph.config.get(VOCABULARY)
        # Suggestions change one thing each, so most of them share a graph, and many a planner with all its networks.
        if key not in self.planners:
            dtype = self.stated_model.dtype(stated)
            request = request_of(run, self.model, self.cluster, dtype=dtype, memory_gb=self.memory_gb)
            planner = prepare_planner(request, graph, self.report_progress)
            # A request knows no `rank_by_rank`.
            workload = replace(planner.workload, rank_by_rank=stated.rank_by_rank)
            self.planners[key] = planner.changed(workload=workload)
        return self.planners[key]

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

    def best(self, stated: Statement, as_stated: Plan | None) -> Plan:
        """Return the best plan for the same samples a step over every mesh of at most two axes, or `as_stated` if that is better.

        The search chooses the number of micro-batches, recomputation and the ZeRO stage; weights go in buckets."""
        # How a stack hands out updated weights is of the stated run. The best plan is not charged for it.
        bucketed = self.planner(stated.but(rank_by_rank=False))
        accumulate = self.stated_model.fixed_accumulate(stated)
        request = replace(bucketed.request, accumulate=accumulate, recompute="auto")
        graph = self.stated_model.source(stated)
        _, plan = choose_shortest_step(
            request, graph, *choose_micro_batches(request, graph, self.report_progress), self.report_progress
        )
        if as_stated is None or plan.fits != as_stated.fits:
            return plan if as_stated is None or plan.fits else replace(as_stated, name=plan.name, role=plan.role)
        if not plan.fits:  # what does not fit is compared by memory: nobody can run the faster one
            return min(plan, as_stated, key=lambda p: p.cost.memory_bytes["peak"])
        # A statement may have more axes than the search.
        stated_is_better = as_stated.cost.step_time_s < plan.cost.step_time_s
        note = "laid out as stated, which is better than any plan on one or two axes"
        return (
            replace(as_stated, name=plan.name, role=plan.role, notes=(*as_stated.notes, Note(note)))
            if stated_is_better
            else plan
        )


def with_published_stack(stated: Statement, graph: Graph) -> Statement:
    """Return the statement with a stack if it has none: the stack of the architecture's published runs, where those ran older software."""
    stack = PUBLISHED_STACKS.get(str(graph.config.get("model_type"))) if stated.stack is None else None
    return stated.but(stack=stack) if stack else stated


def check_statement(stated: Statement, cluster: Cluster) -> None:
    """Raise InputError if a statement does not suit its cluster."""
    stated.check()
    check_layout(stated.layout, cluster)
    check_offload(stated.workload(stated.seq or 1, stated.dtype or cluster.gpu.training_dtype), cluster)
