"""Which of several networks are searched first, so that others can be abandoned early.

Each is searched without proof. Its bound, and the best plan that was found in any of them, say how promising it is.

Example: with bounds of 5.0, 5.1 and 4.2 s and plans of 5.2, 5.1 and none that fits, the first one goes first, and the third one
last: its bound is low since it does not hold the price of memory.

Values that differ by rounding alone are equal here. How a sum of floats is rounded depends on the processor, and the plan must not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner_core.planning.request import Progress
from planner_core.search import ABOVE, TIE, Answer, far_above, memory_of, quick, quick_bound, search
from planner_core.search.network import Problem

ROUNDING = 1e-9
"""Share by which two equal values may differ."""


def less(value: float, than: float) -> bool:
    """Whether a value is less than another by more than rounding."""
    return value < than * (1 - ROUNDING)


def _level(value: float) -> float:
    """A value to sort by, without what rounding changes."""
    return float(f"{value:.9g}")


@dataclass(frozen=True, slots=True)
class Promise:
    """A problem, and the answer of a search of it without proof; None if that was abandoned or not begun. No plan whose sum of memory
    is at most ABOVE times the budget has a value below `bound`. `prices` of memory gave it."""

    problem: Problem
    rough: Answer | None = None
    bound: float = 0.0
    prices: tuple[float, float] = (0.0, 0.0)


def by_promise(
    problems: Sequence[Problem], objective: str, budget: float, say: Progress, below: float
) -> list[Promise]:
    """The problems with what a search without proof says of them, the lowest bound first. Problems in which nothing was found that fits
    go last, since a plan of another one may make their searches short. Last of all are those in which nothing can fit, the least memory
    first."""
    found: list[tuple[bool, float, Promise]] = []
    near = [p for p in problems if not far_above(p, budget)]
    fit = [a.seconds * (1 + TIE) for p in near if (a := quick(p, objective)) and memory_of(a) <= budget]
    best, prices = min([below, *fit]), (0.0, 0.0)
    for problem in sorted(near, key=lambda p: _level(quick_bound(p, objective))):
        if less(best, bound := quick_bound(problem, objective)):
            found.append((False, bound, Promise(problem, bound=bound)))
            continue
        answer = search(
            problem, objective=objective, budget=budget, abandon_above=best, stop=telling(say, problem), prove=False,
            prices=prices,
        )  # fmt: skip
        given_up = answer.assignment is None and answer.bound > best
        nothing = answer.assignment is None and not given_up
        bound = answer.bound - sum(answer.prices) * (ABOVE - 1) * budget
        found.append((nothing, answer.bound, Promise(problem, None if given_up else answer, bound, answer.prices)))
        best = answer.value if less(answer.value, best) else best
        prices = answer.prices if any(answer.prices) else prices
    far = sorted((p for p in problems if far_above(p, budget)), key=lambda p: p.least_bytes)
    return [promise for *_, promise in sorted(found, key=lambda f: (f[0], _level(f[1])))] + [Promise(p) for p in far]


def telling(say: Progress, problem: Problem) -> Callable[[], bool]:
    """Callback for long searches: it reports progress, and the progress function may raise to cancel."""

    def stop() -> bool:
        say(f"search on {problem.model.mesh}")
        return False

    return stop
