"""Which of several networks are searched first, so that others can be abandoned early.

Each is searched without proof. Its bound, and the best plan that was found in any of them, say how promising it is.

Example: with bounds of 5.0, 5.1 and 4.2 s and plans of 5.2, 5.1 and none that fits, the first one goes first, and the third one
last: its bound is low since it does not hold the price of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from planner_core.planning.request import Progress
from planner_core.search import Answer, quick_bound, search
from planner_core.search.network import Problem


def by_promise(
    problems: Iterable[Problem], objective: str, budget: float, say: Progress, below: float
) -> list[tuple[Answer | None, Problem]]:
    """The problems with their answers of a search without proof, the lowest bound first. The answer is None if the search was
    abandoned. Problems in which nothing was found that fits go last, since a plan of another one may make their searches short."""
    found: list[tuple[float, Answer | None, Problem]] = []
    best = below
    for problem in sorted(problems, key=lambda p: quick_bound(p, objective)):
        if (bound := quick_bound(problem, objective)) > best:
            found.append((bound, None, problem))
            continue
        answer = search(
            problem, objective=objective, budget=budget, abandon_above=best, stop=telling(say, problem), prove=False
        )
        given_up = answer.assignment is None and answer.bound > best
        found.append((answer.bound, None if given_up else answer, problem))
        best = min(best, answer.value)

    def order(one: tuple[float, Answer | None, Problem]) -> tuple[bool, float]:
        return one[1] is not None and one[1].assignment is None, one[0]

    return [(answer, problem) for _, answer, problem in sorted(found, key=order)]


def telling(say: Progress, problem: Problem) -> Callable[[], bool]:
    """Callback for long searches: it reports progress, and the progress function may raise to cancel."""

    def stop() -> bool:
        say(f"search on {problem.model.mesh}")
        return False

    return stop
