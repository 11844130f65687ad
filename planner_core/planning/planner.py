"""All that the meshes and methods of one request share: the model, its groups and strategies, the cluster, and the memory budget."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from planner_core.core import (
    DTYPES,
    MAX_SAMPLES,
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
    Workload,
    axis_names,
    load_cluster,
    memory_amount,
    mesh_shapes,
    named,
    parse_mesh,
    timing,
)
from planner_core.cost import (
    CostModel,
    check_offload,
    cost_model,
    graph_as_run,
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
    model_identity,
    pad_vocabulary,
    with_adapters,
)
from planner_core.ops import BlockStrategies, CoarseGraph, coarsen, free_tokens, graph_strategies
from planner_core.planning.methods.layout import Layout, Space, check_layout, parse_layout
from planner_core.planning.methods.legality import operator_faults, undecided_fault, unsearchable_faults
from planner_core.planning.methods.method import Method
from planner_core.planning.methods.registry import EXACT, METHODS, describe_least
from planner_core.planning.methods.tools import tool_spaces
from planner_core.planning.request import THOROUGH, Clock, Effort, Progress, Request, with_default_batch
from planner_core.search import (
    NO_BOUND_NOTE,
    OBJECTIVES,
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
    restrict_states,
    search_within_budget,
    with_relaxed_bound,
)
from planner_core.search.algebra import PointAllowance, TooWide
from planner_core.search.network import (
    BlockCache,
    ModelNetworks,
    OperatorCache,
    Problem,
    Restriction,
    build_networks,
    build_problem,
)

STATED = "our current setup"
"""The name of the plan of a stated layout."""
SENDS_NOTHING = Note("no plan sends less than nothing; another that sends nothing may be faster")
USABLE_MEMORY = timing().usable_memory
"""The share of a GPU's memory that plans may fill if no budget is given (see assets/timing.json)."""


def usable_bytes(gpu_memory_bytes: int, request: Request) -> float:
    """Return the bytes per GPU that a plan may take: the user's budget, or the GPU's memory less what the simulation does not count."""
    return gpu_memory_bytes * USABLE_MEMORY if request.memory_gb is None else int(request.memory_gb * 1e9)


