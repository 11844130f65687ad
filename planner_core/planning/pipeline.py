"""From a model and a cluster to plans: the passes of a request, in order. Every value between two passes is kept.

    choose_step: graph -> coarsen -> strategies -> for each number of micro-batches and mesh: network -> search -> plan
    PASSES:      each takes the draft, and returns it with what it found and why
    Result:      the plans, and which of them is the one to run (planning/result.py)

The command line, the library and the page all ask `plan_model`. A new pass is a function of a draft and a line of `ONE_STAGE_PASSES` at the
end of this file, before "baselines" if it may change the chosen plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from planner_core.core import (
    Graph,
    NoPlanFits,
    Note,
    NoteKind,
    Plan,
    PlannerError,
    assumed_node_notes,
    slow_dtype_notes,
)
from planner_core.models import brings_inputs
from planner_core.planning.fitting.baselines import (
    better_of_baselines,
    note_missing_baselines,
    plan_baselines,
    plan_stated_layout,
)
from planner_core.planning.fitting.for_tool import BestWithoutTool, choose_for_tool
from planner_core.planning.fitting.front import (
    leave_out_beaten,
    name_trade_offs,
    plan_trade_offs,
)
from planner_core.planning.fitting.host_waits import (
    choose_shortest_step,
    name_in_notes,
    note_gap_with_waits,
    note_host_wait,
    note_unknown_host,
    say_why_shorter,
)
from planner_core.planning.fitting.micro_batch_numbers import GraphSource, MicroBatchNumbers, leaves_number_open
from planner_core.planning.fitting.micro_batch_size import choose_for_micro_batch_size, keep_micro_batch_size
from planner_core.planning.fitting.micro_batches import ShowFirst, choose_micro_batches
from planner_core.planning.fitting.shortage import (
    find_uneven_batch,
    note_memory,
    note_repeated_work,
    note_small_batch,
    note_uncounted_memory,
    note_uneven_vocabulary,
    note_whole_batch,
    states_can_fit,
)
from planner_core.planning.fitting.simpler import prefer_simpler
from planner_core.planning.fitting.three_axes import note_fewer_gpus, with_third_axis
from planner_core.planning.methods import (
    BASELINES,
    EXACT,
    METHODS,
    Method,
    note_own_workload,
    note_recompute,
    note_schedule,
    note_shared_workload,
    parse_layout,
)
from planner_core.planning.planner import Planner, candidate_meshes, prepare_planner
from planner_core.planning.request import THOROUGH, Progress, Request, note_default_sizes, rare_collections
from planner_core.planning.result import STAGES_PASS, Result, append_staged
from planner_core.planning.stages import (
    StagedPlan,
    add_stages_without_tool,
    find_first_staged_plan,
    find_staged_plans,
    find_stages_in_budget,
    may_use_stages,
)
from planner_core.search import TIE


@rare_collections()
def plan_model(
    request: Request,
    graph: GraphSource = None,
    progress: Progress | None = None,
    earlier_planner: Planner | None = None,
    show_first: Callable[[Plan], None] | None = None,
    passes: Mapping[str, Pass] | None = None,
    searched: tuple[Planner, Plan] | None = None,
) -> Result:
    """Find the best plan of a request, then run the passes behind it.

    `earlier_planner` and `searched` are those of `choose_step`. `show_first` gets the first plan on meshes of two axes,
    with its bound, or one with stages that is much quicker, before proofs and the passes that take most of the time.
    `passes`: those of `PASSES` by default, and none for a caller that reads the best plan only. No pass changes the best plan of
    another method than the exact search, and for T5-large the passes take half of TAP's time.

    Raises PlannerError (see `core.errors`) for all that a user can get wrong, and NoPlanFits if no plan fits the memory budget
    that the user gave.
    """
    start = time.perf_counter()
    request = request.with_tool_software()
    first = request if show_first is None else replace(request, prove=False)
    report_progress = progress or (lambda text: None)

    def show(planner: Planner, plan: Plan) -> None:
        if show_first is not None:
            staged = find_first_staged_plan(request, plan, report_progress, graph, planner)
            show_first(staged.plan if staged else plan)

    try:
        draft = replace(choose_step(first, graph, report_progress, earlier_planner, show, searched), request=request)
    except NoPlanFits as error:
        draft, passes = _choose_stages_alone(request, error, graph, report_progress), {}
    for name, apply_pass in (PASSES if passes is None else passes).items():
        draft, reason = apply_pass(draft)
        draft = replace(draft, reasons={**draft.reasons, name: reason})
    planner = draft.planner
    timings = {**planner.clock.seconds, "total": time.perf_counter() - start}
    result = Result(
        planner=planner.changed(),
        asked=request,
        source=graph,
        plans=(*map(note_gap_with_waits, draft.leading or (draft.chosen,)), *draft.trade_offs, *draft.others),
        timings_s=timings,
        notes=draft.notes,
        reasons=draft.reasons,
        planners=draft.planners,
        best_without_tool=draft.best_without_tool,
    )
    return append_staged(
        _describe_method(result, METHODS[request.method]), ((one.plan, one.planner) for one in draft.staged)
    )


def _describe_method(result: Result, method: Method) -> Result:
    """Return the result of a paper's method with a note on what its plan is."""
    if not method.objective:
        return result
    best, *others = result.plans
    best = replace(best, notes=(method.admits, *best.notes))
    return replace(result, plans=(best, *others))


