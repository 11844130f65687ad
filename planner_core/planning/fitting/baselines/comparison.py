"""Baselines and methods beside the chosen plan: which of them takes its place, and what a restriction costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from planner_core.core import (
    ZERO,
    Note,
    NoteKind,
    Plan,
    Sentence,
    time_amount,
)
from planner_core.cost import zero_stage
from planner_core.planning.fitting.mesh_search import check_bound_below


def describe_restriction_cost(plan: Plan, exact: Mapping[str, Plan]) -> Sentence:
    """Return a sentence: step and communication of a method's plan, then both of each plan of the exact search (`exact`, by its row).

    The plan of the shortest step need not communicate least, so there may be no plan that is best in both. Example:
    "a step takes 488.4 ms, its communication 88.14 ms; of best 273.3 ms and 26.8 ms; of least communication 536 ms and 0.5977 ms".
    Raises SearchFault if the method's plan is better than the bound of a plan of the exact search, whose space holds it.
    """
    for best in exact.values():
        check_bound_below(best, [plan])

    def both(words: tuple[str, str], of: Plan) -> Sentence:
        return Sentence(words[0], time_amount(of.cost.step_time_s), words[1], time_amount(of.cost.comm_time_s))

    parts = [both(("a step takes ", ", its communication "), plan)]
    parts += [both((f"of {row} ", " and "), best) for row, best in exact.items()]
    return Sentence.from_list("; ", parts)


def better_of_baselines(chosen: Plan, others: Iterable[Plan], zero_stages: Sequence[int] = ZERO) -> Plan:
    """Return the chosen plan; or a baseline that fits, has one of the ZeRO stages that the request leaves open, and is better.

    It may be if the search proved nothing and missed it, if the chosen plan does not fit, or if the GPU waits for its host: the search
    minimises the GPU's part of the step, and a plan with fewer messages and uncut weights takes the host less. Example: GPT-2 XL with
    2 x 1 024 tokens a GPU on 16 GPUs keeps the GPU busy for 91 ms fully sharded and 117 ms data parallel, and the host for 297 and 211 ms.
    """
    timed = chosen.objective == "time"

    def value(plan: Plan) -> float:
        return plan.cost.step_time_s if timed else plan.cost.comm_time_s

    if chosen.method != "exact":
        return chosen
    admitted = [p for p in others if p.fits and zero_stage(p) in zero_stages]
    check_bound_below(chosen, admitted)
    if chosen.fits and chosen.is_step_proven:
        return chosen
    better = min(admitted, key=value, default=chosen)
    if better is chosen or (chosen.fits and value(better) >= value(chosen)):
        return chosen
    if not chosen.fits:
        why = "which fits, while no plan of the search does"
    elif chosen.optimal:
        why = "whose GPU waits less for its host than that of the plan with the least work"
    elif timed:
        why = "whose step is shorter than that of what the search found, which minimises the GPU's part, without waits for the host"
    else:
        why = "which is better than what the search found"
    # A plan that does not fit is bounded in memory, not in time, and the bound of one pipeline stage says nothing of several.
    bound = chosen.bound if chosen.fits else None
    # How the chosen plan was laid out, and what fills its memory, is not said of the plan in its place.
    notes = tuple(note for note in chosen.notes if note.kind in (NoteKind.SCOPE, NoteKind.GAP))
    if better.pipeline is not None:
        notes = (_note_open_gap(bound if timed else None), *(n for n in notes if n.kind is not NoteKind.GAP))
        bound = None
    return replace(
        better,
        name=chosen.name,
        role=chosen.role,
        method=chosen.method,
        objective=chosen.objective,
        optimal=False,
        bound=bound,
        notes=(Note(f"laid out as {better.name}, {why}"), *notes),
    )


def _note_open_gap(one_stage_s: float | None) -> Note:
    """Return a note on the gap of a stated layout with stages. `one_stage_s`: a lower bound on the step of every plan of
    one pipeline stage, if known."""
    bound_words = (": no plan of one pipeline stage takes less than ", time_amount(one_stage_s)) if one_stage_s else ()
    return Note(Sentence("not proven", *bound_words), NoteKind.GAP)