@dataclass
class Planner:
    """A model on a cluster, ready to be planned on any mesh by any method."""

    request: Request
    graph: Graph
    cluster: Cluster
    workload: Workload
    coarse: CoarseGraph
    strategies: Mapping[str, BlockStrategies]
    clock: Clock
    effort: Effort = THOROUGH
    work: PointAllowance = field(default_factory=lambda: PointAllowance(THOROUGH.request))
    """What is left of `effort.request`. All planners of a request share it, and `graphs`, the model's for other numbers of samples."""
    graphs: BatchGraphs = field(default_factory=BatchGraphs)
    networks: dict[tuple[CostModel, bool], ModelNetworks] = field(default_factory=dict)
    """A network depends on its cost model and on nothing else of a call, so the whole model is the key: a new field of it counts too."""
    problems: dict[tuple[CostModel, bool, bool], Problem] = field(default_factory=dict)
    """The problems of networks without a restriction; the second part of the key is whether all copies of a block are equal."""
    runs: dict[CostModel, dict[str, BlockCache]] = field(default_factory=dict)
    """What networks of one mesh share, by block. The key is a cost model without ZeRO, which these parts do not depend on."""
    operators: dict[str, OperatorCache] = field(default_factory=dict)
    """What networks of all meshes share, by block."""
    tokens_are_free: bool = False
    """Whether its networks are those of `with_free_tokens`."""
    counts_open: bool = False
    """Whether other numbers of micro-batches are looked at too, so that a sentence about this one holds for all of them."""

    @property
    def budget(self) -> float:
        """Bytes per GPU that a plan may take."""
        return usable_bytes(self.cluster.gpu.memory_bytes, self.request)

    def changed(self, **fields: Any) -> Planner:
        """Return the same planner with other `fields`, and with nothing kept of what was built for the old ones."""
        return replace(self, networks={}, problems={}, runs={}, operators={}, **fields)

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
            there = [
                s
                for s in self.spaces
                if s.mesh.axis_sizes == mesh.axis_sizes
                # Most layouts of many GPUs fail at the samples, which costs no network to see.
                and self.workload.graph_batch % s.layout.data == 0
                and not unsearchable_faults(self.graph, s.layout, of_any_samples=self.tokens_are_free)
            ]
            return [functools.partial(self.of_space, space, method.uniform) for space in there]
        restrict = method.restrict(self.graph, mesh)
        if restrict is None:
            return []
        zero = method.zero if method.zero < max(ZERO) else None
        return [
            functools.partial(
                self.problem, mesh, restrict, zero=zero, uniform=method.uniform, by_volume=method.by_volume
            )
        ]

    def problem(
        self,
        mesh: DeviceMesh,
        restrict: Restriction | None = None,
        *,
        zero: int | None = None,
        uniform: bool = False,
        by_volume: bool = False,
        stages: tuple[int, ...] | None = None,
        joined: tuple[int, ...] | None = None,
        usual: bool = False,
        pipe: PipelineAxis = ONE_RANK,
        at_least: bool = False,
    ) -> Problem:
        """Build the folded cost network on one mesh. Raises TooWide.

        Args:
            zero: The ZeRO stage that weights may have instead of stage 0; None: that of the request, which may leave it open.
            by_volume: A byte costs the same on every axis.
            stages: As `joined`, that of `CostModel`. Of three or four axes, operators treat all but the last as one by default, and only
                weights tell them apart. Free, an operator would have a strategy for each triple, and the tables would grow too large.
            usual: Of runs as tools start them, whose products do not run in chunks.
            pipe: The axis of a pipeline, of one of whose ranks it is the mesh.
            at_least: Its sums of memory are of no plan above the simulated peak.
        """
        if stages is None and zero is None and self.request.zero is None:
            # One network holds all stages: each weight has one on each axis, and a weight's states are eliminated first. So it takes
            # hardly longer than with one stage, and also finds plans that gather some weights once a step and others at each use.
            stages = ZERO
        workload = self.workload if zero is None else replace(self.workload, zero=min(zero, self.workload.zero))
        workload = replace(workload, chunks=1) if usual or by_volume else workload
        joined = tuple(range(1, len(mesh.axis_sizes) - 1)) if joined is None else joined
        model = replace(cost_model(self.cluster, mesh, workload, pipe), joined=joined)
        model = model if stages is None else replace(model, stages=stages)
        model = _with_equal_links(model) if by_volume else model
        forbids_nothing = type(restrict) is Restriction
        return self._problem_of(model, None if forbids_nothing else restrict, uniform, at_least=at_least)

    def _problem_of(
        self, model: CostModel, restrict: Restriction | None, uniform: bool, *, at_least: bool = False
    ) -> Problem:
        """Return the network of a cost model. `at_least`: its sums of memory are of no plan above the simulated peak."""
        # The names of axes say what a plan does with them: layouts and searches that differ in them alone have one network.
        key = replace(model, mesh=DeviceMesh(axis_names(len(model.mesh.axis_sizes)), model.mesh.axis_sizes))
        if restrict is None and (key, uniform, at_least) in self.problems:
            return self.problems[key, uniform, at_least]
        with self.clock("network"):
            nets = self._networks_of(key, model, at_least)

            def like(nets: ModelNetworks, restrict: Restriction | None) -> Problem:
                return build_problem(self.coarse, self.strategies, model, restrict, uniform, nets)

            try:
                problem = like(nets, restrict)
            except TooWide:
                problem = restrict_states(nets, like, self.coarse, restrict)
        problem = problem.with_point_limit(self.effort.network)
        if not at_least:
            # By a planner that does not keep this problem: one that held its own planner would live until a collection of cycles.
            build = functools.partial(replace(self, problems={})._problem_of, model, restrict, uniform, at_least=True)
            problem = replace(problem, make_at_least=functools.cache(build))
        if restrict is None:  # keep the problem: its solutions serve the next caller
            self.problems[key, uniform, at_least] = problem
        return problem

    def _networks_of(self, key: CostModel, model: CostModel, at_least: bool) -> ModelNetworks:
        if (key, at_least) not in self.networks:
            known = self.runs.setdefault(_without_zero(key), {})
            nets = build_networks(self.coarse, self.strategies, model, known, self.operators, at_least)
            self.networks[key, at_least] = nets
        return self.networks[key, at_least]

    def solve(
        self, problem: Problem, objective: str, limits: SearchLimits = TO_THE_END, rough: Answer | None = None
    ) -> Answer:
        """Return the best assignment whose simulated peak is within the budget (`fit_simulated_memory`). `rough`: the answer of a search
        without proof. Proofs form no more points than the request has left."""
        limits = replace(limits, max_open_gap=self.effort.gap, of_sums=self.effort.of_sums)
        limits = replace(limits, prove=limits.prove and self.work.remaining > 0, points=self.work)
        with self.clock("search"):
            answer = infeasible_answer(problem, rough, self.budget, objective) if rough else None
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
        return tool_spaces(self.request.tool, self.cluster, self.request.seq, self.request.batch)

    def of_space(self, space: Space, uniform: bool = False, at_least: bool = False) -> Problem:
        """Return the folded cost network of one combination of degrees. Raises TooWide."""
        build = functools.partial(self.problem, space.mesh, space.restriction(self.graph), uniform=uniform, usual=True)
        return build(stages=space.stages, joined=space.joined, pipe=space.pipe, at_least=at_least)

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
        return None if answer.assignment is None else self.plan(problem, answer, name, "layout", "time", pipeline)

    def plan(
        self, problem: Problem, answer: Answer, name: str, method: str, objective: str, pipeline: Pipeline | None = None
    ) -> Plan:
        """Return the answer as a plan; with `pipeline` as one of these stages, each on the problem's mesh."""
        assert answer.assignment is not None
        blocks = make_block_plans(problem, answer.assignment)
        known, pipe = problem.model, pipeline.axis if pipeline else ONE_RANK
        model = cost_model(self.cluster, known.mesh, known.workload, pipe)  # with real links, also if chosen by volume
        cost = (
            price_pipeline(blocks, self.graph, pipeline, model, ops_at_the_ends(self.coarse))
            if pipeline
            else price_with_host(blocks, self.graph, model, self.coarse)
        )
        how, fits, bound = METHODS.get(method, EXACT), cost.memory_bytes["peak"] <= self.budget, answer.bound
        if fits and pipeline is None and known.links == model.links:  # else the bound is of links that are all alike
            check_bound(objective_value(objective, cost.gpu_time_s, cost.comm_time_s), bound, name)
            bound = min(bound, cost.seconds(objective))  # a bound holds seconds that break ties too
        # Nothing is below 0 bytes. What is left of value and bound are the seconds that break ties, and their gap is none of bytes.
        sends_nothing = how.describe_aim(objective) is not None and not cost.comm_time_s
        return Plan(
            name=name,
            method=method,
            objective=objective,
            # The search adds up the seconds of all stages; the step is simulated, with its bubble, and nothing is proven of that.
            optimal=sends_nothing or (answer.optimal and problem.unrestricted is None and pipeline is None),
            model=model_identity(self.graph),
            workload=replace(model.workload, recompute=recomputation_of(blocks)).to_json(),
            cluster=self.cluster.to_json(),
            mesh=named_mesh(model.mesh, blocks),
            blocks=blocks,
            cost=cost,
            fits=fits,
            notes=(SENDS_NOTHING,)
            if sends_nothing
            else _proof_notes(problem, answer, describe_least(method, objective)),
            bound=bound,
            pipeline=with_parts(pipeline, self.graph) if pipeline else None,
        )

    def value(self, plan: Plan) -> float:
        """Return the value by which the request's method compares a plan: seconds of its objective; if it counts volume, at the same links
        everywhere. It is the value that the search gives."""
        method, cost = METHODS[self.request.method], plan.cost
        if method.by_volume:
            model = _with_equal_links(
                cost_model(self.cluster, plan.mesh, replace(self.workload, zero=plan.workload["zero"]))
            )
            cost = price(plan.blocks, self.graph, model, self.coarse)
        return objective_value(plan.objective, cost.gpu_time_s, cost.comm_time_s)


