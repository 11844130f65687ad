"""The best plan that a tool can be told, and what that costs beside the best of all plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planner_core.core import (
    USUAL_STACK,
    DeviceMesh,
    InputError,
    NoPlanFits,
    Note,
    Plan,
    PlanRole,
    Sentence,
    load_stack,
    memory_amount,
    named,
)
from planner_core.cost import cost_model_of, price_with_host
from planner_core.planning.fitting.host_waits import choose_shortest_step
from planner_core.planning.fitting.mesh_search import MeshSearch, choose_mesh, with_lower_bound
from planner_core.planning.fitting.micro_batch_numbers import GraphSource, MicroBatchNumbers
from planner_core.planning.fitting.micro_batches import choose_micro_batches
from planner_core.planning.methods import (
    BASELINES,
    EXACT,
    OF_MEGATRON,
    SWITCHES,
    TOOLS,
    PairForm,
    TpLayout,
    find_tool,
    form_rules,
    may_split_tokens,
    megatron_fault,
    splittable_layers,
    sum_for_each_column,
    tool_term,
)
from planner_core.planning.planner import Planner, replace_request
from planner_core.planning.request import MOMENT, Progress, Request
from planner_core.search import search_within_budget


def runs_on_stock_tools(plan: Plan) -> bool:
    """Return whether a stock tool can be told a plan: a baseline whose blocks are all recomputed alike, wholly or not at all. Those of
    Megatron-LM are told to it alone, so its flags must state the model; data parallelism and FSDP run every model.

    Example: Megatron-LM takes "recompute by keep-matmuls in 10 of 32 blocks" as full recomputation of all 32, which is 20 to 30 % slower.
    """
    switches = {block.recompute for label, block in plan.blocks.items() if label}
    is_uniform = len(switches) <= 1 and switches <= set(SWITCHES)
    return plan.method in BASELINES and is_uniform and not (plan.method in OF_MEGATRON and megatron_fault(plan))


@dataclass(frozen=True, slots=True)
class BestWithoutTool:
    """The best plan that no tool bounds, beside the best that a tool can be told: the torchrun script runs it.

    `request`: what it was searched for. `has_stages`: plans with stages, which may be quicker, are searched too."""

    request: Request
    plan: Plan
    has_stages: bool = False

    def or_better(self, other: BestWithoutTool) -> BestWithoutTool:
        """Return the same with the plan of another search if that is better."""
        return replace(self, plan=min(self.plan, other.plan, key=lambda p: p.preference))


@dataclass(frozen=True, slots=True)
class ToolPrice:
    """The steps of the best plan that a tool can be told and of the best of all plans, in seconds; None where none fits.

    `own_kernels`: the tool's step is on its own kernels, and the other on PyTorch's. `gradients`: the dtype in which both sum them, where
    it is not that of the weights. `is_script`: the other step is that of the torchrun script. `wait_without_tool_s`: how long the other
    step waits for its host, where it is not known how long the tool's step does; both are compared without it.
    """

    tool: str
    step_s: float | None
    step_without_tool_s: float | None
    own_kernels: bool
    gradients: str | None
    is_script: bool
    wait_without_tool_s: float


def compare_without_tool(request: Request, plan: Plan, without_tool: BestWithoutTool) -> ToolPrice:
    """Return what the best `plan` of a request's tool costs, and the best of all plans."""
    on_torch = load_stack(request.stack or USUAL_STACK).runs_torch_kernels
    own_kernels = request.stack == request.tool and not on_torch
    step_s, step_without_tool_s = (p.cost.step_time_s if p.fits else None for p in (plan, without_tool.plan))
    is_host_known = cost_model_of(plan).software.call_s > 0
    return ToolPrice(
        str(request.tool),
        step_s,
        step_without_tool_s,
        own_kernels,
        request.gradients,
        is_script=own_kernels or on_torch,
        wait_without_tool_s=0.0 if is_host_known else without_tool.plan.cost.host_wait_s,
    )


