"""The trade-off between time and memory: the corners of the front as plans, and all its points."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from planner_core.core import DeviceMesh, Note, NoteKind, Plan, PlanRole, Sentence
from planner_core.cost import Component
from planner_core.planning.methods import EXACT
from planner_core.planning.planner import Planner, with_recompute
from planner_core.planning.request import Progress, Request
from planner_core.search import (
    Answer,
    Assignment,
    describe_gap,
    find_corners_below,
    find_pareto_front,
    least_seconds_within,
    memory_bytes,
)
from planner_core.search.algebra import TooWide
from planner_core.search.network import Problem

TRADE_OFF = "trade-off"
MAX_FRONT = 6
"""At most this many corners of the front become plans."""
FRONT_STEP = 0.03
"""A corner of the front is left out if it saves less than this share of the memory of the corner before."""

BEST_WITHIN = "best of those that hold no more at the end of forward"
LEFT_OUT = Note("not proven: the search of a mesh left plans out, with no bound on what is better", NoteKind.SCOPE)


def plan_trade_offs(
    planner: Planner, options: Iterable[DeviceMesh], shown: Sequence[Plan], baselines: Sequence[Plan] = ()
) -> list[Plan]:
    """Return the corners of the front of step time and memory over all meshes, as plans that fit. Left out is what is `shown` already,
    and what another plan or one of the `baselines` beats.

    They recompute as the planner may: if the answer fits without recomputation, so do they, whatever the request leaves open.
    """
    # The search sums memory up to the end of forward, so a corner within the budget may have its peak above it.
    plans = [p for p in unseen_corners(planner, options, shown) if p.fits]
    plans = leave_out_beaten(plans, (*shown, *plans, *baselines))
    return name_trade_offs(plans)


def name_trade_offs(plans: Iterable[Plan]) -> list[Plan]:
    """Return the plans, numbered in their order."""
    return [replace(plan, name=f"{TRADE_OFF} {k + 1}", role=PlanRole.TRADE_OFF) for k, plan in enumerate(plans)]


def unseen_corners(planner: Planner, options: Iterable[DeviceMesh], shown: Sequence[Plan]) -> list[Plan]:
    """Plans that are not `shown`, at the corners of what the search knows of the front: it sums memory up to the end of forward. Most
    plans between two corners are mixtures of the two."""
    points: list[tuple[float, float, Problem, Assignment]] = []
    problems: list[Problem] = []
    wide: list[TooWide] = []
    # The mesh of the best plan first: its corners are the lowest, so that most others are given up at their first bound.
    in_order = sorted(options, key=lambda mesh: all(mesh.axis_sizes != plan.mesh.axis_sizes for plan in shown))
    for mesh in in_order:
        for build in planner.builders(EXACT, mesh):
            with planner.clock("front"):
                try:
                    problem = build()
                    hull = [p[:2] for p in points]
                    # Corners above the hull of other meshes' are of no use, so where all lie there only the fastest is worked out.
                    ends = find_corners_below(problem, hull, FRONT_STEP)
                except TooWide as error:
                    wide.append(error)
                    continue
                problems.append(problem)
                points += [(a.seconds, memory_bytes(a), problem, a) for a in ends]
    points.sort(key=lambda p: p[:2])
    front: list[tuple[float, float, Problem, Assignment]] = []
    # Sorted by time: a point stays only if it takes clearly less memory than all faster ones.
    for point in points:
        if not front or point[1] < front[-1][1] * (1 - FRONT_STEP):
            front.append(point)
    if len(front) > MAX_FRONT:  # spread evenly along the front, with both ends
        front = [front[round(i * (len(front) - 1) / (MAX_FRONT - 1))] for i in range(MAX_FRONT)]
    corners = _as_plans(planner, front, [a for *_, a in points], problems, wide)
    return [p for p in corners if not any((p.blocks, p.mesh) == (other.blocks, other.mesh) for other in shown)]


def _as_plans(
    planner: Planner,
    front: Sequence[tuple[float, float, Problem, Assignment]],
    corners: Sequence[Assignment],
    problems: Sequence[Problem],
    wide: Sequence[TooWide],
) -> list[Plan]:
    """Return the points as plans, each with a lower bound on all plans of all meshes that hold no more at the end of forward. A plan is
    proven only if it is a corner of the hull of the `corners`, and no mesh has a plan below that hull."""
    with planner.clock("front"):
        points = [_seconds_and_bytes(a) for a in corners]
        bounds = least_seconds_within(problems, points, [_seconds_and_bytes(a)[1] for *_, a in front])
    plans = []
    for (t, m, problem, a), bound in zip(front, bounds, strict=True):
        if wide or any(p.unrestricted is not None for p in problems):  # nothing is known of what was left out
            plan = replace(planner.plan(problem, Answer(a, t, t, m), "", "exact", "time"), optimal=False, bound=None)
            plans.append(replace(plan, notes=plan.notes or (LEFT_OUT,)))
        else:
            plan = planner.plan(problem, Answer(a, t, min(t, bound), m), "", "exact", "time")
            gap = () if plan.optimal else (Note(describe_gap(t, bound, BEST_WITHIN), NoteKind.GAP),)
            plans.append(replace(plan, notes=(*(n for n in plan.notes if n.kind is not NoteKind.GAP), *gap)))
    return plans


def _seconds_and_bytes(a: Assignment) -> tuple[float, float]:
    return a.seconds, float(a.totals[Component.AFTER_FORWARD])


def leave_out_beaten(plans: Iterable[Plan], shown: Sequence[Plan]) -> list[Plan]:
    """Return the plans that no plan beats that fits and is shown beside them."""
    return [p for p in plans if not any(other.fits and dominates(other, p) for other in shown)]


def note_beaten_corners(names: Sequence[str]) -> tuple[Note, ...]:
    """Return a note that trade-offs are left out which a plan with stages beats, since the numbers of the others do not begin at 1."""
    if not names:
        return ()
    are = "is" if len(names) == 1 else "are"
    return (
        Note(f"{', '.join(names)} {are} left out: a plan with pipeline stages is no slower and takes no more memory"),
    )


def dominates(plan: Plan, other: Plan) -> bool:
    """Return whether a plan is better than another in step time or peak memory, and in neither worse."""
    one, two = ((p.cost.step_time_s, p.cost.memory_bytes["peak"]) for p in (plan, other))
    return one != two and one[0] <= two[0] and one[1] <= two[1]


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A point of the Pareto front: `cost_s` seconds of the GPU's part of a step, without waits for the host, or of communication; and bytes
    per GPU that the search sums up to the end of forward, which may be above or below the peak of the plan as it is walked."""

    mesh: DeviceMesh
    cost_s: float
    memory_bytes: float


