"""The plan of the shortest step, where the GPU waits for its host.

The search minimises the GPU's own part of a step, which is a sum over operators. Where the host issues kernels more slowly than they
run, the step is longer than that part, and the plan of the least work need not have the shortest step. So where the plan of the search
waits, other plans of the request's space are priced whole: every layout that a team can state, and the plan of the least work on each
mesh. An answer then takes at most MAX_STEP_EXCESS longer than a layout of its space, of the numbers of micro-batches that are looked at.

Example: GPT-2 XL with two samples a GPU on 16 GPUs. ZeRO-2 keeps the GPU busy for 83 ms and its host for 285, plain data parallelism
the GPU for 117 ms and the host for 211.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from planner_core.core import (
    USUAL_STACK,
    ZERO,
    DeviceMesh,
    Graph,
    Note,
    NoteKind,
    Plan,
    PlannerError,
    Sentence,
    load_stack,
    named,
    parse_mesh,
    time_amount,
)
from planner_core.cost import (
    Bools,
    CostModel,
    block_of,
    bound_host_seconds,
    cost_model_of,
    host_seconds,
    least_host_seconds,
)
from planner_core.planning.fitting.mesh_search import choose_mesh
from planner_core.planning.fitting.micro_batch_numbers import GraphSource, MicroBatchNumbers
from planner_core.planning.fitting.micro_batch_size import keep_micro_batch_size
from planner_core.planning.fitting.micro_batches import bound_on_mesh
from planner_core.planning.methods import EXACT, TOOLS, Layout, list_layouts, unsearchable_faults
from planner_core.planning.planner import Planner, candidate_meshes
from planner_core.planning.request import Progress, Request
from planner_core.search import (
    FIRST_BUDGET_FACTOR,
    LeastEntries,
    Objective,
    SearchLimits,
    describe_excess,
    make_block_plans,
    memory_bytes,
    no_plan_fits,
    search_roughly,
    search_within_budget,
)
from planner_core.search.algebra import Incumbent, PointAllowance, TooWide, best_first
from planner_core.search.network import Problem, tensor_name

WORD = "layouts whose GPU waits less for its host"
MAX_STEP_EXCESS = 0.005
"""A step that is longer than the host takes at least by this share is short enough: no other layout is looked at."""


def choose_shortest_step(
    request: Request, source: GraphSource, planner: Planner, plan: Plan, report_progress: Progress
) -> tuple[Planner, Plan]:
    """Return the plan of the shortest step, with its planner: `plan`, the search's, or one whose GPU waits less for its host.

    `planner`: that of `plan`, whose space is that of the request. Other numbers of micro-batches are looked at where the request leaves
    them open: smaller ones as long as they help, larger ones while the host may issue so many in less than the best step.
    """
    timed = planner.request.method == EXACT.name and plan.objective == "time"
    # A form that takes layers by name has plans of its own, which no layout states.
    tool = TOOLS.get(str(request.tool))
    if not (timed and plan.fits and plan.cost.host_wait_s) or (tool and tool.pairs):
        return planner, plan
    best = Incumbent(plan.cost.step_time_s, (planner, plan))
    _take_shorter(planner, best, report_progress)
    numbers, number = MicroBatchNumbers.around(planner, request, source, report_progress), planner.workload.accumulate
    for fewer in numbers.smaller_than(number):
        value_before = best.value
        # The planner of a plan that fits without recomputation has none; fewer micro-batches may fit with it alone.
        _take_shorter(numbers.under(fewer, request.recompute), best, report_progress)
        if best.value == value_before:
            break
    model = cost_model_of(plan)
    # The next number is at least twice as large, and the host issues every operator in every micro-batch.
    while least_host_seconds(planner.graph, model, 2 * number) < best.value:
        number = numbers.after(number)
        following = numbers.at(number)
        if following is None:
            break
        _take_shorter(following, best, report_progress)
    assert best.solution is not None
    chosen, shortest = best.solution
    if shortest is plan:
        return planner, plan
    shortest = replace(shortest, name=plan.name, role=plan.role, method=plan.method, optimal=False, bound=plan.bound)
    return replace(chosen, counts_open=planner.counts_open), shortest


def _take_shorter(planner: Planner, best: Incumbent[tuple[Planner, Plan]], report_progress: Progress) -> None:
    """Take this planner's plan of the shortest step in place of the best one, if its step is shorter."""
    assert best.solution is not None
    # An allowance of its own: proofs of the plan that the search found must not change what is found here.
    looking = replace(planner, work=PointAllowance(planner.effort.request))
    enough_s = least_host_seconds(planner.graph, cost_model_of(best.solution[1]), planner.workload.accumulate)
    enough_s *= 1 + MAX_STEP_EXCESS
    if best.value <= enough_s:
        return
    # A tool's spaces are its layouts.
    meshes = [] if planner.spaces else candidate_meshes(planner.request, planner.cluster)
    # A step is not shorter than the GPU's least work, whose networks the search has built. Example: Jamba on 16 H100 waits for 2 % of its
    # step, and 20 of its 27 layouts are on meshes whose work takes longer.
    work_s = {mesh.axis_sizes: bound_on_mesh(planner, mesh, relaxed=False) for mesh in meshes}
    layouts = _list_admitted_layouts(planner)
    layouts = [x for x in layouts if work_s.get(x.mesh().axis_sizes, 0.0) < best.value]
    # A bound of a layout takes a fifteenth of its first estimate, and excludes most. A plan of it takes ten times as long to find as its
    # first estimate and three times as long as its second.
    bounds: list[Callable[[Layout], float]] = [
        _LayoutBounds(planner).seconds,
        partial(_estimate_layout_s, planner, report_progress),
        partial(_estimate_layout_s, planner, report_progress, budget=planner.budget * FIRST_BUDGET_FACTOR),
    ]
    for layout in best_first(layouts, bounds, lambda: best.value if best.value > enough_s else 0.0):
        report_progress(WORD)
        if (plan := _plan_layout(looking, layout, best.value)) is not None:
            best.offer(plan.cost.step_time_s, (planner, plan))
    if best.value <= enough_s:
        return
    meshes = [mesh for mesh in meshes if _estimate_mesh_s(planner, mesh) < best.value]
    for prove in (False, True):
        plans = [p for p in _plan_meshes(looking, meshes, report_progress, prove) if p.fits]
        shortest = min(plans, key=lambda p: p.cost.step_time_s, default=None)
        if shortest is None or shortest.cost.step_time_s >= best.value:
            return
        # Without a proof each mesh takes hundredths of a second. That of the shortest step is searched to the end: its step is often
        # shorter by some tenths of a per cent.
        best.offer(shortest.cost.step_time_s, (planner, shortest))
        meshes = [shortest.mesh]


