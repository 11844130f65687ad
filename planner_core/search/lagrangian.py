"""The best plan of one mesh: least step time, or least communication, within a memory budget.

Memory is a sum over the network. Without a budget, one solution of the network finds the optimum. Within a budget, the network
is solved with memory at a price m (seconds per byte):

    L(m) = min over plans of (seconds + m · memory)
    L(m) - m · budget  ≤  seconds of every plan whose memory is within the budget      (Lagrange)

The search moves the price to where this bound is highest. The plans between the bound and the incumbent are then enumerated
exactly (`budget.gap_closing`); copies of a block may differ where that is better. `Answer.optimal` is true only if that was
done. Otherwise `Answer.gap` is the relative distance between the incumbent and the bound.

Example: the fastest plan takes 10 s and 9 GB, the smallest 14 s and 5 GB, and 8 GB are allowed. At 1 s per GB both cost 19.
If no plan costs less at this price, the bound is 19 - 1 · 8 = 11 s. The incumbent is the plan of 14 s. A better plan takes
less than 14 s within 8 GB, so it costs less than 14 + 1 · 8 = 22 at this price. The plans below 22 are enumerated. One of
11.5 s and 8 GB costs 19.5, is found, and is the optimum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import product

from planner_core.core import SearchFault
from planner_core.cost import Component, Shares
from planner_core.search.algebra.pareto_points import PointAllowance
from planner_core.search.budget.gap_closing import GapClosing
from planner_core.search.budget.limits import TO_THE_END, SearchLimits
from planner_core.search.budget.mixing import mix_solutions
from planner_core.search.folded_solver import solve_folded, tables_at, with_objective
from planner_core.search.network.folded import Problem
from planner_core.search.network.search_cache import Answer, Assignment
from planner_core.search.objective import OBJECTIVES, TIE, Objective, least_memory_objective

MAX_PRICES = 16
"""Prices of memory that are tried at one end of the step."""
BOUND_NOISE, BOUND_NOISE_S = 1e-5, 1e-7
"""Share by which a bound may be above the value of a plan, and seconds: the costs of one plan are added up in several orders, bounds hold
up to ties of 1e-6 (`TIE`), and they hold the 1e-22 s that a byte is worth where plans tie: 0.04 ns of 400 GB, with which a plan that
sends nothing is above its value in seconds of communication. The network counts a tenth of a nanosecond for each local move
(`STEP_S`), and a plan does not: 11 ns of the 698 us of a Llama of four small layers."""
FORWARD, BACKWARD = Component.AFTER_FORWARD, Component.AFTER_BACKWARD
Edge = tuple[Assignment, Assignment]
"""Two assignments that cost the same at a price of memory, above which no other one is cheaper: one above the budget, one within it."""


def make_objective(problem: Problem, kind: str) -> Objective:
    """Return the objective `kind` of OBJECTIVES for one problem, with memory at the price zero."""
    assert kind in OBJECTIVES
    return Objective(kind, problem.model.step_time)


def rough_bound(problem: Problem, kind: str) -> float:
    """Return a lower bound on the value of every assignment, of any memory. The gaps between the step's time and its bounds stay open."""
    assignment = search_roughly(problem, kind)
    return assignment.bound if assignment else float("inf")


def search_roughly(problem: Problem, kind: str) -> Assignment | None:
    """Return a good assignment of any memory, with its bound. The gaps between the step's time and its bounds stay open."""
    return solve_folded(problem, replace(make_objective(problem, kind), exact=False))


def possible_winners(problems: Iterable[Problem], kind: str) -> list[Problem]:
    """Return the problems whose quick bound is not above the best value that a quick search finds in any of them, the lowest bound first.
    The best assignment of all problems, of any memory, is in one of these."""
    quick_answers = [(a, p) for p in problems if (a := search_roughly(p, kind))]
    best = min((a.seconds for a, _ in quick_answers), default=0.0) * (1 + TIE)
    return [p for a, p in sorted(quick_answers, key=lambda f: f[0].bound) if a.bound <= best]


