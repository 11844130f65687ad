"""The plan of least memory, where no plan fits; and what every plan takes at least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from planner_core.core import (
    ITEM_BYTES,
    DeviceMesh,
    NoPlanFits,
    Note,
    NoteKind,
    Plan,
    Sentence,
    Term,
    memory_amount,
    named,
)
from planner_core.cost.memory import weight_bytes
from planner_core.planning.fitting.shortage.memory_parts import describe_memory
from planner_core.planning.fitting.shortage.uneven import note_idle_gpus, note_repeated_work
from planner_core.planning.methods.registry import EXACT, METHODS
from planner_core.planning.planner import MeshAnswer, Planner, candidate_meshes
from planner_core.search import Answer, memory_bytes
from planner_core.search.algebra import TooWide
from planner_core.search.network import Problem

BUFFERS, NEARLY = 0.02, 1.1
"""If the peak of the plan of least memory is above its sum by more than the share BUFFERS, and its sum is at most NEARLY of the budget,
plans without gathered weights are looked at."""


def least_state_bytes(planner: Planner) -> int:
    """Weights, gradients and states of a GPU if all GPUs share them evenly: no plan holds less, whatever its mesh and micro-batches."""
    graph, total = planner.graph, 0
    repeated = [(graph.blocks[name], times) for name, times in graph.num_repeats.items()]
    for block, times in ((graph.top, 1), *repeated):
        # A weight among a block's inputs is the caller's, where it counts once for all copies that share it.
        for v in block.own_parameters.values():
            item = weight_bytes(ITEM_BYTES[v.meta.dtype], v.grad, planner.workload)
            total += times * math.prod(v.meta.shape) * (item.stored + item.moments + item.updated)
    return total // planner.cluster.num_gpus


def states_can_fit(planner: Planner) -> bool:
    """Return whether weights, gradients and states fit if all GPUs share them evenly. If not, no plan fits."""
    return least_state_bytes(planner) <= planner.budget


def note_oversized_states(planner: Planner) -> tuple[str, ...]:
    """Return a sentence about baselines if not even evenly shared states fit: then none is planned."""
    if states_can_fit(planner):
        return ()
    # The plan of least memory, of which this is a report, says how much there is.
    needed, _ = _amounts(least_state_bytes(planner), planner.budget)
    why = "no baseline is planned, since none can fit: evenly shared weights, gradients and states alone take "
    return (Sentence(why, needed, " per GPU"),)


def note_shortage(smallest: Plan, planner: Planner, at_least: float) -> tuple[Note, ...]:
    """Return the notes of a plan of least memory, `smallest`, that needs more than the planner's budget. `at_least`: the network's sum for
    that plan, a lower bound for all plans. If it is far below the plan's peak, another plan may have a lower peak."""
    peak = smallest.cost.memory_bytes["peak"]
    most = "" if peak <= at_least * (1 + BUFFERS) else "at most "
    amounts = needed_and_available(peak, planner.budget)
    needs = Sentence("the least memory that ", searched_plans(planner), f" needs is {most}", amounts)
    return Note(needs, NoteKind.SHORTAGE), *(note_idle_gpus(smallest, planner.graph) or note_repeated_work(smallest))


def searched_plans(planner: Planner) -> Sentence:
    """Return the plans among which a planner looked for the one of least memory, as the subject of a sentence.

    Example: "any plan of one stage", or "any plan of one stage with TAP, in one micro-batch, recompute=none". Nobody looks at stages where
    a plan of one stage does not fit a stated budget, so that the sentence must not speak of all plans.
    """
    request, method = planner.request, METHODS[planner.request.method]
    bounds: list[str | Term] = [] if method is METHODS[EXACT.name] else [f"with {method.title}"]
    bounds += [Sentence("on ", named("mesh", request.mesh))] if request.mesh else []
    if not planner.counts_open:
        count = planner.workload.accumulate
        bounds.append("in one micro-batch" if count == 1 else f"in {count:,} micro-batches")
    bounds += [named("recompute", request.recompute)] if request.recompute != "auto" else []
    return Sentence("any plan of one stage", " " * bool(bounds), Sentence.from_list(", ", bounds))


def needed_and_available(needed: float, budget: float) -> Sentence:
    """Return how many bytes a GPU needs and has, with as many digits as tell them apart."""
    needs, has = _amounts(needed, budget)
    return Sentence(needs, " per GPU, but there are ", has)


