"""Compare the best plan with stages with the best plan of one stage, and with what a stock tool makes of stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from planner_core.core import (
    Cluster,
    Graph,
    InputError,
    NoPlanFits,
    Note,
    NoteKind,
    Plan,
    PlannerError,
    PlanRole,
    Sentence,
    load_cluster,
    time_amount,
)
from planner_core.models import brings_inputs
from planner_core.planning.fitting.for_tool import BestWithoutTool
from planner_core.planning.fitting.host_waits import note_unknown_host
from planner_core.planning.fitting.micro_batch_numbers import GraphSource
from planner_core.planning.methods import BASELINES, EXACT, megatron_fault, tool_stages, tool_term
from planner_core.planning.planner import Planner, prepare_planner
from planner_core.planning.request import Progress, Request
from planner_core.planning.stages.cuts import LEAST_MEMORY_NAME
from planner_core.planning.stages.degrees import FIRST_SEARCH, WHOLE_SEARCH, Breadth
from planner_core.planning.stages.estimates import least_compute_s
from planner_core.planning.stages.search import StagedPlan, find_smallest_stages, search_stages
from planner_core.search import describe_excess

STOCK_TOOL, STOCK_PLAN_NAME = "megatron", "Megatron-LM with stages"
"""The tool whose best plan with stages stands beside the best of all, and the name of that plan."""


def find_staged_plans(
    request: Request,
    chosen: Plan,
    shown: Iterable[Plan],
    report_progress: Progress = lambda text: None,
    source: GraphSource = None,
    earlier_planner: Planner | None = None,
) -> tuple[tuple[StagedPlan, ...], str]:
    """Find the best plan with stages for the same samples a step, after the best that a stock tool can be told.

    The best of all is the last (docs/CONTRACT.md). There are none unless stages are quicker than the `chosen` plan of one stage. The
    sentence says so, or whether one of the `shown` plans is. Where no plan fits, there is one with stages that does not fit either, if one
    was found that takes less memory. `earlier_planner`: the planner of the chosen plan, whose graphs are reused."""
    if not may_use_stages(request, load_cluster(request.cluster), source):
        return (), "one node, or the request or the model leaves no room for stages"
    if staged := _list_staged_plans(request, chosen, report_progress, source, earlier_planner):
        return staged, "stages are quicker"
    found = why_no_stages(chosen, shown)
    smallest = None if chosen.fits else _find_smallest(request, chosen, report_progress, source, earlier_planner)
    if smallest is None:
        return (), found
    found = f"{found}; {smallest.plan.notes[0]}"
    return ((smallest,) if _peak_gib(smallest.plan) < _peak_gib(chosen) else ()), found


def add_stages_without_tool(
    best: BestWithoutTool, report_progress: Progress, source: GraphSource = None, earlier_planner: Planner | None = None
) -> BestWithoutTool | None:
    """Return the best plan that no tool bounds, with or without stages; None if stages could not be searched."""
    if not may_use_stages(best.request, load_cluster(best.request.cluster), source):
        return best
    try:
        staged = _find_staged_plan(best.request, best.plan, report_progress, source, earlier_planner)
    except PlannerError:
        return None
    return replace(best, plan=staged.plan if staged else best.plan, has_stages=True)


def find_stages_in_budget(
    request: Request, error: NoPlanFits, report_progress: Progress, source: GraphSource
) -> tuple[tuple[StagedPlan, ...], str]:
    """Find plans with stages in a stated budget that no plan of one stage fits. Raises the error, with what stages take, if none fits."""
    if error.nearest is None or not may_use_stages(request, load_cluster(request.cluster), source):
        raise error
    staged, found = find_staged_plans(request, error.nearest, (), report_progress, source)
    if not any(one.plan.fits for one in staged):
        raise error.with_more(found)
    return staged, found


def find_first_staged_plan(
    request: Request,
    chosen: Plan,
    report_progress: Progress = lambda text: None,
    source: GraphSource = None,
    earlier_planner: Planner | None = None,
) -> StagedPlan | None:
    """Find a plan with stages for a first answer, by a search of about a second; None unless it is much quicker than the `chosen` plan."""
    # A narrowed network bounds no cut: the search of stages would build the model for one sample, and find none. Example: Zamba2, 1.1 s.
    is_narrowed = chosen.fits and any(note.kind is NoteKind.SCOPE for note in chosen.notes)
    may_have_stages = may_use_stages(request, load_cluster(request.cluster), source)
    if may_have_stages and not is_narrowed and may_gain_much(chosen):
        with suppress(PlannerError):  # the answer of one stage stands without it
            if staged := _find_staged_plan(request, chosen, report_progress, source, earlier_planner, FIRST_SEARCH):
                return _add_notes(staged, chosen, request.bounding_tool)
    return None


def _list_staged_plans(
    request: Request, chosen: Plan, report_progress: Progress, source: GraphSource, earlier_planner: Planner | None
) -> tuple[StagedPlan, ...]:
    """Return the plans of `find_staged_plans`. A tool's request gets the best plan of that tool alone, and a model that the stock tool
    cannot state the best of all alone."""
    best = _find_staged_plan(request, chosen, report_progress, source, earlier_planner)
    if best is None:
        return ()
    bounding = request.bounding_tool  # one that has stages (`may_use_stages`)
    # The second search costs about as much as the first, so the model is judged before it.
    if bounding or megatron_fault(chosen):
        return (_add_notes(best, chosen, bounding),)
    stock = _find_staged_plan(replace(request, tool=STOCK_TOOL), chosen, report_progress, source, earlier_planner)
    if stock is None:
        return (_add_notes(best, chosen),)
    # Each search ends before all degrees are tried, so that of the tool may meet a better plan, which is one of all plans too.
    if stock.plan.cost.step_time_s < best.plan.cost.step_time_s:
        best = replace(stock, bound=min(best.bound, stock.bound))
    slower = stock.plan.cost.step_time_s / best.plan.cost.step_time_s - 1
    comparison = f"takes {100 * slower:.1f} % longer" if slower else "is as fast"
    # `layout_of_tool` splits tokens wherever products are sharded.
    method = "megatron-sp" if "tensor" in stock.plan.mesh.axis_names else "megatron"
    row = replace(stock.plan, name=STOCK_PLAN_NAME, role=PlanRole.STOCK_STAGES, method=BASELINES[method].name)
    return (
        _add_notes(replace(stock, plan=row), chosen, STOCK_TOOL),
        _add_notes(best, chosen, more=f"{STOCK_PLAN_NAME} {comparison}"),
    )


def _find_smallest(
    request: Request, chosen: Plan, report_progress: Progress, source: GraphSource, earlier_planner: Planner | None
) -> StagedPlan | None:
    """Find a plan with stages of little memory where no plan fits. Its note says what it takes beside the `chosen` plan."""
    prepared = _prepare_search(request, chosen, source, earlier_planner)
    smallest = find_smallest_stages(prepared[0], report_progress, prepared[1]) if prepared else None
    if smallest is None or smallest.plan.pipeline is None:
        return None
    plan = smallest.plan
    stages = f"{smallest.plan.pipeline.ranks} stages of {plan.mesh} with micro-batches of one sample"
    takes = f"{stages} take {_peak_gib(plan):.1f} GiB, where one stage takes {_peak_gib(chosen):.1f}"
    note = Note(takes, NoteKind.SHORTAGE)
    return replace(
        smallest, plan=replace(plan, name=LEAST_MEMORY_NAME, role=PlanRole.SMALLEST_STAGES, fits=False, notes=(note,))
    )


def _peak_gib(plan: Plan) -> float:
    return plan.cost.memory_bytes["peak"] / 2**30


def why_no_stages(chosen: Plan, shown: Iterable[Plan]) -> str:
    """Say that the search found no plan with stages that is better than the `chosen` one, and which of the `shown` ones is, if one is.

    The search ends before all degrees are tried, so it does not say that there is none."""
    if chosen.fits and chosen.pipeline is not None:
        return f"none was found that is quicker than {chosen.name}, which has stages"
    verdict = "no quicker plan with stages was found" if chosen.fits else "no plan with stages that fits was found"
    step_s = chosen.cost.step_time_s if chosen.fits else math.inf
    better = (p.name for p in shown if p.pipeline is not None and p.fits and p.cost.step_time_s < step_s)
    quicker = next(better, None)
    return f"{verdict} but {quicker}" if quicker else verdict


def may_gain_much(plan: Plan) -> bool:
    """Return whether stages may be much quicker than a plan of one stage, or fit where it does not. They share compute evenly at best, so
    beside most plans they are not."""
    # Waits for the host are not what makes stages much quicker: a rank has fewer layers and more micro-batches. A model of small kernels
    # would be searched for longer than its first plan takes.
    least_s = least_compute_s(plan) + plan.cost.host_wait_s
    return not plan.fits or least_s * FIRST_SEARCH[-1].least_gain < plan.cost.step_time_s


def may_use_stages(request: Request, cluster: Cluster, source: GraphSource = None) -> bool:
    """Return whether stages are searched: with several nodes, and if the request fixes neither mesh nor micro-batches, nor a tool without
    stages.

    The model is built for each size of a micro-batch, so it must come from a config or the zoo."""
    if isinstance(source, Graph) or brings_inputs(request.model):
        return False
    holds_stages = request.bounding_tool is None or tool_stages(request.tool) is not None
    leaves_room = request.mesh is None and holds_stages and request.method == EXACT.name
    several = not cluster.is_one_node and request.objective == "time"
    return leaves_room and several and request.accumulate is None and request.micro_batch is None


def _find_staged_plan(
    request: Request,
    chosen: Plan,
    report_progress: Progress,
    source: GraphSource,
    earlier_planner: Planner | None,
    breadths: Sequence[Breadth] = WHOLE_SEARCH,
) -> StagedPlan | None:
    """Find the best plan with stages that the request's tool can be told; None unless it is quicker than the `chosen` plan."""
    prepared = _prepare_search(request, chosen, source, earlier_planner)
    if prepared is None:
        return None
    return search_stages(prepared[0], report_progress, prepared[1], chosen if chosen.fits else None, breadths)


