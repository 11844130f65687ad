"""The best plan of one mesh: least step time, or least communication, within a memory budget.

Both, and the memory, are sums over the network. Without a budget one elimination finds the optimum. Within one, an
elimination at price m per byte finds the least time + m * memory, and that less m * budget is a lower bound on
the answer (Lagrange). The search moves the price to where the bound is highest; what is left between the bound and
the best assignment seen is looked through exactly (`closing`), copies differing where that is better. `optimal` is said
only where that was done; else `gap` is what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from planner_core.search.algebra.pareto_labels import MAX_WORK, Allowance
from planner_core.search.budget.gap_closing import Closing
from planner_core.search.folded_solver import Assignment, solve
from planner_core.search.network.factors import COMM, ENDING, MEMORY, TIME
from planner_core.search.network.folded import Problem
from planner_core.search.repeated_block import Weights

OBJECTIVES = ("time", "communication")
TIE = 1e-6
"""Relative difference below which two costs are one."""
COMM_PRICE = 1e-7
"""Weight of communication beside the step time: of plans that take equally long the one that sends less is chosen."""
MEMORY_PRICE = 1e-22
"""Seconds per byte: of plans that take equally long the smaller is chosen; far below any real price."""


def weights(objective: str, price: float = 0.0, share: float = 1.0) -> Weights:
    """The weighted sum to minimise: memory costs `price` seconds per byte, `share` of it at the end of forward and the rest
    at the end of backward."""
    forward, backward = price * share + MEMORY_PRICE, price * (1 - share)
    if objective == "communication":
        return (COMM_PRICE, forward, 1.0, backward)
    return (1.0, forward, COMM_PRICE, backward)


def prices(w: Weights, objective: str) -> tuple[float, float] | None:
    """Seconds per byte at the end of forward and at the end of backward that `weights` of this objective hold; None where it
    is another sum."""
    plain = weights(objective)
    own = w[0] == plain[0] and w[2] == plain[2] and w[1] >= MEMORY_PRICE and w[3] >= 0.0
    return (w[1] - MEMORY_PRICE, w[3]) if own else None


def memory_of(a: Assignment) -> float:
    """Bytes per GPU where they are most: at the end of forward or of backward."""
    return float(max(a.totals[MEMORY], a.totals[ENDING]))


def value_of(a: Assignment, objective: str) -> float:
    """Seconds: the step time, or the communication alone."""
    return float(a.totals[COMM if objective == "communication" else TIME])


@dataclass
class Answer:
    """The best assignment found, its value, and a bound that no assignment beats. None: nothing fits, and `smallest` is
    the assignment of least memory."""

    assignment: Assignment | None
    value: float
    bound: float
    least_memory: float
    solves: int = 0
    smallest: Assignment | None = None

    @property
    def optimal(self) -> bool:
        """Whether the bound proves the assignment."""
        return self.assignment is not None and self.value <= self.bound * (1 + TIE)

    @property
    def gap(self) -> float:
        """Relative distance between the value and the bound."""
        return 0.0 if self.optimal else (self.value - self.bound) / max(self.bound, 1e-30)


@dataclass
class _Search:
    """One search: the best that fits so far, and the best bound."""

    problem: Problem
    objective: str
    budget: float
    best: Assignment | None = None
    bound: float = 0.0
    solves: int = 0
    work: int = MAX_WORK
    multipliers: tuple[float, float] = (0.0, 0.0)  # of the bound: prices at the end of forward and of backward

    def start(self) -> None:
        """Take what earlier searches of this problem found, for other budgets."""
        for w, a in self.problem.solved.items():
            if a is not None:
                self.consider(a)
                self._raise(a, prices(w, self.objective))

    def at(self, price: float, share: float) -> Assignment | None:
        """Solve with memory at `price`; keeps what fits and raises the bound."""
        self.solves += 1
        w = weights(self.objective, price, share)
        a = solve(self.problem, w)
        if a is not None:
            self.consider(a)
            self._raise(a, prices(w, self.objective))
        return a

    def _raise(self, a: Assignment, multipliers: tuple[float, float] | None) -> None:
        """The bound that an optimum at some prices gives: what it costs, and what it holds beyond the budget (Lagrange)."""
        if multipliers is not None:
            over = np.array((a.totals[MEMORY], a.totals[ENDING])) - self.budget
            priced = float(np.where(multipliers, over, 0.0) @ multipliers)
            bound = (value_of(a, self.objective) + priced) * (1 - COMM_PRICE)
            if bound > self.bound:
                self.bound, self.multipliers = bound, multipliers

    def close(self, stop: Callable[[], bool], at_most: float) -> None:
        """Look through what is left between the bound and the best, or `at_most`."""
        assert self.best is not None
        forward, backward = self.multipliers
        plain = np.array(weights(self.objective)) * (1, 0, 1, 1)
        closing = Closing(
            self.problem, plain, self.budget, forward + backward, backward > forward, self.best, self.bound, TIE,
            at_most, Allowance(self.work),
        )  # fmt: skip
        closing.run(stop)
        self.best, self.bound = closing.best, max(self.bound, closing.bound)

    def consider(self, a: Assignment) -> None:
        """Remember `a` if it fits and is the best."""
        if memory_of(a) <= self.budget and (
            self.best is None or value_of(a, self.objective) < value_of(self.best, self.objective)
        ):
            self.best = a

    def answer(self, least_memory: float) -> Answer:
        """What was found."""
        value = value_of(self.best, self.objective) if self.best else float("inf")
        return Answer(self.best, value, min(self.bound, value), least_memory, self.solves)


def search(
    problem: Problem, *, objective: str = "time", budget: float = float("inf"), abandon_above: float = float("inf"),
    stop: Callable[[], bool] = lambda: False, prove: bool = True, known: Iterable[Assignment] = (), work: int = MAX_WORK,
) -> Answer:  # fmt: skip
    """The best assignment of `problem` within `budget` bytes per GPU (see the head of the file).

    `abandon_above`: give up once the bound shows that nothing below this value exists. `stop` is asked between
    eliminations. Without `prove` the gap that prices leave stays. `known` assignments are considered too.
    `work`: labels that may be formed to close the gap that prices leave.
    """
    run = _Search(problem, objective, budget, work=work)
    free = run.at(0.0, 1.0)
    if free is None:
        return Answer(None, float("inf"), float("inf"), float("inf"), run.solves)
    if run.best is not None or run.bound > abandon_above:
        return run.answer(memory_of(free))
    small = least_memory(problem)
    run.solves += 1
    assert small is not None
    least = memory_of(small)
    if least > budget:
        return Answer(None, float("inf"), run.bound, least, run.solves, small)
    for a in (small, *known):
        run.consider(a)
    run.start()

    def enough() -> bool:
        return stop() or run.bound > abandon_above

    ends = ((1.0, MEMORY), (0.0, ENDING))
    for share, end in ends if free.totals[MEMORY] >= free.totals[ENDING] else ends[::-1]:
        if free.totals[end] > budget:
            _price_memory(run, free, small, share, enough)
    if prove:
        run.close(enough, abandon_above)
    return run.answer(least)


def least_memory(problem: Problem) -> Assignment | None:
    """The assignment whose memory is least where it is most (of these the fastest, nearly).

    The least at the end of forward is that, if it is no higher at the end of backward; and the other way round. Else
    the best of these and of their mean stands in.
    """
    found: list[Assignment] = []
    for share in (1.0, 0.0, 0.5):
        a = solve(problem, (1e-9, share, 1e-12, 1 - share))
        if a is None:
            return None
        found.append(a)
        ends = float(a.totals[MEMORY]), float(a.totals[ENDING])
        if (share == 1.0 and ends[0] >= ends[1]) or (share == 0.0 and ends[1] >= ends[0]):
            return a
    return min(found, key=memory_of)


def _price_memory(run: _Search, fast: Assignment, small: Assignment, share: float, stop: Callable[[], bool]) -> None:
    """Find the price at which a plan that fits and one that does not weigh the same: there the bound is highest."""

    def held(a: Assignment) -> float:
        return float(a.totals[MEMORY if share else ENDING])

    known = [a for w, a in run.problem.solved.items() if a is not None and _priced(w, run.objective, share)]
    fast = min((a for a in (fast, *known) if held(a) > run.budget), key=held)
    small = max((a for a in (small, *known) if held(a) <= run.budget), key=held)
    for _ in range(16):
        saved = held(fast) - held(small)
        slower = value_of(small, run.objective) - value_of(fast, run.objective)
        if stop() or saved <= 0 or slower <= 0:
            return
        price = slower / saved
        found = run.at(price, share)
        line = value_of(fast, run.objective) + price * held(fast)
        if found is None or value_of(found, run.objective) + price * held(found) >= line * (1 - 1e-12):
            return
        if held(found) <= run.budget:
            small = found
        else:
            fast = found


def _priced(w: Weights, objective: str, share: float) -> bool:
    """Whether these weights price memory at one end of the step only."""
    found = prices(w, objective)
    return found is not None and found[1 if share else 0] == 0.0