def _choose_stages_alone(request: Request, error: NoPlanFits, graph: GraphSource, report_progress: Progress) -> Draft:
    """Return the draft of a stated budget that stages alone fit. Raises the error, with what stages take, if they do not fit either."""
    staged, reason = find_stages_in_budget(request, error, report_progress, graph)
    assert error.nearest is not None
    asked = replace(request, batch=error.nearest.workload.batch, accumulate=error.nearest.accumulate)
    planner = prepare_planner(asked, graph(asked) if callable(graph) else None)
    return Draft(request, graph, planner, error.nearest, report_progress, reasons={STAGES_PASS: reason}, staged=staged)


@dataclass(frozen=True, slots=True)
class Draft:
    """What the passes of a request have found so far. `reasons`: by pass, why it changed the chosen plan, or left it."""

    request: Request
    source: GraphSource
    planner: Planner
    chosen: Plan
    report_progress: Progress
    best_without_tool: BestWithoutTool | None = None
    """The best plan that no tool bounds, if the request names one that does."""
    notes: tuple[Note, ...] = ()
    leading: tuple[Plan, ...] = ()
    usual: tuple[Plan, ...] = ()
    trade_offs: tuple[Plan, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    planners: Mapping[int, Planner] = field(default_factory=dict)
    """By the samples of a global micro-batch: the planner of each baseline with another number of micro-batches."""
    staged: tuple[StagedPlan, ...] = ()
    """The best plan with stages that Megatron-LM can be told, then the best of all with stages, if they are quicker than the chosen plan.
    Where no plan fits, one with stages that takes less memory."""

    @property
    def for_tool(self) -> bool:
        """Whether a tool has to run the plan, which then may be no other than what the tool can be told."""
        return self.request.bounding_tool is not None

    @property
    def others(self) -> list[Plan]:
        """The baselines, as far as they compute as many samples at once as the request says."""
        return keep_micro_batch_size(self.request, self.usual)


FIRST_STAGES = "first stages"
"""The pass that searches stages for a first answer, in `Result.reasons`; `STAGES_PASS` searches them to the end."""
FIRST_FEWER_GPUS, FEWER_GPUS = "first fewer GPUs", "fewer GPUs"
"""The passes that search a part of the cluster, in the same way."""
Pass = Callable[[Draft], tuple[Draft, str]]
"""One step from a request to its result: the draft with what the pass found, and the reason for what it chose."""


def choose_step(
    request: Request,
    graph: GraphSource,
    report_progress: Progress,
    earlier_planner: Planner | None = None,
    show_first: ShowFirst = lambda planner, plan: None,
    searched: tuple[Planner, Plan] | None = None,
) -> Draft:
    """Return the planner and the best plan on meshes of two axes: the number of micro-batches, the mesh, what is recomputed, and every
    placement. The `earlier_planner` of the same model lends its graphs. `show_first` gets the first plan that is known.
    `searched`: what `choose_micro_batches` returned for this request, so that it is not searched again.

    Raises PlannerError, and NoPlanFits if no plan fits the memory budget that the user gave.
    """
    request.check()
    best_without_tool: BestWithoutTool | None = None
    notes: tuple[Note, ...] = ()
    has_other_aim = METHODS[request.method].describe_aim(request.objective) is not None
    leaves_workload_open = leaves_number_open(request, graph) or request.recompute == "auto"
    try:
        if request.micro_batch is not None:
            planner, chosen = choose_for_micro_batch_size(request, graph, report_progress)
            show_first(planner, chosen)
        elif has_other_aim and leaves_workload_open and request.bounding_tool is None:
            planner, chosen, notes = _choose_for_other_aim(request, graph, report_progress, earlier_planner, show_first)
        elif request.bounding_tool is None:
            planner, chosen = searched or choose_micro_batches(
                request, graph, report_progress, earlier_planner=earlier_planner, show_first=show_first
            )
        else:
            planner, chosen, best_without_tool = choose_for_tool(request, graph, report_progress)
            show_first(planner, chosen)
        if request.bounding_tool is None:
            planner, chosen = choose_shortest_step(request, graph, planner, chosen, report_progress)
    except NoPlanFits as error:
        raise error.with_memory() from None
    # What fills the memory is found by a walk through every layer: for the plan that is shown, not for each that was tried.
    chosen = replace(chosen, notes=(*chosen.notes, *note_memory(chosen, planner)))
    return Draft(request, graph, planner, chosen, report_progress, best_without_tool, notes)


def _choose_for_other_aim(
    request: Request,
    graph: GraphSource,
    report_progress: Progress,
    earlier_planner: Planner | None,
    show_first: ShowFirst,
) -> tuple[Planner, Plan, tuple[Note, ...]]:
    """Return the planner and the plan of a request that makes something else least than the step's time, and a note on its workload, which
    it leaves open.

    Its number of micro-batches and its recomputation are those of the plan of least time, as in `compare_methods`: with its own, a plan of
    the least communication does the same work on all GPUs, in micro-batches small enough. If no plan fits so, they are searched with the
    plan itself. Raises NoPlanFits and InputError.
    """
    method = METHODS[request.method]
    title = method.title if method.objective else "the least communication"
    with suppress(NoPlanFits):
        timed = replace(request, method=EXACT.name, objective="time", prove=False)
        quickest = choose_step(timed, graph, report_progress, earlier_planner)
        settled = quickest.planner.request
        shared = replace(request, batch=settled.batch, accumulate=settled.accumulate, recompute=settled.recompute)
        if quickest.chosen.fits:
            planner, plan = choose_micro_batches(shared, graph, report_progress, earlier_planner=quickest.planner)
            if plan.fits:
                show_first(planner, plan)
                return planner, plan, (note_shared_workload(planner.workload, title),)
    planner, plan = choose_micro_batches(
        request, graph, report_progress, earlier_planner=earlier_planner, show_first=show_first
    )
    return planner, plan, (note_own_workload(title),)


def close_gap(draft: Draft) -> tuple[Draft, str]:
    """Search until the gap is closed as far as it can be, if the request asks for it and the draft is that of a moment's work."""
    if not draft.request.prove:
        return draft, "as far as a moment's work does"
    if draft.planner.effort is THOROUGH or draft.chosen.optimal or not draft.chosen.fits:
        return draft, "the first search leaves no gap that could be closed"
    proven = choose_step(draft.request, draft.source, draft.report_progress, draft.planner)
    if is_no_worse(proven.chosen, draft.chosen):
        return proven, "a search for a proof follows the first plan"
    chosen = raise_bound(draft.chosen, proven.chosen)
    return replace(draft, chosen=chosen), "the search for a proof ends at a worse plan"


def is_no_worse(plan: Plan, earlier: Plan) -> bool:
    """Return whether a plan can take the place of an `earlier` one, which a search for a proof need not meet again."""
    return plan.fits and plan.cost.seconds(earlier.objective) <= earlier.cost.seconds(earlier.objective) * (1 + TIE)


def raise_bound(plan: Plan, other: Plan) -> Plan:
    """Return the `plan` with the higher bound of the two: both bounds are of the same request, and of plans of one stage."""
    bounds = [p.bound for p in (plan, other) if p.bound is not None and plan.pipeline is None]
    return replace(plan, bound=max(bounds)) if bounds else plan


def add_third_axis(draft: Draft) -> tuple[Draft, str]:
    """Look at meshes of three axes, where they can win."""
    if draft.for_tool or draft.request.micro_batch is not None:
        return draft, "a tool or a size of the micro-batch is given"
    plan = with_third_axis(draft.planner, draft.chosen, draft.report_progress)
    return replace(draft, chosen=plan), "two axes are enough" if plan is draft.chosen else "a third axis is faster"


def add_baselines(draft: Draft) -> tuple[Draft, str]:
    """Plan every baseline at micro-batches and recomputation of its own. Each says its gap, if it has one. None where nothing can fit: by
    how much each exceeds the memory would take longer than the answer."""
    draft.report_progress("baselines")
    planner, request = draft.planner, draft.planner.request
    baselines = BASELINES if states_can_fit(planner) else {}
    every = candidate_meshes(replace(request, tool=None), planner.cluster)
    numbers = MicroBatchNumbers.around(planner, draft.request, draft.source, draft.report_progress)
    work = draft.chosen.cost.gpu_time_s if draft.chosen.fits else math.inf
    recompute = draft.request.recompute
    usual = tuple(
        plan_baselines(
            planner, every, recompute, numbers, work, baselines=baselines, report_progress=draft.report_progress
        )
    )
    planners = {other.workload.graph_batch: other for other in numbers.prepared}
    if stated := plan_stated_layout(planner, draft.request, draft.source, draft.report_progress):
        planners.setdefault(stated[0].workload.graph_batch, stated[0])
        usual = (stated[1], *usual)
    used = {plan.graph_batch for plan in usual} - {planner.workload.graph_batch}
    # without what was built for the search, which takes most of a planner's memory
    bare_planners = {size: other.changed() for size, other in planners.items() if size in used}
    return replace(draft, usual=usual, planners=bare_planners), f"{len(usual)} baselines have a plan"


def take_better_baseline(draft: Draft) -> tuple[Draft, str]:
    """Choose a baseline that is better than what an unproven search found."""
    zero_stages = draft.request.zero_stages
    plan = draft.chosen if draft.for_tool else better_of_baselines(draft.chosen, draft.others, zero_stages)
    if plan is draft.chosen:
        return draft, "none is better"
    # the request of a result has the number of micro-batches of its chosen plan
    planner = draft.planners.get(plan.graph_batch, draft.planner)
    planners = {**draft.planners, draft.planner.workload.graph_batch: draft.planner.changed()}
    planners.pop(planner.workload.graph_batch)
    return replace(draft, chosen=plan, planner=planner, planners=planners), "the search had missed it"


def lead_with_simpler(draft: Draft) -> tuple[Draft, str]:
    """Let a plan on one axis lead that ties with the fastest."""
    leading = tuple(prefer_simpler(draft.planner, draft.chosen, draft.others, draft.report_progress))
    reason = "a plan on one mesh axis ties with the search's"
    if len(leading) == 1:
        reason = "no plan on one mesh axis leads in place of the search's, of one stage"
    return replace(draft, leading=leading), reason


def add_trade_offs(draft: Draft) -> tuple[Draft, str]:
    """Add the corners of the front of time and memory, without proof. Where no plan fits, there is nothing to trade."""
    if not draft.chosen.fits:
        return draft, "no plan fits"
    if draft.for_tool:  # a corner mixes placements and recomputation as no setting of a tool says
        return draft, "a tool can be told no corner of the front"
    draft.report_progress("trade-offs")
    options = candidate_meshes(draft.planner.request, draft.planner.cluster)
    corners = plan_trade_offs(draft.planner, options, draft.leading, draft.others)
    trade_offs = tuple(keep_micro_batch_size(draft.planner.request, corners))
    return replace(draft, trade_offs=trade_offs), f"{len(trade_offs)} corners that no shown plan beats"


def lead_with_least_wait(draft: Draft) -> tuple[Draft, str]:
    """Let a trade-off lead whose step is shorter than the chosen plan's, if the GPU waits for its host there."""
    lead, reason = draft.chosen, "no trade-off has a shorter step"
    if not (lead.fits and lead.objective == "time" and lead.method == "exact" and lead.cost.host_wait_s):
        return draft, reason
    best = min((p for p in draft.trade_offs if p.fits), key=lambda p: p.cost.step_time_s, default=lead)
    if best.cost.step_time_s >= lead.cost.step_time_s:
        return draft, reason
    named = replace(say_why_shorter(best), name=lead.name, optimal=False, bound=lead.bound)
    rest = leave_out_beaten((p for p in (lead, *draft.trade_offs) if p is not best), (named, *draft.others))
    return replace(
        draft, chosen=named, leading=(named,), trade_offs=tuple(name_trade_offs(rest))
    ), "a trade-off waits less for its host"


def add_notes(draft: Draft) -> tuple[Draft, str]:
    """Say what a reader has to know beside the numbers; samples that cannot be dealt out evenly come first."""
    planner, chosen = draft.planner, draft.chosen
    uneven = find_uneven_batch(planner)
    chosen_notes = note_repeated_work(chosen, f"in {name_in_notes(chosen)} ") if chosen.fits else chosen.notes
    layout = planner.request.layout
    sentences = (
        *note_recompute(draft.request.recompute, draft.request.tool),
        *(note_host_wait(chosen) if chosen.fits else ()),
        *note_whole_batch(chosen, planner.graph),
        *note_uncounted_memory(chosen, planner.graph),
        *assumed_node_notes(planner.cluster),
        *slow_dtype_notes(planner.cluster.gpu, planner.workload.dtype),
        *planner.workload.assumptions,
        *planner.graph.assumptions,
        *note_missing_baselines(planner, draft.request, draft.usual),
        *note_uneven_vocabulary(layout, planner.graph),
        *(note_schedule(parse_layout(layout), planner.request.stack) if layout is not None else ()),
    )
    # the note on repeated work names the batch that would do already
    repeated = any(note.kind is NoteKind.REPEATED_WORK for note in (*chosen_notes, *chosen.notes))
    few = (
        ()
        if repeated
        else note_small_batch(planner.workload.batch, planner.cluster.num_gpus, draft.request.accumulate or 1)
    )
    first = (uneven.note,) if uneven and chosen.fits else few
    asked = draft.request
    batch = asked.batch is None and planner.request.batch is not None
    # A graph and example inputs have the tokens that they were made with.
    seq = asked.seq is None and not isinstance(draft.source, Graph) and not brings_inputs(asked.model)
    first = (*first, *note_default_sizes(planner.workload, planner.cluster.num_gpus, batch=batch, seq=seq))
    unknown_host = note_unknown_host(chosen, planner.graph) if chosen.fits else ()
    notes = (*draft.notes, *first, *chosen_notes, *unknown_host, *map(Note, sentences))
    # No later pass reads what was built for the search, which takes most of the memory.
    return replace(draft, notes=notes, planner=planner.changed()), f"{len(notes)} notes"


def add_fewer_gpus(draft: Draft) -> tuple[Draft, str]:
    """Say whether a part of the cluster would be faster, which may take as long as the search of the chosen plan."""
    notes = note_fewer_gpus(draft.planner, draft.chosen, draft.request, draft.source, draft.report_progress)
    reason = "a part of the cluster is faster" if notes else "every GPU has work, or no part of the cluster is faster"
    return replace(draft, notes=(*draft.notes, *map(Note, notes))), reason


def add_fewer_gpus_unless_later(draft: Draft) -> tuple[Draft, str]:
    """Run `add_fewer_gpus` in a first answer, unless `add_stages` follows and runs it."""
    return (draft, "with the stages") if is_completed_later(draft) else add_fewer_gpus(draft)


def is_completed_later(draft: Draft) -> bool:
    """Return whether `add_stages` follows an answer."""
    # The page does not search stages of an exported program, which comes from a function as other uploaded models do.
    return draft.source is None and may_use_stages(draft.request, draft.planner.cluster)


def add_first_stages(draft: Draft) -> tuple[Draft, str]:
    """Search a moment for a plan with pipeline stages, for an answer before `search_stages`: where stages are much quicker than the chosen
    plan, as on slow links, that plan is no answer."""
    first = find_first_staged_plan(draft.request, draft.chosen, draft.report_progress, draft.source, draft.planner)
    if first is None:
        return draft, "a moment's search finds no stages that are much quicker"
    return replace(draft, staged=(first,)), "stages are much quicker"


def search_stages(draft: Draft) -> tuple[Draft, str]:
    """Search the best plan with pipeline stages, where stages may win and the request leaves them open; and without the request's tool."""
    if draft.best_without_tool is not None:
        draft = replace(
            draft,
            best_without_tool=add_stages_without_tool(
                draft.best_without_tool, draft.report_progress, draft.source, draft.planner
            ),
        )
    asked = draft.request, draft.chosen, draft.usual, draft.report_progress, draft.source, draft.planner
    try:
        staged, reason = find_staged_plans(*asked)
    except PlannerError as error:  # the answer of one stage stands without it
        return draft, f"stages could not be searched: {error.sentence}"
    return replace(draft, staged=staged), reason


ONE_STAGE_PASSES: Mapping[str, Pass] = {
    "proof": close_gap,
    "third axis": add_third_axis,
    "baselines": add_baselines,
    "no worse than a baseline": take_better_baseline,
    "simpler": lead_with_simpler,
    "trade-offs": add_trade_offs,
    "least wait": lead_with_least_wait,
    "notes": add_notes,
    FEWER_GPUS: add_fewer_gpus,
}
"""What follows the first plan of one stage, in order. What changes the chosen plan stands before the baselines, which are compared with
it."""
FIRST_PASSES: Mapping[str, Pass] = {
    **{name: one for name, one in ONE_STAGE_PASSES.items() if name != FEWER_GPUS},
    FIRST_FEWER_GPUS: add_fewer_gpus_unless_later,
    FIRST_STAGES: add_first_stages,
}
"""The passes of an answer to which `add_stages` and `prove` add: that of the page."""
PASSES: Mapping[str, Pass] = {**ONE_STAGE_PASSES, STAGES_PASS: search_stages}
"""The whole way of a request. Stages stand last since their search starts from the best plan of one stage and takes the longest."""