def _prepare_search(
    request: Request, chosen: Plan, source: GraphSource, earlier_planner: Planner | None
) -> tuple[Planner, Callable[[Request], Graph] | None] | None:
    """Return the planner of a search with the samples of the `chosen` plan, and what loads graphs of others; None if the model has no
    such micro-batch."""
    staged_request = replace(request, batch=chosen.workload.batch, seq=chosen.workload.seq, accumulate=1)
    load_graph = source if callable(source) else None
    try:
        return prepare_planner(
            staged_request, load_graph(staged_request) if load_graph else None, earlier_planner=earlier_planner
        ), load_graph
    except InputError:
        return None


def _add_notes(staged: StagedPlan, chosen: Plan, tool: str | None = None, more: str = "") -> StagedPlan:
    """Add what a plan with stages gains over the `chosen` one, and its bound, with how near it is: among all plans, or those of a tool."""
    plan, bound = staged.plan, staged.bound
    gain = Sentence("it fits, where no plan of one stage does")
    if chosen.fits:
        step, one_stage = (time_amount(p.cost.step_time_s) for p in (plan, chosen))
        other = "the best plan of one stage" if chosen.pipeline is None else chosen.name
        gain = Sentence("a step of ", step, f", where {other} takes ", one_stage)
    of_tool = Sentence(" that ", tool_term(tool), " can be told") if tool else Sentence()
    gap = Sentence("the best found with stages", of_tool)
    if bound < plan.cost.step_time_s:
        excess = describe_excess(plan.cost.step_time_s, bound, "best of the degrees that were looked at")
        what = "a bound of each rank's time and memory, without most of its waits"
        gap = Sentence(gap, f": {excess}. None takes less than ", time_amount(bound), f", {what}")
    host = note_unknown_host(plan, staged.planner.graph)
    notes = (Note(gain), Note(gap, NoteKind.GAP), *plan.notes, *host, *((Note(more),) if more else ()))
    return replace(staged, plan=replace(plan, notes=notes, bound=min(bound, plan.cost.step_time_s)))