def least_value_bound(problems: Iterable[Problem], kind: str) -> float:
    """Return a lower bound on the value of every assignment of the problems, of any memory. It is the best value unless a gap stays
    open."""
    order = possible_winners(problems, kind)
    least_value = min((a.seconds * (1 + TIE) for p in order if (a := search_roughly(p, kind))), default=float("inf"))
    for problem in order:
        if rough_bound(problem, kind) < least_value:
            limits = SearchLimits(abandon_above=least_value)
            least_value = min(least_value, search_within_budget(problem, objective=kind, limits=limits).bound)
    return least_value


def memory_bytes(a: Assignment) -> float:
    """Return the bytes per GPU when the forward pass ends or when the backward pass ends, whichever is more."""
    return float(max(a.totals[FORWARD], a.totals[BACKWARD]))


def check_bound(value: float, bound: float, of: str = "a plan") -> None:
    """Raise SearchFault if `bound`, which no plan of a request may be below, is above the value of one."""
    if bound > value * (1 + BOUND_NOISE) + BOUND_NOISE_S:
        raise SearchFault(
            f"a fault of the planner: the bound of {bound!r} is above the value {value!r} of {of}, so one of them is wrong and no answer "
            "is given; please report this request"
        )


def describe_excess(value: float, bound: float, best: str) -> str:
    """Return how far a plan's value may be above the best value, of which `bound` is a lower bound, in words. `best` names it."""
    check_bound(value, bound)
    percent = float(f"{100 * (value - bound) / max(bound, 1e-30):.2g}")  # two digits, but 120 and not 1.2e+02
    return f"at most {percent:g} % above the {best}"


def describe_gap(value: float, bound: float, best: str = "best there is") -> str:
    """Return the gap between the value of a plan that is not proven and its lower bound, in words."""
    return f"not proven: {describe_excess(value, bound, best)}"


