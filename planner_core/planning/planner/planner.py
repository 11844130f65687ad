"""All that the meshes and methods of one request share: the model, its groups and strategies, the cluster, and the memory budget."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from planner_core.core import (
    ONE_RANK,
    RECOMPUTE,
    ZERO,
    BlockPlan,
    Cluster,
    DeviceMesh,
    Graph,
    InputError,
    Note,
    NoteKind,
    Pipeline,
    PipelineAxis,
    Plan,
    PlanRole,
    Workload,
    load_timing,
)
from planner_core.cost import (
    CostModel,
    cost_model,
    cost_model_of,
    named_mesh,
    ops_at_the_ends,
    price,
    price_pipeline,
    price_with_host,
    with_parts,
)
from planner_core.cost.communication import volume_link
from planner_core.models import (
    BatchGraphs,
    identify_model,
)
from planner_core.ops import BlockStrategies, CoarseGraph, strategies_of_any_samples
from planner_core.planning.methods.layout import Layout, Space
from planner_core.planning.methods.legality import operator_faults, undecided_fault, unsearchable_faults
from planner_core.planning.methods.method import Method
from planner_core.planning.methods.registry import EXACT, METHODS, describe_least
from planner_core.planning.methods.tools import tool_spaces
from planner_core.planning.planner.networks import Networks
from planner_core.planning.request import THOROUGH, Clock, Effort, Request
from planner_core.search import (
    NO_BOUND_NOTE,
    RESTRICTED_NOTE,
    TO_THE_END,
    Answer,
    SearchLimits,
    check_bound,
    describe_gap,
    fit_simulated_memory,
    infeasible_answer,
    make_block_plans,
    objective_value,
    search_within_budget,
    walk_memory,
    with_relaxed_bound,
)
from planner_core.search.algebra import PointAllowance
from planner_core.search.network import Problem, Restriction

STATED = "our current setup"
"""The name of the plan of a stated layout."""
STATED_METHOD = "layout"
"""Its method, whatever it is called."""
SENDS_NOTHING = Note("no plan sends less than nothing; another that sends nothing may be faster")
USABLE_MEMORY = load_timing().usable_memory
"""The share of a GPU's memory that plans may fill if no budget is given (see assets/timing.json)."""


def usable_bytes(gpu_memory_bytes: int, request: Request) -> float:
    """Return the bytes per GPU that a plan may take: the user's budget, or the GPU's memory less what the simulation does not count."""
    return gpu_memory_bytes * USABLE_MEMORY if request.memory_gb is None else int(request.memory_gb * 1e9)


class MeshAnswer(NamedTuple):
    """The answer of a search on one mesh, and the problem that it answers."""

    answer: Answer
    problem: Problem


