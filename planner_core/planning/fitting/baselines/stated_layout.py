"""The plan of the layout that a request states."""

from __future__ import annotations

from dataclasses import replace

from planner_core.core import (
    Graph,
    Note,
    Plan,
    Sentence,
    named,
)
from planner_core.cost import micro_batch
from planner_core.planning.fitting.micro_batch_numbers import GraphSource
from planner_core.planning.fitting.shortage import note_memory
from planner_core.planning.methods import parse_layout
from planner_core.planning.planner import Planner, prepare_planner, with_recompute
from planner_core.planning.request import Progress, Request


def plan_stated_layout(
    planner: Planner, request: Request, source: GraphSource, report_progress: Progress
) -> tuple[Planner, Plan] | None:
    """Return the plan of the layout that the `request` states, and its planner; None if it states none. `planner`: that of the chosen plan.

    What the request leaves open of such a run is settled here: its micro-batches by `Layout.count_micro_batches`, and recomputation, of
    which it has none. A note of the plan says so. Raises InputError if the model cannot follow the layout.
    """
    if request.layout is None:
        return None
    layout, number = parse_layout(request.layout), planner.workload.accumulate
    if request.accumulate is None and not isinstance(source, Graph):
        number = layout.count_micro_batches(planner.workload.batch, number, request.micro_batch)
    if number != planner.workload.accumulate:
        stated = replace(planner.request, batch=planner.workload.batch, accumulate=number)
        graph = source(stated) if callable(source) else None
        planner = prepare_planner(stated, graph, report_progress, planner.effort, planner)
    planner = with_recompute(planner, "none" if request.recompute == "auto" else request.recompute)
    plan = planner.stated(layout)
    unfit = () if plan.fits else (Note("does not fit: its step is that of a GPU with more memory"),)
    plan = replace(plan, notes=(*unfit, *plan.notes, *note_memory(plan, planner)))
    left_open = [named("micro_batch")] if (request.accumulate, request.micro_batch) == (None, None) else []
    left_open += [named("recompute")] if request.recompute == "auto" else []
    if not left_open:
        return planner, plan
    settled = (
        f"priced with micro-batch {micro_batch(plan)} x {number} and recomputation {planner.workload.recompute}, since "
    )
    was = " was not given" if len(left_open) == 1 else " were not given"
    note = Note(Sentence(settled, Sentence.from_list(" and ", left_open), was))
    return planner, replace(plan, notes=(note, *plan.notes))