def choose_for_tool(
    request: Request, graph: GraphSource, report_progress: Progress
) -> tuple[Planner, Plan, BestWithoutTool]:
    """Return the planner and the best plan of one stage among those that the request's tool can be told, and the best of all plans of one
    stage beside it.

    Raises InputError for an unknown tool or another method, and NoPlanFits if the user gave a budget that none of them fits.
    """
    tool = find_tool(request.tool)
    if (request.method, request.objective) != (EXACT.name, "time"):
        raise InputError(
            named("tool", request.tool),
            " bounds the exact search for step time; leave ",
            named("method"),
            " and ",
            named("objective"),
            " out",
        )
    # Tools differ in their ZeRO stages; and what a script of this project runs in their place has torch's kernels. It sums gradients alike.
    stack = None if request.stack == request.tool else request.stack
    summed = request.with_tool_software().gradients
    unbounded = replace(request, tool=None, zero=None, stack=stack, gradients=summed)
    earlier_planner = None
    if tool.find_fault:
        earlier_planner = MicroBatchNumbers.of_request(unbounded, graph, report_progress, MOMENT).first
        # What the tool cannot be told at all has no best plan for it, and no search tells more of it.
        if fault := tool.find_fault(earlier_planner.graph):
            raise InputError(fault, "; leave ", named("tool", request.tool), " out, or name another tool")
    without_tool = _choose_without_tool(unbounded, graph, report_progress, earlier_planner)
    _check_samples(request, without_tool)
    search_meshes: MeshSearch = partial(_search_layer_pairs, tool.pairs) if tool.pairs else choose_mesh
    candidates: list[tuple[Planner, Plan]] = []
    refused: NoPlanFits | None = None
    for variant in _list_uniform_requests(request):
        try:
            least_work = choose_micro_batches(variant, graph, report_progress, search=search_meshes)
            candidates.append(choose_shortest_step(variant, graph, *least_work, report_progress))
        except NoPlanFits as error:
            refused = error
    if not candidates:
        raise NoPlanFits(
            "for ",
            tool_term(tool.name),
            ": ",
            refused.sentence if refused else "no plan fits",
            needed_bytes=refused.needed_bytes if refused else 0,
            describe_memory=refused.describe_memory if refused else None,
            nearest=refused.nearest if refused else None,
        )
    planner, plan = min(candidates, key=lambda c: c[1].preference)
    planner = replace_request(planner, tool=tool.name)
    if (gradients := planner.request.gradients) != summed:  # those of a plugin
        unbounded = replace(unbounded, gradients=gradients)
        without_tool = _choose_without_tool(unbounded, graph, report_progress)
    plan = _bound_over_all(planner, plan, [one for _, one in candidates])
    scope = Sentence("the best plan of one pipeline stage that ", tool_term(tool.name), f" can be told {tool.searched}")
    plan = replace(plan, notes=(*plan.notes, Note(scope)))
    return planner, plan, BestWithoutTool(unbounded, without_tool)


def _choose_without_tool(
    unbounded: Request, graph: GraphSource, report_progress: Progress, earlier_planner: Planner | None = None
) -> Plan:
    """Return the best plan of one stage that no tool bounds. The `earlier_planner` lends its graphs."""
    least_work = choose_micro_batches(unbounded, graph, report_progress, earlier_planner=earlier_planner)
    return choose_shortest_step(unbounded, graph, *least_work, report_progress)[1]


def _check_samples(request: Request, without_tool: Plan) -> None:
    """Raise InputError for samples that none of the tool's layouts can deal out; `without_tool` is a plan of the same step.

    Example: DeepSpeed on 24 GPUs has 24 data-parallel ranks and nothing else, so a step of 64 samples has no plan, whatever the memory.
    """
    degrees = {layout.data for layout in TOOLS[str(request.tool)].layouts(without_tool.num_gpus)}
    batch, parts = without_tool.workload.batch, request.accumulate or 1
    if any(batch % (parts * ranks) == 0 for ranks in degrees):
        return
    fewest = min(degrees)
    below = batch // (parts * fewest) * parts * fewest
    near = [named("batch", n) for n in (below, below + parts * fewest) if n]
    raise InputError(
        "for ",
        tool_term(str(request.tool)),
        f": {batch:,} samples{f' in {parts:,} micro-batches' * (parts > 1)} cannot be shared by {fewest:,} data-parallel ranks; give ",
        Sentence.from_list(" or ", near),
    )