@dataclass
class Planner:
    """A model on a cluster, ready to be planned on any mesh by any method."""

    request: Request
    graph: Graph
    cluster: Cluster
    workload: Workload
    networks: Networks
    clock: Clock
    effort: Effort = THOROUGH
    work: PointAllowance = field(default_factory=lambda: PointAllowance(THOROUGH.request))
    """What is left of `effort.request`. All planners of a request share it, and `graphs`, the model's for other numbers of samples."""
    graphs: BatchGraphs = field(default_factory=BatchGraphs)
    is_of_any_samples: bool = False
    """Whether its networks are those of `with_any_samples`."""
    counts_open: bool = False
    """Whether other numbers of micro-batches are looked at too, so that a sentence about this one holds for all of them."""

    @property
    def coarse(self) -> CoarseGraph:
        """The groups of operators."""
        return self.networks.coarse

    @property
    def strategies(self) -> Mapping[str, BlockStrategies]:
        """The operators' strategies, by block."""
        return self.networks.strategies

    @property
    def budget(self) -> float:
        """Bytes per GPU that a plan may take."""
        return usable_bytes(self.cluster.gpu.memory_bytes, self.request)

    def changed(self, **fields: Any) -> Planner:
        """Return the same planner with other `fields`, and with nothing kept of what was built for the old ones."""
        return replace(self, networks=self.networks.without_contents(), **fields)

    def separate(self) -> Planner:
        """Return the same planner for another thread: what a search changes is its own, so that a planner that several keep is a value."""
        return self.changed(clock=self.clock.copy(), work=replace(self.work), graphs=self.graphs.copy())

    def objective(self, method: Method | None = None) -> str:
        """Return what the method minimises; the request's method if none is given."""
        return (method or METHODS[self.request.method]).objective or self.request.objective

    def builders(self, method: Method, mesh: DeviceMesh) -> list[Callable[[], Problem]]:
        """Return what builds the method's problems on one mesh: one, or for the exact search of a tool one for each layout that the tool
        can be told. Empty if the method does not suit the mesh. Each raises TooWide."""
        if method.name == EXACT.name and self.spaces:
            searchable = [
                s
                for s in self.spaces
                if s.mesh.axis_sizes == mesh.axis_sizes
                # Most layouts of many GPUs fail at the samples, which costs no network to see.
                and self.workload.graph_batch % s.layout.data == 0
                and not unsearchable_faults(self.graph, s.layout, of_any_samples=self.is_of_any_samples)
            ]
            return [functools.partial(self.of_space, space, method.uniform) for space in searchable]
        restrict = method.restrict(self.graph, mesh)
        if restrict is None:
            return []
        # A method with the highest stage leaves the stage to the request.
        zero = method.zero if method.zero < max(ZERO) else None
        model = self.cost_model(mesh, zero=zero, by_volume=method.by_volume)
        return [functools.partial(self.problem, model, restrict, uniform=method.uniform)]

    def cost_model(
        self,
        mesh: DeviceMesh,
        *,
        zero: int | None = None,
        by_volume: bool = False,
        usual: bool = False,
        pipe: PipelineAxis = ONE_RANK,
    ) -> CostModel:
        """Return the costs of a search on one mesh.

        Args:
            zero: The ZeRO stage that weights may have instead of stage 0; None: that of the request, which may leave it open.
            by_volume: A byte costs the same on every axis.
            usual: Of runs as tools start them, whose products do not run in chunks.
            pipe: The axis of a pipeline, of one of whose ranks it is the mesh.
        """
        workload = self.workload if zero is None else replace(self.workload, zero=min(zero, self.workload.zero))
        workload = replace(workload, chunks=1) if usual or by_volume else workload
        # Of three or four axes, operators treat all but the last as one, and only weights tell them apart. Free, an operator would have a
        # strategy for each triple, and the tables would grow too large.
        joined = tuple(range(1, len(mesh.axis_sizes) - 1))
        model = replace(cost_model(self.cluster, mesh, workload, pipe), joined=joined)
        if zero is None and self.request.zero is None:
            # One network holds all stages: each weight has one on each axis, and a weight's states are eliminated first. So it takes
            # hardly longer than with one stage, and also finds plans that gather some weights once a step and others at each use.
            model = replace(model, stages=ZERO)
        return _with_equal_links(model) if by_volume else model

    def problem(
        self,
        where: DeviceMesh | CostModel,
        restrict: Restriction | None = None,
        *,
        uniform: bool = False,
        at_least: bool = False,
    ) -> Problem:
        """Build the folded cost network on one mesh, at the request's costs there, or at costs of its own (`cost_model`).

        `at_least`: its sums of memory are of no plan above the simulated peak. Raises TooWide."""
        model = self.cost_model(where) if isinstance(where, DeviceMesh) else where
        # The base class forbids nothing: its network is the one without a restriction, which is kept for the next caller.
        forbids_nothing = type(restrict) is Restriction
        with self.clock("network"):
            return self.networks.problem(model, None if forbids_nothing else restrict, uniform, at_least=at_least)

    def solve(
        self, problem: Problem, objective: str, limits: SearchLimits = TO_THE_END, unproven: Answer | None = None
    ) -> Answer:
        """Return the best assignment whose simulated peak is within the budget (`fit_simulated_memory`). `unproven`: the answer of a search
        without proof. Proofs form no more points than the request has left."""
        limits = replace(limits, max_open_gap=self.effort.gap, of_sums=self.effort.of_sums)
        limits = replace(limits, prove=limits.prove and self.work.remaining > 0, points=self.work)
        with self.clock("search"):
            answer = infeasible_answer(problem, unproven, self.budget, objective) if unproven else None
            return answer or fit_simulated_memory(problem, self.graph, self.budget, objective, limits)

    def bounded(self, problem: Problem, answer: Answer, objective: str) -> tuple[Problem, Answer]:
        """If the problem was restricted: the answer with a bound that holds for the whole space, which may prove it."""
        if problem.unrestricted is None:
            return problem, answer
        with self.clock("search"):
            answer = with_relaxed_bound(problem, answer, objective, self.budget)
        return (replace(problem, unrestricted=None) if answer.optimal else problem), answer

    @functools.cached_property
    def spaces(self) -> tuple[Space, ...]:
        """What the request's tool can be told; empty if every plan may be chosen."""
        # `replace` does not carry a cached property over, so the planner of another request has spaces of its own.
        return tool_spaces(self.request.tool, self.cluster, self.request.seq, self.request.batch)

    def of_space(self, space: Space, uniform: bool = False, at_least: bool = False) -> Problem:
        """Return the folded cost network of one combination of degrees. Raises TooWide."""
        with self.clock("network"):
            restrict = space.restriction(self.graph)
        return self.problem(self.model_of_space(space), restrict, uniform=uniform, at_least=at_least)

    def model_of_space(self, space: Space) -> CostModel:
        """Return the costs of one combination of degrees as tools run it, whose products do not run in chunks."""
        model = cost_model(self.cluster, space.mesh, replace(self.workload, chunks=1), space.pipe)
        return replace(model, joined=space.joined, stages=space.stages)

    def stated(self, layout: Layout) -> Plan:
        """Return the plan of a layout that somebody runs. Raises InputError if the model cannot follow it."""
        plan = self.of_layout(layout)
        if plan is None:
            reasons = [str(fault) for fault in operator_faults(self.graph, layout)] or [
                f"{undecided_fault(self.of_space(layout.space()), layout)}; give other degrees"
            ]
            raise InputError(layout.term, f": {'; '.join(reasons)}")
        return plan

    def of_layout(self, layout: Layout, name: str = STATED) -> Plan | None:
        """Return the plan of a layout, None if it has none. Where the fastest does not fit, each recomputation of all blocks is tried."""
        plan = self._fastest_of_layout(layout, name)
        if plan is None or plan.fits or self.workload.recompute != "auto":
            return plan
        others = (with_recompute(self, policy).of_layout(layout, name) for policy in RECOMPUTE if policy != "auto")
        plans = [plan, *filter(None, others)]
        return min(plans, key=lambda p: p.preference)

    def _fastest_of_layout(self, layout: Layout, name: str) -> Plan | None:
        if unsearchable_faults(self.graph, layout):
            return None
        pipeline = layout.pipeline(self.graph, self.workload.accumulate)
        problem = self.of_space(layout.space())
        if problem.is_infeasible:
            return None
        # A layout leaves no choice that trades time for memory, so the fastest plan of the whole model has the plans of its stages.
        answer = None if pipeline else self.solve(problem, "time")
        if answer is None or answer.assignment is None:
            answer = search_within_budget(problem, objective="time")
        return (
            None
            if answer.assignment is None
            else self.plan(problem, answer, name, STATED_METHOD, "time", pipeline=pipeline)
        )

    def plan(
        self,
        problem: Problem,
        answer: Answer,
        name: str,
        method: str,
        objective: str,
        *,
        pipeline: Pipeline | None = None,
        role: PlanRole = PlanRole.OTHER,
    ) -> Plan:
        """Return the answer as a plan; with `pipeline` as one of these stages, each on the problem's mesh."""
        assert answer.assignment is not None
        blocks = make_block_plans(problem, answer.assignment)
        searched, pipe = problem.model, pipeline.axis if pipeline else ONE_RANK
        # With real links, also if chosen by volume.
        model = cost_model(self.cluster, searched.mesh, searched.workload, pipe)
        cost = (
            price_pipeline(blocks, self.graph, pipeline, model, ops_at_the_ends(self.coarse))
            if pipeline
            else price_with_host(
                blocks, self.graph, model, self.coarse, walk_memory(problem, self.graph, answer.assignment)
            )
        )
        how, fits, bound = METHODS.get(method, EXACT), cost.memory_bytes["peak"] <= self.budget, answer.bound
        if fits and pipeline is None:
            counts_volume = searched.links != model.links  # where only volume counts, as for TAP
            at = price(blocks, self.graph, _with_equal_links(model), self.coarse) if counts_volume else cost
            check_bound(objective_value(objective, at.gpu_time_s, at.comm_time_s), bound, name)
            bound = min(bound, at.seconds(objective))  # a bound holds seconds that break ties too
        # Nothing is below 0 bytes. What is left of value and bound are the seconds that break ties, and their gap is none of bytes.
        sends_nothing = how.describe_aim(objective) is not None and not cost.comm_time_s
        return Plan(
            name=name,
            method=method,
            objective=objective,
            # The search adds up the seconds of all stages; the step is simulated, with its bubble, and nothing is proven of that.
            optimal=sends_nothing or (answer.optimal and problem.unrestricted is None and pipeline is None),
            model=identify_model(self.graph),
            workload=replace(model.workload, recompute=recomputation_of(blocks)),
            cluster=self.cluster,
            mesh=named_mesh(model.mesh, blocks),
            blocks=blocks,
            cost=cost,
            fits=fits,
            notes=(SENDS_NOTHING,)
            if sends_nothing
            else _proof_notes(problem, answer, describe_least(method, objective)),
            bound=bound,
            pipeline=with_parts(pipeline, self.graph) if pipeline else None,
            role=role,
        )

    def value(self, plan: Plan) -> float:
        """Return the value by which the request's method compares a plan: seconds of its objective; if it counts volume, at the same links
        everywhere. It is the value that the search gives."""
        method, cost = METHODS[self.request.method], plan.cost
        if method.by_volume:
            cost = price(plan.blocks, self.graph, _with_equal_links(cost_model_of(plan, self.cluster)), self.coarse)
        return objective_value(plan.objective, cost.gpu_time_s, cost.comm_time_s)


