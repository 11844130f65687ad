"""The chart of whole-model plans: time against memory per GPU. Pure: values in, what plans_chart.js draws out.

The page's first picture does not wait for a library of charts, of megabytes: this one is drawn as SVG by a few lines of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from explorer.analysis import candidate_marks as marks
from explorer.figures import name_placement
from explorer.figures.palette import COMMUNICATION, COMPUTE
from explorer.figures.scale import Scale, axis_range
from explorer.figures.style import GIB, LIMIT_WORDS
from explorer.text import units
from explorer.text.words import plan_title
from planner_core.core import Plan, PlanRole
from planner_core.planning.methods import BASELINES, EXACT, METHODS
from planner_core.planning.planner import STATED_METHOD

PLOT_HEIGHT = 402.0
"""Pixels of the chart's axis of memory."""
PLOT_WIDTHS = ((256.0, 296.0, 340.0), (350.0, 424.0, 500.0), (510.0, 620.0, 760.0))
"""Pixels of its axis of time for which names are placed together; the first and the last of each group bound it."""
LIMIT_WIDTH = 150.0
"""Pixels of the words at the line of memory."""
TIMES = {
    "communication": "communication per step, ms",
    "exposed": "communication that the step waits for, ms",
    "step": "step time, ms",
}
POINT_KINDS = (
    ("best, trade-offs", "circle", COMPUTE),
    ("other methods", "triangle", "#CC79A7"),
    ("baselines", "diamond", COMMUNICATION),
    ("our current setup", "square", "#009E73"),
)
"""What a mark is of, its shape and its colour. The first kind is a front, which a line joins; no line joins plans of other searches."""
FRONT = 0


def draw_plans(plans: Mapping[str, Plan], chosen: str, limit_bytes: int, axis: str = "step") -> dict[str, Any]:
    """Return the chart as data (see types.d.ts): points with their names' places, axes, and the line at a GPU's memory."""
    kinds = {n: _kind_of(p) for n, p in plans.items()}
    ends = {n: _end_of(p, axis) for n, p in plans.items()}
    left, right = axis_range([x for x, _ in ends.values()])
    right += 0.28 * (right - left)  # room for the name of the rightmost plan
    left -= 0.02 * (right - left)
    high = max(limit_bytes / GIB, *(y for _, y in ends.values())) * 1.12
    # Trade-offs lie on one line, near each other: their names crowd out those of the others, and the table and a hover say them.
    named = [n for n, p in plans.items() if n == chosen or kinds[n] != FRONT or p.role is not PlanRole.TRADE_OFF]
    places = _place_names({n: plan_title(plans[n]) for n in named}, ends, limit_bytes / GIB, (left, right), high)
    ties = marks.find_ties(plans)
    return {
        "x": _axis(TIMES[axis], left, right),
        "y": _axis("memory per GPU, GiB", 0.0, high),
        "limit": [limit_bytes / GIB, f"{LIMIT_WORDS} {units.memory(limit_bytes)}"],
        "widths": [group[-1] for group in PLOT_WIDTHS],
        "kinds": POINT_KINDS,
        "points": [
            {
                "id": n,
                "kind": kinds[n],
                "x": ends[n][0],
                "y": ends[n][1],
                "name": plan_title(plan),
                "figures": list(_figures(plan)),
                "tie": n in ties,
                "chosen": n == chosen,
                "places": places.get(n, []),
            }
            for n, plan in plans.items()
        ],
    }


def _axis(name: str, low: float, high: float) -> dict[str, Any]:
    ticks = [[v, f"{v:,.9g}".replace(",", "\u202f")] for v in Scale(low, high, 0.0, 1.0, log=False).ticks()]
    return {"name": name, "low": low, "high": high, "ticks": ticks}


def _kind_of(plan: Plan) -> int:
    """Return the index of a plan in `POINT_KINDS`."""
    if plan.method == STATED_METHOD:
        return 3
    if plan.method in BASELINES:
        return 2
    return 1 if plan.method in METHODS and plan.method != EXACT.name else FRONT


def _end_of(plan: Plan, axis: str) -> tuple[float, float]:
    c = plan.cost
    times = {"communication": c.comm_time_s, "exposed": c.exposed_comm_time_s, "step": c.step_time_s}
    return times[axis] * 1e3, c.memory_bytes["peak"] / GIB


def _figures(plan: Plan) -> Iterator[str]:
    """Yield the lines that a point shows below its plan's name."""
    c = plan.cost
    yield f"mesh {plan.mesh}"
    yield f"step {units.seconds(c.step_time_s)}"
    yield f"communication {units.seconds(c.comm_time_s)}, of which {units.seconds(c.exposed_comm_time_s)} exposed"
    yield f"memory {units.memory(c.memory_bytes['peak'])}" + ("" if plan.fits else ", does not fit")


def _place_names(
    names: Mapping[str, str],
    ends: Mapping[str, tuple[float, float]],
    limit: float,
    times: tuple[float, float],
    high: float,
) -> dict[str, list[name_placement.Place]]:
    """Return by plan where its name lies in each group of `PLOT_WIDTHS`.

    `ends`: where all marks lie, which no name may cover. `limit`: GiB that a plan may take, where a line lies with its words.
    `times`: the ends of the axis of times; that of memory goes from 0 to `high`.
    """
    # a plan that has a name comes first: a place is given for each of those
    order = [*names, *(n for n in ends if n not in names)]
    line = (1 - limit / high) * PLOT_HEIGHT
    places: dict[str, list[name_placement.Place]] = {n: [] for n in names}
    for widths in PLOT_WIDTHS:
        plots = []
        for width in widths:
            x, y = Scale(*times, 0.0, width, log=False), Scale(0.0, high, PLOT_HEIGHT, 0.0, log=False)
            points = [(x(ends[n][0]), y(ends[n][1])) for n in order]
            drawn = [(0.0, line - 2, width, line + 2), (0.0, line - 20, LIMIT_WIDTH, line)]
            plots.append(name_placement.Plot(width, PLOT_HEIGHT, points, drawn))
        for name, place in zip(names, name_placement.place_names(plots, list(names.values())), strict=True):
            places[name].append(place)
    return places