@dataclass
class _BudgetedSearch:
    """One search: the incumbent `best` (the best assignment that fits), and the best bound with the prices that gave it."""

    problem: Problem
    objective: Objective
    budget: float
    limits: SearchLimits
    best: Assignment | None = None
    bound: float = 0.0
    solves: int = 0
    objective_at_bound: Objective = field(init=False)

    def __post_init__(self) -> None:
        self.objective_at_bound = self.objective

    def is_over(self) -> bool:
        """Return whether the search may end here: it is asked to stop, or no plan is good enough."""
        return self.limits.stop() or self.bound > self.limits.abandon_above

    def is_high_enough(self, highest: float) -> bool:
        """Return whether a search for a bound only may end here, where prices can raise it to at most `highest`."""
        gap = self.limits.max_open_gap / 2 if self.limits.bound_only else 0.0
        return gap > 0 and highest <= min(self.bound * (1 + gap), self.limits.abandon_above)

    def reuse_known(self) -> None:
        """Start with the bounds and incumbents of earlier searches of this problem, for other budgets."""
        for objective, a in self.known_assignments():
            self.update_bound(objective, a)

    def known_assignments(self) -> list[tuple[Objective, Assignment]]:
        """Return all solutions of earlier searches for this objective, at any prices of memory."""
        unpriced = self.objective.with_prices(0.0, 0.0)
        return [
            (o, a)
            for o, a in self.problem.cache.exact.items()
            if a is not None and isinstance(o, Objective) and replace(o, exact=True).with_prices(0.0, 0.0) == unpriced
        ]

    def solve_at_prices(
        self, after_forward: float, after_backward: float, abandon_above: float = float("inf"), exact: bool = True
    ) -> Assignment | None:
        """Solve with memory at these prices. The incumbent and the bound follow. If not `exact`, the bound may be a little lower.

        The bound at a price is not yet a bound within the budget (see `update_bound`), so `abandon_above` serves the price zero alone."""
        self.solves += 1
        objective = replace(self.objective.with_prices(after_forward, after_backward), exact=exact)
        a = solve_folded(self.problem, objective, abandon_above)
        if a is not None:
            self.update_bound(objective, a)
        return a

    def update_bound(self, objective: Objective, a: Assignment) -> None:
        self.consider(a)
        # L(m) - m · budget is a lower bound at every price m, also at 0. The highest one so far is kept with its price.
        price = objective.after_forward + objective.after_backward
        allowed = price * self.budget if price else 0.0
        bound = a.bound - allowed
        if bound > self.bound:
            self.bound, self.objective_at_bound = bound, replace(objective, exact=True)
        if self.best is not None:
            check_bound(self.best.seconds, self.bound, "an assignment within the budget")

    def solve_without_budget(self) -> Assignment | None:
        """Return the best assignment of any memory. If it does not fit, its gap stays open, since prices of memory do the rest;
        also if the caller needs a bound only."""
        limit = self.limits.abandon_above
        solution = self.solve_at_prices(0.0, 0.0, limit, exact=False)
        fits = solution is not None and memory_bytes(solution) <= self.budget
        # It fits without a price, so it is the answer, and now its gap between bound and true time is worth closing.
        if fits and self.bound <= limit and not self.limits.bound_only:
            return self.solve_at_prices(0.0, 0.0, limit)
        return solution

    def begin(self) -> tuple[Assignment | None, Answer | None]:
        """Return the best assignment of any memory; and the answer, where it is known without a search for prices of memory."""
        limit, prices = self.limits.abandon_above, self.limits.prices
        unlimited = self.solve_without_budget()
        if unlimited is None:
            return None, None
        # The fastest plan of any memory fits, or not even this one is good enough: prices of memory can change neither.
        is_known = self.best is not None or self.bound > limit
        # The prices of another mesh's bound are a guess. If the bound at this guess is too high already, no search is needed.
        if not is_known and any(prices) and limit < float("inf"):
            self.solve_at_prices(*prices, exact=False)
            is_known = self.bound > limit
        return unlimited, self.answer(memory_bytes(unlimited)) if is_known else None

    def price_memory(self, unlimited: Assignment, smallest: Assignment) -> None:
        """Move the prices of memory to where the bound is highest. `unlimited` is the fastest assignment of any memory, and `smallest`
        fits."""
        ends = (FORWARD, BACKWARD) if unlimited.totals[FORWARD] >= unlimited.totals[BACKWARD] else (BACKWARD, FORWARD)
        # Exact prices take long, and the rough ones find where to begin.
        for exact in (False, True) if self.limits.prove else (False,):
            if exact and self.is_close:
                return
            # Both ends may exceed the budget. The fuller one is priced first, and often brings the other end below it as well. Then
            # prices of the other end raise no bound, and find better incumbents alone.
            edge: Edge | None = None
            for end in ends:
                no_bound = edge is not None and _fits_on_edge(edge, ends[0], end, self.budget)
                if unlimited.totals[end] > self.budget and not (no_bound and self.limits.bound_only):
                    edge = _price_memory(self, unlimited, smallest, end, exact)
            if not (exact or self.limits.bound_only or self.is_over()):
                self.mix_incumbents()

    def mix_incumbents(self) -> None:
        """Look for a better incumbent among mixtures of the solutions at prices."""
        assert self.best is not None
        folded = tables_at(self.problem, replace(self.objective_at_bound, exact=False))
        # Without a price of memory no two plans tie, so there is nothing to mix.
        if not (folded.objective.after_forward or folded.objective.after_backward):
            return
        mixture = mix_solutions(folded, self.best, self.budget, [a for _, a in self.known_assignments()])
        if mixture is not None:
            self.consider(mixture)

    def close_gap(self) -> None:
        """Enumerate what lies between the bound and the incumbent, or the value above which the search gives up."""
        assert self.best is not None
        closing = GapClosing(
            self.problem,
            self.objective_at_bound,
            self.budget,
            self.best,
            self.bound,
            self.limits.abandon_above,
            self.limits.points or PointAllowance(),
        )
        closing.run(self.is_over, only_at_once=self.is_close)
        self.best, self.bound = closing.best, max(self.bound, closing.bound)

    @property
    def is_close(self) -> bool:
        """Whether the incumbent is good enough."""
        return self.best is not None and self.best.seconds <= self.bound * (1 + self.limits.max_open_gap)

    def consider(self, a: Assignment) -> None:
        """Make `a` the incumbent if it fits and is better."""
        if memory_bytes(a) <= self.budget and (self.best is None or a.seconds < self.best.seconds):
            self.best = a

    def answer(self, least_memory: float) -> Answer:
        """Return the incumbent with its bound."""
        value = self.best.seconds if self.best else float("inf")
        prices = (self.objective_at_bound.after_forward, self.objective_at_bound.after_backward)
        return Answer(self.best, value, min(self.bound, value), least_memory, self.solves, prices=prices)