def _without_zero(model: CostModel) -> CostModel:
    """Return the same model with no word of ZeRO or recomputation: what blocks share is the same at every stage and recomputation."""
    return replace(model, stages=(), workload=replace(model.workload, zero=0, recompute="none"))


def _with_equal_links(model: CostModel) -> CostModel:
    """Return the same model where a byte costs the same on every axis."""
    links = tuple(volume_link(link.size) for link in model.links)
    return replace(
        model, links=links, joint_links=tuple((axes, volume_link(link.size)) for axes, link in model.joint_links)
    )


def recomputation_of(blocks: Mapping[str, BlockPlan]) -> str:
    """Return the recomputation of a plan's repeated blocks: "none", "full" or another policy; "auto" if they differ."""
    policies = {b.recompute for label, b in blocks.items() if label} or {"none"}
    return policies.pop() if len(policies) == 1 else "auto"


def _proof_notes(problem: Problem, answer: Answer, least: str) -> tuple[Note, ...]:
    """Notes attached to a plan that was not proven. `least`: what its bound is the least of."""
    gap = Note(describe_gap(answer.value, answer.bound, least), NoteKind.GAP)
    if problem.unrestricted is None:
        return () if answer.optimal else (gap,)
    # A bound that is ten times too low is useless.
    if answer.bound and 0 < answer.gap < 10:
        return Note(RESTRICTED_NOTE, NoteKind.SCOPE), gap
    return (Note(RESTRICTED_NOTE + NO_BOUND_NOTE, NoteKind.SCOPE),)