def _plan_layout(planner: Planner, layout: Layout, below: float) -> Plan | None:
    """Return the plan of a layout if it fits and its step takes less than `below` seconds; else None."""
    with suppress(PlannerError, TooWide):
        plan = planner.of_layout(layout)
        if plan is not None and plan.fits and plan.cost.step_time_s < below:
            plan = say_why_shorter(plan, f"laid out as {layout}, whose")
            return next(iter(keep_micro_batch_size(planner.request, [plan])), None)
    return None


class _LayoutBounds:
    """Bounds of `_estimate_layout_s`, for which no network of a layout is built and solved."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self._entries: dict[int, LeastEntries] = {}

    def seconds(self, layout: Layout) -> float:
        """Return seconds that no estimate of a layout is below: the GPU's work, and the host's calls of operators and of weights of which a
        rank stores a part. Infinite if the layout has no plan.

        Example: of 39 layouts of BERT-large with 16 samples on 16 H100 all but data parallelism store parts of weights or states, and
        those calls alone take longer than its step.
        """
        planner = self.planner
        # Most layouts fail at the samples, which costs nothing to see.
        if planner.workload.graph_batch % layout.data or unsearchable_faults(planner.graph, layout):
            return math.inf
        with suppress(PlannerError, TooWide):
            space = layout.space()
            # The networks of the search, which have every stage, serve all layouts of their mesh.
            model = replace(planner.model_of_space(space), stages=ZERO)
            entries = self._entries_of(model)
            allowed = entries.allowed(space.restriction(planner.graph))
            sharded = {name: _count_sharded(planner.graph, entries, name, states) for name, states in allowed.items()}
            host_s = bound_host_seconds(planner.graph, model, planner.workload.accumulate, sharded)
            return max(entries.bound(allowed), host_s)
        return math.inf

    def _entries_of(self, model: CostModel) -> LeastEntries:
        """Return the tables of a cost model, which many layouts share."""
        nets = self.planner.networks.unrestricted(model)
        if id(nets) not in self._entries:
            self._entries[id(nets)] = LeastEntries(nets, Objective("time", model.step_time).weights())
        return self._entries[id(nets)]


def _count_sharded(graph: Graph, entries: LeastEntries, name: str, allowed: Mapping[str, Bools]) -> int:
    """Return the number of trained weights of one copy of a block of which a rank stores a part in each allowed state."""
    tensors = entries.first_variant(name).tensors
    number = 0
    for v, value in block_of(graph, name).own_parameters.items():
        states = tensors.get(tensor_name(v))
        if value.grad and states is not None:
            number += bool(states.is_stored_in_parts.all(where=allowed.get(tensor_name(v), True)))
    return number


def _estimate_layout_s(
    planner: Planner, report_progress: Progress, layout: Layout, *, budget: float = math.inf
) -> float:
    """As `_estimate_step_s`, of a layout."""
    report_progress(WORD)
    with suppress(PlannerError, TooWide):
        return _estimate_step_s(planner, planner.of_space(layout.space()), budget)
    return math.inf


def _estimate_mesh_s(planner: Planner, mesh: DeviceMesh) -> float:
    """As `_estimate_step_s`, of the plan of the least work on a mesh."""
    with suppress(PlannerError, TooWide):
        return _estimate_step_s(planner, planner.problem(mesh), planner.budget * FIRST_BUDGET_FACTOR)
    return math.inf


def _estimate_step_s(planner: Planner, problem: Problem, budget: float) -> float:
    """Return the least that a step is taken to last: the GPU's work and what the host issues, judged by the plan of the least work whose
    sum of memory is within `budget` bytes; where none is, by the plan of the least memory. Infinite if no plan fits.

    Recomputation issues the kernels of a forward pass once more. Example: a T5 of 2 x 1 000 layers with 8 data and 2 tensor ranks takes
    17.9 s without, where 1 410 GiB are too many, and 23.0 s with it.
    """
    least_work = None if problem.is_infeasible else search_roughly(problem, "time")
    # That a plan fits is seen at once where the plan of the least work does, and takes a tenth of an estimate elsewhere.
    if least_work is None or (memory_bytes(least_work) > planner.budget and no_plan_fits(problem, planner.budget)):
        return math.inf
    assignment, bound = least_work, least_work.bound
    if memory_bytes(least_work) > budget:
        answer = search_within_budget(problem, budget=budget, limits=SearchLimits(prove=False))
        if answer.assignment is not None:
            assignment, bound = answer.assignment, answer.bound
        elif answer.smallest is not None:
            # No sum is within the budget, and a plan whose peak is holds hardly more than this one.
            assignment = answer.smallest
    host = host_seconds(make_block_plans(problem, assignment), planner.graph, problem.model)
    return max(bound, planner.workload.accumulate * (host.forward + host.backward) + host.step)


def _list_admitted_layouts(planner: Planner) -> list[Layout]:
    """Return the layouts of the request's space: its tool's, or all on two axes, on its mesh and with its ZeRO stage; those that send the
    fewest messages first."""
    request, gpus = planner.request, planner.cluster.num_gpus
    sizes = request.mesh and parse_mesh(request.mesh, gpus).axis_sizes
    every = [s.layout for s in planner.spaces] or list_layouts(planner.graph, planner.workload.batch, gpus)
    admitted = [
        x for x in every if set(request.zero_stages).issuperset(x.stages) and sizes in (None, x.mesh().axis_sizes)
    ]
    return sorted(admitted, key=lambda x: (x.cp, x.tp, x.sp, x.ep, x.fsdp > 1, x.zero))


def _plan_meshes(planner: Planner, meshes: Iterable[DeviceMesh], report_progress: Progress, prove: bool) -> list[Plan]:
    """Return the plan of the least work on each mesh that has one. A mesh of fewer axes needs fewer messages."""
    plans = []
    for mesh in meshes:
        with suppress(PlannerError):
            plans.append(say_why_shorter(choose_mesh(planner, [mesh], report_progress, prove=prove)))
    return keep_micro_batch_size(planner.request, plans)


def name_in_notes(plan: Plan) -> str:
    """Return how a note of the whole answer names its chosen plan: one with stages may stand beside it, of which the note does not hold."""
    return "the best plan of one pipeline stage" if plan.pipeline is None else plan.name


def note_host_wait(plan: Plan) -> tuple[str, ...]:
    """Return a sentence about the wait for the host in the step of a chosen plan: the search does not minimise it, so it is bounded here.

    It names the plan, since one with stages may be recommended behind it."""
    waits, bound = plan.cost.host_wait_s, plan.bound if plan.pipeline is None else None
    if not waits or plan.objective != "time":
        return ()
    bound_words = Sentence(", and no such plan's step is shorter than ", time_amount(bound)) if bound else ""
    # A compiled block counts as a fixed number of calls (docs/COST_MODEL.md), so one of few operators may wait longer: ViT-Large does.
    remedy = ("wait less",) if plan.workload.compiled else ("wait less, and ", named("compiled"), " may")
    note = Sentence(
        "in ",
        time_amount(waits),
        f" of the step of {name_in_notes(plan)} the GPU waits for its host, which issues kernels more slowly than they run; the search ",
        "minimises the GPU's own part, ",
        time_amount(plan.cost.gpu_time_s),
        bound_words,
        "; larger micro-batches ",
        *remedy,
    )
    return (note,)


def note_unknown_host(plan: Plan, graph: Graph) -> tuple[Note, ...]:
    """Return a note where the pace of the stack's host was not measured, and at PyTorch's the host would be slower than the step.

    Example: ViT-large with 16 samples a GPU takes 46 ms on torchtitan's stack, without waits, and 157 ms on PyTorch's, with them."""
    model = cost_model_of(plan)
    if model.software.call_s:
        return ()
    host = host_seconds(plan.blocks, graph, model, load_stack(USUAL_STACK).call_s)
    ranks = (
        plan.pipeline.ranks if plan.pipeline else 1
    )  # each rank of a pipeline has a host, which issues its stages alone
    issued_s = (plan.accumulate * (host.forward + host.backward) + host.step) / ranks
    if issued_s <= plan.cost.step_time_s:
        return ()
    note = Sentence(
        f"how fast a host issues the kernels of {model.software.name} was not measured, so the step, ",
        time_amount(plan.cost.step_time_s),
        ", has no waits for it; at PyTorch's pace the host needs about ",
        time_amount(issued_s),
    )
    return (Note(note, NoteKind.UNKNOWN_HOST),)


def note_gap_with_waits(plan: Plan) -> Plan:
    """Return the plan with the gap of its step, if it waits for its host: the gap of the search is of the GPU's part, and of another plan
    where a layout or a baseline has taken its place."""
    if not (plan.fits and plan.objective == "time" and plan.cost.host_wait_s and plan.bound):
        return plan
    gap = Note(describe_gap_with_waits(plan, plan.bound), NoteKind.GAP)
    return replace(plan, notes=(gap, *(note for note in plan.notes if note.kind is not NoteKind.GAP)))


def describe_gap_with_waits(plan: Plan, bound: float) -> str:
    """Return the distance between a step that waits for its host and the bound, in words. Example: a step of 211 ms above a bound of 82.5
    ms."""
    above = describe_excess(plan.cost.step_time_s, bound, "bound")
    return f"{'proven but for waits' if plan.optimal else 'not proven'}: {above}, which leaves out waits for the host"


def say_why_shorter(plan: Plan, whose: str = "its") -> Plan:
    """Return the plan with a note, its only one, on why its step is shorter."""
    note = Note(f"{whose} GPU waits less for its host than that of the plan with the least work")
    return replace(plan, notes=(note,))