def with_open_recomputation(planner: Planner, request: Request) -> Planner:
    """Return the planner of an answer, with the choice of recomputation that the request leaves. That of an answer for a tool stays, since
    no tool can be told of every choice."""
    if planner.request.bounding_tool is not None or planner.workload.recompute == request.recompute:
        return planner
    return with_recompute(planner, request.recompute)


def describe_front(planner: Planner) -> str:
    """Of which plans `exact_front` is the front."""
    request, number = planner.request, planner.workload.accumulate
    meshes = f"mesh {request.mesh}" if request.mesh else "meshes of one or two axes"
    bounded = request.bounding_tool is not None
    return ", ".join(
        (
            f"what {request.tool} can be told" if bounded else f"any method, {meshes}",
            "one stage",
            "1 micro-batch" if number == 1 else f"{number:,} micro-batches",
            "all copies of a block alike",
            "any recomputation" if request.recompute == "auto" else f"recomputation {request.recompute}",
        )
    )


def describe_measures(objective: str, best: Plan) -> str:
    """What the two numbers of a point of the front leave out, as sentences. `best`: the plan of one stage of the same request."""
    memory = "Memory is the search's sum at the end of forward, which may be above or below a plan's peak."
    if objective != "time":
        return memory
    waits = ""
    if best.cost.host_wait_s:
        waits = f" ({best.name} waits {1e3 * best.cost.host_wait_s:,.3g} ms of its {1e3 * best.cost.step_time_s:,.3g})"
    return f"Seconds are the GPU's part of a step, without waits for the host{waits}. {memory}"


def exact_front(
    planner: Planner, options: Iterable[DeviceMesh], objective: str, report_progress: Progress = lambda text: None
) -> tuple[list[FrontPoint], bool]:
    """Return the Pareto front over the meshes, of the plans that `describe_front` says; and whether these are all points."""
    points: list[FrontPoint] = []
    exact, uniform = True, replace(EXACT, uniform=True)
    for mesh in options:
        report_progress(Sentence("front on ", mesh.term))
        for build in planner.builders(uniform, mesh):
            try:
                on_mesh = find_pareto_front(build(), objective)
            except TooWide:
                exact = False
                continue
            exact = exact and on_mesh.exact
            points += [
                FrontPoint(mesh, float(c), float(m)) for c, m in zip(on_mesh.cost_s, on_mesh.memory_bytes, strict=True)
            ]
    front: list[FrontPoint] = []
    for p in sorted(points, key=lambda p: (p.cost_s, p.memory_bytes)):
        if not front or p.memory_bytes < front[-1].memory_bytes:
            front.append(p)
    return front, exact