def search_within_budget(
    problem: Problem,
    *,
    objective: str = "time",
    budget: float = float("inf"),
    limits: SearchLimits = TO_THE_END,
    top_shares: Shares | None = None,
) -> Answer:
    """Return the best assignment of `problem` within a memory budget (see the head of the file).

    Args:
        problem: The folded network of a model on one mesh.
        objective: "time" (seconds of a step) or "communication" (seconds of all its collectives).
        budget: Bytes per GPU, for the network's sums of memory at the end of forward and of backward.
        limits: How far the search goes.
        top_shares: If given, the top block is priced as a plain sum at these shares, so that the answer is a lower bound.

    Returns:
        The answer. Its `assignment` is None if nothing fits; its `bound` is infinite if that is proven.
    """
    if limits.points is None:
        # Every question has the whole allowance, so that its answer does not depend on what was asked before.
        problem.cache.unit_points.remaining = problem.max_unit_points
    state = _BudgetedSearch(problem, replace(make_objective(problem, objective), top_shares=top_shares), budget, limits)
    unlimited, answer = state.begin()
    if unlimited is None or answer is not None:
        return answer or Answer(None, float("inf"), float("inf"), float("inf"), state.solves)
    # The prices begin from any assignment that fits.
    smallest = find_least_memory(problem, objective, enough=budget)
    state.solves += 1
    assert smallest is not None
    least_bytes = memory_bytes(smallest)
    if least_bytes > budget:
        # Where no sum is within the budget, the price can rise without end, and the bound with it.
        bound = float("inf") if no_sum_fits(problem, budget) else state.bound
        return Answer(None, float("inf"), bound, least_bytes, state.solves, smallest)
    state.consider(smallest)
    state.reuse_known()
    state.price_memory(unlimited, smallest)
    # Memory has a price, so nobody asks for the exact plan of any memory, and what was kept for that takes most of a problem's bytes.
    problem.cache.inexact_tables.clear()
    if limits.prove:
        state.close_gap()
    problem.cache.last_tables = None
    return state.answer(least_bytes)


def find_least_memory(problem: Problem, objective: str = "time", enough: float = 0.0) -> Assignment | None:
    """Return the assignment of least `memory_bytes`, or one that holds at most `enough` of them, with its value under `objective`; or None
    if no assignment is possible.

    Memory is the maximum of two ends of the step, and a solution minimises a weighted sum of them. The assignment of least
    memory after forward is the answer if it holds no more after backward, and vice versa. Otherwise the answer is the best
    of these two and of the one that minimises the mean, which need not be the least.
    """
    assignments: list[Assignment] = []
    # max(f, b) ≥ share · f + (1 - share) · b. At share 1 the least f is found. If b is not above it, then max = f is least, too.
    for share in (1.0, 0.0, 0.5):
        a = solve_folded(problem, least_memory_objective(problem.model.step_time, share))
        if a is None:
            return None
        assignments.append(replace(with_objective(a, make_objective(problem, objective)), bound=0.0))
        ends = float(a.totals[FORWARD]), float(a.totals[BACKWARD])
        if max(ends) <= enough or (share == 1.0 and ends[0] >= ends[1]) or (share == 0.0 and ends[1] >= ends[0]):
            return assignments[-1]
    return min(assignments, key=memory_bytes)