def prepare_planner(
    request: Request,
    graph: Graph | None = None,
    say: Progress = lambda text: None,
    effort: Effort = THOROUGH,
    like: Planner | None = None,
) -> Planner:
    """Return the planner of a request: all that does not depend on the mesh.

    `like`: another planner of the same model, with which it shares the clock and the graphs; of the same effort also what is left of the
    work for proofs. Raises InputError.
    """
    request.check()
    if request.method not in METHODS:
        raise InputError(named("method", request.method), f" is not one of {', '.join(METHODS)}")
    if request.objective not in OBJECTIVES:
        raise InputError(named("objective", request.objective), f" is not one of {', '.join(OBJECTIVES)}")
    clock, graphs = (like.clock, like.graphs) if like else (Clock(), BatchGraphs())
    work = like.work if like and like.effort == effort else PointAllowance(effort.request)
    cluster = load_cluster(request.cluster)
    _check_memory(request, cluster)
    if request.layout is not None:
        check_layout(parse_layout(request.layout), cluster)
    given = request.dtype
    request = replace(request, dtype=given or cluster.gpu.training_dtype)
    if graph is None:
        request = with_default_batch(request, cluster)
    assert request.dtype is not None
    asked = request.workload()
    asked.check()
    check_offload(asked, cluster)
    if graph is None:
        say(f"graph of {request.model}")
        with clock("capture"):
            size = request.batch and asked.graph_batch
            graph = graphs.open(request.model, batch=size, seq=request.seq, dtype=request.dtype, layers=request.layers)
            graph = pad_vocabulary(with_adapters(graph, request.lora, request.nf4), request.vocab_multiple)
    dtype = _model_dtype(graph, given) or request.dtype
    assert dtype is not None
    request = replace(request, dtype=dtype)
    batch = graph.workload["batch"] * asked.accumulate  # a graph holds one micro-batch
    if batch > MAX_SAMPLES:  # a stated batch is checked, so it is the model's own that this number makes too many
        raise InputError(
            named("accumulate", asked.accumulate),
            f" micro-batches of {graph.workload['batch']:,} samples are more than {MAX_SAMPLES:,} samples a step; give fewer",
        )
    workload = replace(asked, batch=batch, seq=graph.workload["seq"], dtype=dtype)
    graph = graph_as_run(graph, cluster.gpu, workload)
    say("coarsen")
    with clock("coarsen"):
        coarse = coarsen(graph)
        strategies = graph_strategies(coarse)
    return Planner(request, graph, cluster, workload, coarse, strategies, clock, effort, work, graphs)


