"""Why baselines have no plan of a model on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from planner_core.core import (
    ZERO,
    Plan,
    PlannerError,
    Sentence,
    Term,
    named,
)
from planner_core.cost import micro_batch
from planner_core.planning.fitting.shortage import note_oversized_states
from planner_core.planning.methods import BASELINES, Method, parse_layout
from planner_core.planning.methods.legality import operator_faults, undecided_fault
from planner_core.planning.planner import Planner, candidate_meshes
from planner_core.planning.request import Request

DEAL_OUT_SAMPLES = ("data-parallel", "fsdp")
"""The baselines that give every GPU samples of its own."""


def note_missing_baselines(planner: Planner, request: Request, plans: Sequence[Plan]) -> tuple[str, ...]:
    """Sentences about the baselines that do not have a plan of this model on these meshes, or none of the micro-batch that is asked for."""
    if oversized := note_oversized_states(planner):
        return oversized
    planned, size, notes = {p.method for p in plans}, request.micro_batch, list[str]()
    missing = [b for b in BASELINES.values() if b.name not in planned and b.suits(planner.graph)]
    if missing:
        # These deal out samples alone, so that every GPU needs one. The others can be kept from a plan by the model's sizes too.
        batch, gpus = planner.workload.batch, planner.cluster.num_gpus
        # FSDP gathers weights that are sharded, which only ZeRO-3 holds.
        stated = planner.request.zero if planner.request.zero != max(ZERO) else None
        unsharded = [b for b in missing if b.name == "fsdp" and stated is not None]
        missing = [b for b in missing if b not in unsharded]
        uneven = [b for b in missing if b.name in DEAL_OUT_SAMPLES] if batch % gpus else []
        rest = [b for b in missing if b not in uneven]
        if unsharded:
            stages = named("zero", max(ZERO)), " would do, ", named("zero", stated)
            words = " without a plan, since it shards weights: "
            notes.append(Sentence(_list_titles(unsharded), words, *stages, " does not"))
        if uneven:
            near = sorted({max(gpus, batch // gpus * gpus), -(-batch // gpus) * gpus})
            wanted = Sentence.from_list(" or ", (named("batch", number) for number in near))
            why = f": {batch:,} samples cannot be dealt out to {gpus:,} GPUs; "
            notes.append(Sentence(_list_titles(uneven), " without a plan", why, wanted, " would do"))
        if rest:
            words = "baselines that no plan of this model follows on these meshes: "
            notes.append(Sentence(words, _list_titles(rest), _explain_missing_split(planner)))
    if other := [f"{p.name} ({micro_batch(p)} at once)" for p in plans if size not in (None, micro_batch(p))]:
        why = "without a row, since they compute another number of samples at once than "
        notes.append(Sentence(why, named("micro_batch", size), f": {', '.join(other)}"))
    return tuple(notes)


def _explain_missing_split(planner: Planner) -> str:
    """Say why the model cannot be split over the fewest tensor ranks to which its samples can be dealt: `; 25 attention heads cannot be
    dealt to tp=2 ranks`. Where its sizes allow that, the operator is named that cannot follow; empty if all of them can."""
    request, gpus = replace(planner.request, tool=None), planner.cluster.num_gpus
    numbers = sorted({m.axis_sizes[-1] for m in candidate_meshes(request, planner.cluster) if m.axis_sizes[-1] > 1})
    layouts = [parse_layout(f"dp={gpus // ranks},tp={ranks}") for ranks in numbers]
    if not layouts:
        return ""
    layout = next((one for one in layouts if planner.workload.graph_batch % one.data == 0), layouts[0])
    if faults := operator_faults(planner.graph, layout):
        return Sentence("; ", faults[0].reason)
    with suppress(PlannerError):  # the network of a wide mesh may be too large to look at
        problem = planner.of_space(layout.space())
        return f"; {undecided_fault(problem, layout)}" if problem.is_infeasible else ""
    return ""


def _list_titles(baselines: Iterable[Method]) -> Sentence:
    return Sentence.from_list(", ", (Term("method", b.name, None, b.title) for b in baselines))