def no_sum_fits(problem: Problem, budget: float) -> bool:
    """Return whether it is proven that every assignment holds more than `budget` bytes when forward or when backward ends."""
    # The least of each end by itself: find_least_memory, which asks for both, gave these solutions already.
    for end, share in ((FORWARD, 1.0), (BACKWARD, 0.0)):
        a = solve_folded(problem, least_memory_objective(problem.model.step_time, share))
        if a is None or a.totals[end] > budget:
            return True
    return False


def _price_memory(
    state: _BudgetedSearch,
    above_budget: Assignment,
    within_budget: Assignment,
    end: Component,
    exact: bool,
) -> Edge | None:
    """Find the price at which a plan that fits and a plan that does not fit cost the same: there the bound is highest.

    The price is the slope of the line through (memory, seconds) of the two plans. A solution at this price finds a plan below
    the line, which takes the place of one of the two; or it shows that none is below, and the search ends. Returns the two plans; None if
    the search ends before.
    """

    def bytes_of(a: Assignment) -> float:
        return float(a.totals[end])

    def prices_only_this_end(objective: Objective) -> bool:
        return (objective.after_backward if end == FORWARD else objective.after_forward) == 0.0

    def height_at_budget(ends: tuple[Assignment, Assignment]) -> float:
        """Return the seconds at the budget on the line through two assignments."""
        # The line's height at the budget: (9 GB, 10 s) and (5 GB, 14 s) give 14 - 4 · 3 / 4 = 11 s at 8 GB. It is the bound if no plan
        # lies below the line, so begin with the two known plans whose line is lowest.
        over_budget, under_budget = ends
        return under_budget.seconds - (under_budget.seconds - over_budget.seconds) * (
            state.budget - bytes_of(under_budget)
        ) / (bytes_of(over_budget) - bytes_of(under_budget))

    assignments = [above_budget, within_budget, *(a for o, a in state.known_assignments() if prices_only_this_end(o))]
    over_budget, under_budget = (
        [a for a in assignments if (bytes_of(a) > state.budget) == over] for over in (True, False)
    )
    above_budget, within_budget = min(product(over_budget, under_budget), key=height_at_budget)
    for _ in range(MAX_PRICES):
        saved = bytes_of(above_budget) - bytes_of(within_budget)
        slower = within_budget.seconds - above_budget.seconds
        if (
            state.is_over()
            or saved <= 0
            or slower <= 0
            or state.is_high_enough(height_at_budget((above_budget, within_budget)))
        ):
            return None
        # 4 s for 4 GB: at 1 s per GB both ends cost 19. A plan that costs less lies below the line and takes the place of the end on its
        # side of the budget. If no such plan exists, the line is an edge of the lower hull, and no price gives a higher bound.
        price = slower / saved
        solution = state.solve_at_prices(
            price if end == FORWARD else 0.0, price if end == BACKWARD else 0.0, exact=exact
        )
        line = above_budget.seconds + price * bytes_of(above_budget)
        if solution is None or solution.seconds + price * bytes_of(solution) >= line * (1 - 1e-12):
            return above_budget, within_budget
        if bytes_of(solution) <= state.budget:
            within_budget = solution
        else:
            above_budget = solution
    return None


def _fits_on_edge(edge: Edge, priced: Component, other: Component, budget: float) -> bool:
    """Whether the mean of two assignments that takes just the budget at the priced end of the step has room for the other end.

    Both assignments are the cheapest at the price, so by duality no price of the other end raises the bound. Example: 9 and 5 GB in a
    budget of 8 GB: three quarters of the first and a quarter of the second. With 6 and 10 GB at the other end that is 7 GB there.
    """
    above, within = edge
    share = (budget - within.totals[priced]) / (above.totals[priced] - within.totals[priced])
    return float(within.totals[other] + share * (above.totals[other] - within.totals[other])) <= budget