def _amounts(needed: float, budget: float) -> tuple[Term, Term]:
    first = 1 if budget > 2**30 else 4
    digits = next((d for d in range(first, 9) if f"{needed / 2**30:.{d}f}" != f"{budget / 2**30:.{d}f}"), 9)
    needs, has = (memory_amount(n, f".{digits}f") for n in (needed, budget))
    return needs, has


def needs_buffers(answer: Answer, budget: float) -> bool:
    """Return whether the network's sum of the least memory nearly fits, and its peak is well above the sum. Buffers for gathered weights
    may be why: the sum does not hold them."""
    sum_bytes = memory_bytes(answer.smallest) if answer.smallest else float("inf")
    return sum_bytes <= budget * NEARLY and answer.least_memory > sum_bytes * (1 + BUFFERS)


def note_meshes_left_out(plan: Plan, wide: TooWide | None) -> Plan:
    """Return the best plan of the meshes that were searched. `wide`: the error of a mesh that was not, which may have a better one."""
    if wide is None:
        return plan
    sentence = f"not proven: a mesh was left out, since its search needs a table of {wide.entries:.2g} numbers"
    # The gap of the meshes that were searched says nothing about the one that was not.
    rest = (note for note in plan.notes if note.kind is not NoteKind.GAP)
    return replace(plan, optimal=False, bound=None, notes=(Note(sentence, NoteKind.SCOPE), *rest))


def refuse_or_least_memory(
    planner: Planner,
    options: Sequence[DeviceMesh],
    below: float,
    least_memory: MeshAnswer | None,
    wide: TooWide | None,
    bound: float,
) -> Plan:
    """Return what `choose_mesh` gives or raises if no plan fits on the meshes. `least_memory`: the answer of least memory."""
    # A search below a known value does not look for the least memory, so it has none to tell.
    if below < float("inf"):
        raise NoPlanFits(f"no plan that fits is better than {below:.4g}", bound=min(below, bound))
    if least_memory is None and wide is not None:
        raise wide
    if least_memory is None:
        raise NoPlanFits(
            "no plan of this model can run on these meshes; try another ", named("mesh"), " or ", named("batch")
        )
    every = {mesh.axis_sizes for mesh in candidate_meshes(planner.request, planner.cluster)}
    # Of meshes that were not looked at no more is known than what evenly shared states take.
    all_meshes = every <= {mesh.axis_sizes for mesh in options}
    sum_bytes = (
        memory_bytes(least_memory.answer.smallest)
        if all_meshes and least_memory.answer.smallest
        else least_state_bytes(planner)
    )
    return _plan_of_least_memory(planner, least_memory.answer, least_memory.problem, bound, sum_bytes)


def _plan_of_least_memory(planner: Planner, answer: Answer, problem: Problem, bound: float, at_least: float) -> Plan:
    """Return the plan of least memory, which does not fit. Raises NoPlanFits if the user gave a budget. `at_least`: a lower
    bound on the bytes of every plan.

    `bound`: a lower bound on the value of every plan that fits, since a search without a proof may have missed one. It is infinite if no
    plan fits, and the returned plan then has no bound.
    """
    assert answer.smallest is not None
    smallest = Answer(answer.smallest, 0.0, 0.0, answer.least_memory)
    objective = planner.objective()
    plan = planner.plan(problem, smallest, "least memory", planner.request.method, objective)
    first, *rest = note_shortage(plan, planner, at_least)
    shortage = replace(first, sentence=Sentence("does not fit: ", first.sentence))
    finite_bound = bound if bound < float("inf") else None
    unfit = replace(plan, fits=False, optimal=False, bound=finite_bound, notes=(shortage, *rest))
    if planner.request.memory_gb is not None:
        peak = plan.cost.memory_bytes["peak"]
        helps: list[str | Term] = ["more GPUs", Sentence("a smaller ", named("batch"))]
        if not planner.counts_open and planner.workload.graph_batch > 1:
            helps.append(Sentence("a larger ", named("accumulate")))
        helps += [] if planner.workload.recompute in ("auto", "full") else [named("recompute", "full")]
        short = Sentence.from_list("; ", (note.sentence for note in (first, *rest)))
        enough = math.ceil(peak / 1e9)
        last: str | Term
        if enough * 1e9 <= planner.cluster.gpu.memory_bytes:
            *helps, last = *helps, named("memory_gb", enough)
        else:  # no budget that the GPU can hold is enough
            *helps, last = helps
        filled = partial(describe_memory, plan, planner.graph, planner.budget)
        message = ("no plan fits: ", short, "; use ", Sentence.from_list(", ", helps), " or ", last)
        raise NoPlanFits(*message, needed_bytes=peak, bound=bound, describe_memory=filled, nearest=unfit)
    return unfit