def _list_uniform_requests(request: Request) -> Iterator[Request]:
    """Yield the requests whose searches together see what the tool can be told: one for the tool and each of its plugins, and for each
    recomputation. With `auto` the copies of a block could differ, which no setting of a tool says."""
    tool, gradients = str(request.tool), request.gradients
    stack = None if request.stack == tool else request.stack  # a plugin runs its own program
    # A section for a plugin has no field for the dtype of gradients.
    plugins = {name: summed for name, summed in TOOLS[tool].plugins.items() if gradients in (None, summed)}
    for name, summed in {tool: gradients, **plugins}.items():
        one = replace(request, tool=name, stack=stack, gradients=summed).with_tool_software()
        for recompute in TOOLS[name].recomputations if request.recompute == "auto" else (request.recompute,):
            yield replace(one, recompute=recompute)


def _search_layer_pairs(
    form: PairForm,
    planner: Planner,
    options: Sequence[DeviceMesh],
    report_progress: Progress,
    *,
    below: float = math.inf,
    prove: bool = True,
) -> Plan:
    """Return the best plan of a form that names layers, as `choose_mesh` returns any plan.

    On each mesh a plan with all products sharded says which pairs of layers there are."""
    del below, prove  # they only save work
    plans: list[Plan] = []
    for mesh in options:
        report_progress(Sentence("search on ", mesh.term))
        builders = planner.builders(EXACT, mesh)
        if not builders:  # no layout of this mesh can deal out the samples
            continue
        problem = builders[0]()
        answer = search_within_budget(problem, objective="time")
        if answer.assignment is not None:
            plan = planner.plan(problem, answer, "best", EXACT.name, "time", role=PlanRole.BEST)
            layout = splittable_layers(plan, planner.graph, form)
            token_splits = (False, True) if may_split_tokens(form, planner.graph) else (False,)
            # Which layers form pairs does not depend on the ZeRO stage, so the pairs are listed once and priced under each.
            for stage in (0, 3) if layout.data > 1 else (0,):
                plan_pairs = partial(
                    follow_tp_layout, planner, plan.mesh, layout, form.each_column, alone=True, role=plan.role
                )
                plans += filter(None, (plan_pairs(stage=stage, sequence=sequence) for sequence in token_splits))
    best = min(plans, key=lambda p: p.preference, default=None)
    if best is None:
        raise InputError("no layers of this model can be split in pairs evenly over these GPUs")
    if not best.fits and planner.request.memory_gb is not None:
        peak = best.cost.memory_bytes["peak"]
        needed = memory_amount(peak, ".4g")
        raise NoPlanFits("the least memory that a plan of its layers needs is ", needed, needed_bytes=int(peak))
    return _bound_over_all(planner, best, plans)


def _bound_over_all(planner: Planner, plan: Plan, plans: Sequence[Plan]) -> Plan:
    """Return the best of the `plans` of several searches, with a bound that holds for all of them.

    Example: with recomputation 5.0 s is proven. Without it the best plan takes 5.1 s, and none less than 4.9 s: the bound is 4.9 s.
    """
    bounds = [one.bound for one in plans if one.fits and one.bound is not None]
    return with_lower_bound(planner, plan, min(bounds)) if bounds else plan


def follow_tp_layout(
    planner: Planner,
    mesh: DeviceMesh,
    layout: TpLayout,
    each_column: bool,
    *,
    stage: int,
    sequence: bool,
    alone: bool = False,
    name: str = "best",
    method: str = EXACT.name,
    role: PlanRole = PlanRole.OTHER,
) -> Plan | None:
    """Return the best plan on a mesh that shards layers on the tensor axis as `layout` says; None if there is none. The other arguments are
    those of `PairForm`, `form_rules` and the plan."""
    rules = form_rules(planner.graph, mesh, layout, stage=stage, sequence=sequence, alone=alone)
    problem = planner.problem(planner.cost_model(mesh, zero=stage, usual=True), rules)
    if problem.is_infeasible:
        return None
    answer = planner.solve(problem, "time")
    if answer.assignment is None:
        answer = search_within_budget(problem, objective="time")
    if answer.assignment is None:
        return None
    chosen = planner.plan(problem, answer, name, method, "time", role=role)
    if not each_column:
        return chosen
    blocks = sum_for_each_column(chosen, planner.graph, layout.axis)
    cost = price_with_host(blocks, planner.graph, cost_model_of(chosen), planner.coarse)
    return replace(chosen, blocks=blocks, cost=cost, fits=cost.memory_bytes["peak"] <= planner.budget)