def _with_equal_links(model: CostModel) -> CostModel:
    """Return the same model where a byte costs the same on every axis."""
    links = tuple(volume_link(link.size) for link in model.links)
    return replace(
        model, links=links, joint_links=tuple((axes, volume_link(link.size)) for axes, link in model.joint_links)
    )


def recomputation_of(blocks: Mapping[str, BlockPlan]) -> str:
    """Return the recomputation of a plan's repeated blocks: "none", "full" or another policy; "auto" if they differ."""
    # The top block has no copies; a model without repeated blocks recomputes nothing.
    policies = {b.recompute for label, b in blocks.items() if label} or {"none"}
    return policies.pop() if len(policies) == 1 else "auto"


def _proof_notes(problem: Problem, answer: Answer, best: str) -> tuple[Note, ...]:
    """Notes attached to a plan that was not proven. `best`: what its bound is a bound on, in words."""
    gap = Note(describe_gap(answer.value, answer.bound, best), NoteKind.GAP)
    if problem.unrestricted is None:
        return () if answer.optimal else (gap,)
    # A bound that is ten times too low is useless.
    if answer.bound and 0 < answer.gap < 10:
        return Note(RESTRICTED_NOTE, NoteKind.SCOPE), gap
    return (Note(RESTRICTED_NOTE + NO_BOUND_NOTE, NoteKind.SCOPE),)


def with_recompute(planner: Planner, recompute: str) -> Planner:
    """Return the same planner with another choice of recomputation."""
    return _with_workload(planner, recompute=recompute)


def with_zero(planner: Planner, zero: int) -> Planner:
    """Return the same planner with another ZeRO stage that weights may have."""
    return _with_workload(planner, zero=zero)


def _with_workload(planner: Planner, **changes: Any) -> Planner:
    request, workload = replace(planner.request, **changes), replace(planner.workload, **changes)
    return replace(planner, request=request, workload=workload, networks=planner.networks.for_other_workload())


def with_any_samples(planner: Planner) -> Planner:
    """Return a planner, only for bounds, whose networks hold the plans of all numbers of samples that divide its own (by
    `ops.strategies_of_any_samples`)."""
    networks = planner.networks.with_strategies(strategies_of_any_samples(planner.strategies))
    return replace(planner, networks=networks, is_of_any_samples=True)


def replace_request(planner: Planner, **changes: Any) -> Planner:
    """Return the same planner for another request of the same model, cluster and workload."""
    return replace(planner, request=replace(planner.request, **changes))
