"""The plans of usual layouts: the best plan of each baseline over the meshes. It fits if one of them fits."""

from __future__ import annotations

from collections.abc import Iterable

from planner_core.core import DeviceMesh, Plan
from planner_core.planning.methods import BASELINES, Method
from planner_core.planning.session import Planner, with_recompute
from planner_core.search import Answer, fastest, fit, quick_bound, search
from planner_core.search.network import Problem


def baselines(planner: Planner, options: Iterable[DeviceMesh], recompute: str = "none") -> list[Plan]:
    """The best plan of each baseline over the meshes. A baseline that suits no mesh is left out. If its plan does not fit with the
    recomputation of `planner`, it is planned with `recompute`."""
    found = []
    options = list(options)
    saving = with_recompute(planner, recompute) if recompute != planner.workload.recompute else planner
    for b in BASELINES.values():
        best = _baseline(planner, options, b)
        if best is not None and not best.fits and saving is not planner:
            best = _baseline(saving, options, b) or best
        found += [best] if best is not None else []
    return found


def _baseline(planner: Planner, options: list[DeviceMesh], b: Method) -> Plan | None:
    """The best plan of one baseline that fits; else the fastest."""
    problems = []
    for mesh in options:
        restrict = b.restrict(planner.graph, mesh)
        if restrict is not None:
            problems.append(planner.problem(mesh, restrict, zero=b.zero))
    with planner.clock("baselines"):
        problems.sort(key=lambda p: quick_bound(p, "time"))  # so that meshes that cannot win any more are skipped
        chosen = _best(planner, problems)
    return planner.plan(*chosen, b.title, b.name, "time") if chosen else None


def _best(planner: Planner, problems: list[Problem]) -> tuple[Problem, Answer] | None:
    """The problem with the best plan that fits, and its answer; else the one with the fastest plan. None if there is no plan.
    `problems`: the lowest quick bound first."""
    best: tuple[Problem, Answer] | None = None
    least = float("inf")
    for problem in problems:
        if quick_bound(problem, "time") >= least:
            break
        answer = fit(problem, planner.graph, planner.budget, "time", least)
        if answer.assignment is not None and answer.value < least:
            best, least = (problem, answer), answer.value
    if best is None:
        free = [(p, search(p, objective="time")) for p in fastest(problems, "time")]
        best = min(free, key=lambda f: f[1].value, default=None)
    return best


def without(planner: Planner, found: Iterable[Plan]) -> tuple[str, ...]:
    """Notes about the baselines that do not have a plan of this model on these meshes."""
    there = {p.method for p in found}
    missing = [b.title for b in BASELINES.values() if b.name not in there and b.suits(planner.graph)]
    return (f"baselines that no plan of this model follows on these meshes: {', '.join(missing)}",) if missing else ()