def _check_memory(request: Request, cluster: Cluster) -> None:
    """Raise InputError for a budget above the memory of the GPU: a plan that fits it need not run there."""
    gpu, budget_gb = cluster.gpu, request.memory_gb
    if budget_gb is not None and int(budget_gb * 1e9) > gpu.memory_bytes:
        most = named("memory_gb", gpu.memory_bytes // 10**6 / 1000)
        has = memory_amount(gpu.memory_bytes, f"{gpu.memory_bytes / 2**30:.1f} GiB")
        reason = " is more than the ", has, f" of {gpu.name}; give at most ", most, ", or another GPU"
        raise InputError(named("memory_gb", budget_gb), *reason)


def _model_dtype(graph: Graph, asked: str | None) -> str | None:
    """Return the dtype in which a model that a function or an exported program gives computes. For a model from a config: None, since an
    option sets it.

    Raises InputError if the user asks for another dtype.
    """
    if not {"callable", "module"} & set(graph.config):
        return None
    dtype = graph.main_dtype
    dtype = dtype if dtype in DTYPES else "float32"
    if asked is not None and asked != dtype:
        raise InputError(
            named("dtype", asked),
            f" cannot be applied: most parameters of {graph.name} are {dtype}, as its function makes them; ",
            "cast them there, or leave it out",
        )
    return dtype


def candidate_meshes(request: Request, cluster: Cluster) -> list[DeviceMesh]:
    """Return the mesh asked for, or every factorisation into at most two axes (of three: `fitting.three_axes`); for a tool its own."""
    n = cluster.num_gpus
    if request.mesh:
        return [parse_mesh(request.mesh, n)]
    of_tool = {s.mesh.axis_sizes: s.mesh for s in tool_spaces(request.tool, cluster, request.seq, request.batch)}
    return list(of_tool.values()) or [DeviceMesh(axis_names(len(sizes)), sizes) for sizes in mesh_shapes(n)]


def with_recompute(planner: Planner, recompute: str) -> Planner:
    """Return the same planner with another choice of recomputation. It shares `runs` and `operators`, which hold blocks of both kinds."""
    changed = planner.changed(
        request=replace(planner.request, recompute=recompute), workload=replace(planner.workload, recompute=recompute)
    )
    return replace(changed, runs=planner.runs, operators=planner.operators)


def with_free_tokens(planner: Planner) -> Planner:
    """Return a planner whose networks hold the plans of all numbers of samples that divide its own (`ops.free_tokens`): only for bounds."""
    changed = planner.changed(strategies=free_tokens(planner.strategies), tokens_are_free=True)
    return replace(changed, operators=planner.operators)


def with_zero(planner: Planner, zero: int) -> Planner:
    """Return the same planner with another ZeRO stage that weights may have. It shares `runs` and `operators`, the same for all stages."""
    changed = planner.changed(
        request=replace(planner.request, zero=zero), workload=replace(planner.workload, zero=zero)
    )
    return replace(changed, runs=planner.runs, operators=planner.operators)


def replace_request(planner: Planner, **changes: Any) -> Planner:
    """Return the same planner for another request of the same model, cluster and workload."""
    return replace(planner, request=replace(planner.request, **changes))
