"""The cost of each restriction of a paper's method, compared with the exact search. One ablation step adds one restriction.

    exact, least time -> least communication -> no gathering of weights -> identical copies -> volume instead of time
    -> the method's own space

Each step keeps the restrictions of the steps before it. So the difference between two steps is the cost of the added one. The first is
the planner's answer, and the same for all methods: where the GPU waits for its host, that is no plan of one search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from planner_core.core import NoPlanFits, Note, NoteKind, Plan
from planner_core.planning.fitting.mesh_search import choose_mesh
from planner_core.planning.methods import EXACT, METHODS, Method, unrestricted
from planner_core.planning.planner import Planner, candidate_meshes, replace_request
from planner_core.planning.request import Progress

DESCRIPTIONS = {
    "exact": "nothing is forbidden, least step time",
    "goal": "aims at the least communication, hidden or not, instead of the least step time",
    "kept": "keeps weights on the device that uses them: none is sharded and gathered at use",
    "alike": "runs all copies of a block alike",
    "volume": "counts bytes, as if every link were the same",
}
"""What each step adds, as text. The last step, `space`, has the method's own text (see `Method.space`)."""

FOUND_IN_SMALLER_SPACE = "not proven: by the search of a further step"
"""The note of a step whose plan a later step, of a smaller space, has found."""


@dataclass(frozen=True, slots=True)
class AblationStep:
    """The best plan under the restrictions up to the step `name`; None if no plan fits. `says` describes what the step adds."""

    name: str
    says: str
    plan: Plan | None

    def called(self, step: AblationStep) -> AblationStep:
        """Return an earlier `step` with this plan, which it did not find and so did not prove: its bound is the earlier step's own."""
        if self is step or self.plan is None:
            return step
        others = (note for note in self.plan.notes if note.kind is not NoteKind.GAP)
        bound = step.plan.bound if step.plan else None
        notes = (Note(FOUND_IN_SMALLER_SPACE, NoteKind.SCOPE), *others)
        return replace(step, plan=replace(self.plan, method=EXACT.name, optimal=False, bound=bound, notes=notes))


def exact_step(best: Plan | None) -> AblationStep:
    """Return the first step, in which nothing is forbidden: the planner's answer to the request."""
    return AblationStep("exact", DESCRIPTIONS["exact"], best)


def ablation_steps(planner: Planner, method: str, report_progress: Progress = lambda text: None) -> list[AblationStep]:
    """Return the steps below the exact search down to a method of the papers; the last is the method itself.

    A search within a budget may end with a gap, and then miss what the search of a smaller space finds. Such a plan is in the larger space
    too, so it is the larger space's plan. `report_progress` gets a sentence about what is being done. It may raise to stop.
    """
    *larger, (last, adds, _) = _steps_to(METHODS[method], planner.workload.zero)
    # Under its own name a method's bound is in its own unit, and its gap is above the least of what it minimises.
    spaces = [*larger, (last, adds, METHODS[method])]
    steps = [AblationStep(name, says, _best_restricted(planner, one, report_progress)) for name, says, one in spaces]
    # From the smallest space on: what was found there is handed up from step to step.
    for at, step in reversed(list(enumerate(steps[:-1]))):
        # What is proven is the GPU's part of the step. A smaller space may hold a plan that waits less for its host.
        if step.plan is not None and step.plan.is_step_proven:
            continue
        steps[at] = min(steps[at:], key=lambda s: _rank_among_step(s.plan)).called(step)
    return steps


def _rank_among_step(plan: Plan | None) -> tuple[bool, float]:
    """Return the place of a plan among those of a step, the least first: plans that fit, by communication."""
    return (True, float("inf")) if plan is None else (not plan.fits, plan.cost.comm_time_s)


def _steps_to(target: Method, zero: int) -> Iterator[tuple[str, str, Method]]:
    """From the exact search at ZeRO stage `zero` to `target`: each step's name, what it adds, and the method so far."""
    step = replace(EXACT, objective=target.objective)
    yield "goal", DESCRIPTIONS["goal"], step
    if target.zero < zero:
        step = replace(step, zero=target.zero)
        yield "kept", DESCRIPTIONS["kept"], step
    if target.uniform:
        step = replace(step, uniform=True)
        yield "alike", DESCRIPTIONS["alike"], step
    if target.by_volume:
        step = replace(step, by_volume=True)
        yield "volume", DESCRIPTIONS["volume"], step
    if target.restrict is not unrestricted:
        yield "space", target.space, target


def _best_restricted(planner: Planner, method: Method, report_progress: Callable[[str], None]) -> Plan | None:
    asked = replace_request(planner, method=method.name, objective="time")
    try:
        return choose_mesh(asked, candidate_meshes(planner.request, planner.cluster), report_progress, method)
    except NoPlanFits:
        return None
