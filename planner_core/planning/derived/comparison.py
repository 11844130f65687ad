"""Compare every method's plan with the best one, at the micro-batches of the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner_core.core import Graph, NoPlanFits, Note, NoteKind, Plan, PlanRole, Sentence
from planner_core.planning.fitting.baselines import describe_restriction_cost
from planner_core.planning.fitting.mesh_search import choose_mesh
from planner_core.planning.fitting.simpler import without_simpler
from planner_core.planning.methods import EXACT, METHODS, Method, note_shared_workload, tool_spaces
from planner_core.planning.pipeline import plan_model
from planner_core.planning.planner import candidate_meshes, prepare_planner, replace_request
from planner_core.planning.request import Progress, Request
from planner_core.planning.result import Result
from planner_core.search import OBJECTIVES


def compare_methods(request: Request, progress: Progress | None = None, graph: Graph | None = None) -> Result:
    """Plan as `plan_model` does, and by every method with the micro-batches and the recomputation of its chosen plan.

    The papers know neither. With a number of micro-batches of their own, methods that minimise communication would compute everything
    on every GPU, in micro-batches small enough. `compare --json` gives an object of the same form as `plan --json`.
    """
    result = plan_model(request, graph, progress)
    result = replace(result, plans=without_simpler(result.plans))
    report_progress = progress or (lambda text: None)
    # A tool bounds the exact search only: the others may choose any plan of theirs.
    planner = prepare_planner(replace(result.request, tool=None), result.graph)
    plans: dict[tuple[str, str], Plan] = {}
    notes = [note_shared_workload(planner.workload), *(n for n in result.notes if n.kind is not NoteKind.WORKLOAD)]
    asked = None if tool_spaces(request.tool, result.cluster) else (request.method, planner.objective())
    for method in METHODS.values():
        for objective in (method.objective,) if method.objective else OBJECTIVES:
            if (method.name, objective) == asked:
                plans[method.name, objective] = result.best
                continue
            report_progress(f"{method.name}, least {objective}")
            one = replace_request(planner, method=method.name, objective=objective)
            try:
                plans[method.name, objective] = choose_mesh(one, candidate_meshes(planner.request, planner.cluster))
            except NoPlanFits as error:
                notes.append(Note(Sentence(f"{method.title} has no row: ", error.sentence)))
    # By the names of their rows: the request's plan has one of its own, the other is named by what it makes least.
    exact = {
        plan.name if plan is result.best else f"least {objective}": plan
        for (name, objective), plan in plans.items()
        if name == EXACT.name
    }
    extra = [_as_comparison(METHODS[name], plan, exact) for (name, _), plan in plans.items() if plan is not result.best]
    return replace(result, plans=(*result.plans, *extra), notes=tuple(notes))


def _as_comparison(method: Method, plan: Plan, exact: Mapping[str, Plan]) -> Plan:
    """Return a method's plan for the comparison: it has the method's name, and a note about what its restrictions cost."""
    if method.objective is None:
        return replace(plan, name=f"least {plan.objective}", role=PlanRole.OTHER)
    return replace(
        plan,
        name=method.title,
        role=PlanRole.OTHER,
        notes=(method.admits, Note(describe_restriction_cost(plan, exact)), *plan.notes),
    )
