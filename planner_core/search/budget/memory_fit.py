"""The best assignment whose simulated memory fits the GPU.

The search counts memory as a sum over the network, so that it can be exact. The memory simulation (`cost.memory.walk`) follows
forward and backward, and computes what a GPU holds. The two differ by a few per cent. So the search is repeated with other
budgets for the sum, until the best assignment that fits lies just below one that does not.

    next budget of the sum = (sum of the last answer) + (budget of the GPU - simulated peak of the last answer)

Example: a GPU has 80 GB. The search is asked for a sum of 84 GB (`FIRST_BUDGET_FACTOR`). Its answer has a sum of 83 GB and a simulated peak
of 82 GB, which does not fit. The next budget is 83 + (80 - 82) = 81 GB. Its answer has a sum of 80.9 GB and a peak of 79.9 GB,
which fits. The next budget would be 80.9 + (80 - 79.9) = 81 GB again, so the search ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from planner_core.core import Graph
from planner_core.cost.memory import peak_memory
from planner_core.search.algebra.pareto_points import MAX_PROOF_POINTS, PointAllowance
from planner_core.search.budget.limits import TO_THE_END, SearchLimits
from planner_core.search.extract_plan import make_block_plans
from planner_core.search.folded_solver import solve_folded
from planner_core.search.lagrangian import (
    find_least_memory,
    make_objective,
    memory_bytes,
    no_sum_fits,
    rough_bound,
    search_roughly,
    search_within_budget,
)
from planner_core.search.network.folded import Problem
from planner_core.search.network.search_cache import Answer, Assignment, SearchCache, SumMatch
from planner_core.search.objective import TIE

MAX_SUM_BUDGETS = 6
"""Budgets of the sum that are tried."""
FIRST_BUDGET_FACTOR = 1.05
"""The first budget of the sum, as a multiple of the GPU's. In the worst case seen the sum is above the peak by about as much."""
MAX_SIMULATED_FACTOR = 1.5
"""If the sum is above this multiple of the budget, memory is not simulated. The peak was never seen below 0.74 of the sum."""
MAX_UNPROVABLE_POINTS = 100_000
"""Points that are formed where the answer cannot be proven: some assignment of a sum within the budget is better, but its peak is not
within. They only look for a better answer."""
NEAR_LEAST_PRICE = 1e-8
"""Seconds per byte at which memory counts far more than time, but time still counts."""
SMALL_SUM_PRICES = (1e-7, 1e-9, 1e-10, 1e-11)
"""Seconds per byte at which assignments of small sums are searched, if the assignment of the least sum does not fit."""
BUDGET_TOLERANCE = 4e-3
"""Two budgets that differ by less than this share count as equal."""
BUDGET_MARGIN = 1e-3
"""Where a gap may stay open, the next budget after a peak that does not fit is lower by this share than it seems to have to be."""


def simulated_peak(problem: Problem, graph: Graph, assignment: Assignment, budget: float) -> float:
    """Simulated peak memory of an assignment, bytes per GPU. If its sum is far above the budget, the sum is returned instead:
    it is quicker, and it decides the same."""
    sum_bytes = memory_bytes(assignment)
    # The peak is at least about 0.74 of the sum: above 1.5 of the budget that is 1.11 of it, which does not fit.
    if sum_bytes > MAX_SIMULATED_FACTOR * budget:
        return sum_bytes
    return walk_memory(problem, graph, assignment)["peak"]


def walk_memory(problem: Problem, graph: Graph, assignment: Assignment) -> dict[str, int]:
    """Return the bytes per GPU at the simulated peak of an assignment, by kind. It is simulated once."""
    if assignment.peak_bytes is None:
        blocks = make_block_plans(problem, assignment)
        assignment.peak_bytes = peak_memory(blocks, graph, problem.model, problem.cache.walks)
    return assignment.peak_bytes


def no_plan_fits(problem: Problem, budget: float) -> bool:
    """Return whether sums of the least bytes of each table prove that the simulated peak of every assignment is above `budget` bytes.

    If False, it is still open whether one fits.
    """
    # All weights, gradients and states are there when backward ends, so no peak is below that sum. The sum at the end of forward may be
    # above its peak, so the network whose sums are not decides there. It is built only where this one's sum leaves the question open.
    if problem.least_bytes_at_ends[1] > budget:
        return True
    if problem.least_bytes <= budget:
        return False
    return problem.make_at_least is None or problem.make_at_least().least_bytes > budget


def exceeds_budget_by_far(problem: Problem, budget: float) -> bool:
    """Return whether no assignment fits, and by so much that its sum says well enough how much memory is needed.

    Near the budget it matters by how much a plan exceeds it, so the least peak is searched among several plans (`best_of_small_sums`).
    """
    states_exceed = bool(problem.least_bytes_at_ends[1] > budget)
    return states_exceed or (problem.least_bytes > MAX_SIMULATED_FACTOR * budget and no_plan_fits(problem, budget))


def infeasible_answer(problem: Problem, unproven: Answer | None, budget: float, objective: str) -> Answer | None:
    """If even the least memory is far too much: the answer that nothing fits, with an assignment of nearly the least memory. Else
    None. `unproven`: the answer of a search without proof."""
    if not exceeds_budget_by_far(problem, budget) and (
        unproven is None or unproven.assignment or unproven.least_memory <= MAX_SIMULATED_FACTOR * budget
    ):
        return None
    smallest = _solve_near_least_memory(with_smallest_variants(problem), objective)
    if smallest is None:
        return None
    return Answer(None, float("inf"), float("inf"), memory_bytes(smallest), smallest=smallest)


def with_smallest_variants(problem: Problem) -> Problem:
    """Return the problem with the variant of the least bytes alone of each block."""
    least = {n: min(variants, key=lambda v: max(variants[v].least_bytes)) for n, variants in problem.blocks.items()}
    return _with_variants(problem, least)


def _each_policy_alone(problem: Problem) -> list[Problem]:
    """Return the problem under each policy of recomputation that all its blocks may have, where there are several."""
    first, *others = problem.blocks.values() or ({},)
    policies = [v for v in first if all(v in variants for variants in others)]
    return [_with_variants(problem, dict.fromkeys(problem.blocks, v)) for v in policies] if len(policies) > 1 else []


def _with_variants(problem: Problem, chosen: Mapping[str, str]) -> Problem:
    """Return the problem with the `chosen` variant alone of each block."""
    blocks = {n: {v: problem.blocks[n][v]} for n, v in chosen.items()}
    cache = SearchCache(plans=problem.cache.plans, walks=problem.cache.walks, unit_points=problem.cache.unit_points)
    return replace(problem, blocks=blocks, cache=cache)


def _solve_near_least_memory(problem: Problem, objective: str) -> Assignment | None:
    """Return an assignment of nearly the least memory. The assignment of the least may send far more to save one byte."""
    return solve_folded(
        problem, replace(make_objective(problem, objective).with_prices(NEAR_LEAST_PRICE, 0.0), exact=False)
    )


def rough_plan_fits(problem: Problem, graph: Graph, budget: float, objective: str) -> bool:
    """Return whether the best assignment of a rough search, of any memory, fits by its simulated peak."""
    plan = search_roughly(problem, objective)
    return plan is not None and simulated_peak(problem, graph, plan, budget) <= budget


def least_sum_peak(problem: Problem, graph: Graph, budget: float, objective: str) -> float:
    """Return the simulated peak of an assignment of nearly the least sum, bytes per GPU; infinite if there is no assignment."""
    assignment = _solve_near_least_memory(problem, objective)
    return simulated_peak(problem, graph, assignment, budget) if assignment else float("inf")


def fit_simulated_memory(
    problem: Problem, graph: Graph, budget: float, objective: str, limits: SearchLimits = TO_THE_END
) -> Answer:
    """Return the best assignment whose simulated peak memory is at most `budget` bytes per GPU.

    `limits.points` are those that all searches for a proof may form together; each forms at most MAX_PROOF_POINTS of them. By default each
    may form as many.

    The bound of the answer holds for every assignment whose simulated peak is within the budget (`bound_of_walk`).
    If nothing fits, the answer's `least_memory` is a simulated peak too, that of `smallest`.
    """
    known = problem.cache.infeasible.get((objective, budget))
    if known is not None and (known.bound > limits.abandon_above or known.bound == float("inf")):
        return known
    answer = infeasible_answer(problem, None, budget, objective)
    if answer is None:
        # All searches of this question share what settles units. What an earlier question took of it must not change this answer.
        problem.cache.unit_points.remaining = problem.max_unit_points
        points = limits.points or PointAllowance(MAX_SUM_BUDGETS * MAX_PROOF_POINTS)
        answer = _MemoryFit(problem, graph, budget, objective, replace(limits, points=points)).run()
    if answer.bound > limits.abandon_above or answer.bound == float("inf"):
        problem.cache.infeasible[objective, budget] = answer
    return answer


def bound_of_walk(
    problem: Problem,
    budget: float,
    objective: str,
    bound: float,
    prices: tuple[float, float] = (0.0, 0.0),
    abandon_above: float = float("inf"),
    open_gap: float = 0.0,
) -> float:
    """Raise `bound` to a lower bound on every assignment whose simulated peak is within `budget` bytes per GPU.

    `bound` holds for assignments whose sum is within the budget, found at `prices` of memory. The sum counts one copy of every recomputed
    block at work, and the walk holds one of them at a time: T5's sum is up to 10 % above its walk. So the bound is that of the network
    whose sums leave these out, since what is left is held while the loss runs. The bound is infinite if not even such a sum is within the
    budget. A value above `abandon_above` is high enough, and so is one at most half of `open_gap` below the highest that prices give.
    """
    if problem.make_at_least is None or problem.unrestricted is not None or bound <= rough_bound(problem, objective):
        return bound
    limits = SearchLimits(min(bound, abandon_above), prove=False, bound_only=True, prices=prices, max_open_gap=open_gap)
    return min(
        bound, search_within_budget(problem.make_at_least(), objective=objective, budget=budget, limits=limits).bound
    )


@dataclass
class _MemoryFit:
    """The searches for one budget of the GPU.

    Attributes:
        bound: A lower bound on the value of every assignment that fits.
        max_points: The points that one search may form. `limits.points` are those of all searches together.
        best_sum_budget: The budget of the sum that gave the best answer.
        peaks: The simulated peaks so far, bytes per GPU.
        least_within_sum: The least value of an assignment whose sum is within the budget, of any peak.
    """

    problem: Problem
    graph: Graph
    budget: float
    objective: str
    limits: SearchLimits
    bound: float = 0.0
    max_points: int = MAX_PROOF_POINTS
    best_sum_budget: float = 0.0
    peaks: list[tuple[Assignment, float]] = field(default_factory=list)
    least_within_sum: float = float("inf")

    def run(self) -> Answer:
        """Find the best answer without a proof, then prove it or find a better one, if the limits ask for that."""
        # If the fastest plan of any memory fits, no budget has to be searched. The rough search tells which case it is, and costs less.
        limit, fastest = self.limits.abandon_above, search_roughly(self.problem, self.objective)
        if fastest is None or fastest.bound > limit or self._simulate_peak(fastest) <= self.budget:
            to_the_end = SearchLimits(abandon_above=limit)
            unlimited = search_within_budget(self.problem, objective=self.objective, limits=to_the_end)
            fastest = unlimited.assignment
            if fastest is None or unlimited.value > limit or self._simulate_peak(fastest) <= self.budget:
                return unlimited
        return self.lower_bound_to_walk(self.search_below(fastest))

    def search_below(self, fastest: Assignment) -> Answer:
        """Find the best answer that fits, where the `fastest` assignment of any memory does not. Its bound is that of the sums."""
        unproven = self.find_unproven(fastest)
        if unproven.assignment is None or not self.limits.prove:
            return unproven
        # A proof among the sums cannot lift the bound above that of the walk, so a gap that may stay open is not worth one.
        is_close = unproven.value <= unproven.bound * (1 + self.limits.max_open_gap)
        if self.limits.max_open_gap and is_close and self.lower_bound_to_walk(unproven) is not unproven:
            return unproven
        if self.least_within_sum < unproven.value * (1 - TIE):
            self.max_points = min(self.max_points, MAX_UNPROVABLE_POINTS)
        proven = self.best_fitting(self.best_sum_budget, memory_bytes(fastest), self.limits)
        return unproven if proven.assignment is None and proven.smallest is not None else proven

    def lower_bound_to_walk(self, answer: Answer) -> Answer:
        """Return the answer with a bound that holds for every assignment whose simulated peak fits."""
        if self.limits.of_sums:
            return answer
        limit, gap = self.limits.abandon_above, self.limits.max_open_gap
        bound = bound_of_walk(self.problem, self.budget, self.objective, answer.bound, answer.prices, limit, gap)
        return answer if bound >= answer.bound else replace(answer, bound=bound)

    def find_unproven(self, fastest: Assignment) -> Answer:
        """Find, without a proof, the budget of the sum whose best assignment just fits the GPU's budget.

        `fastest` is the fastest assignment of any memory. The result of an earlier search is reused if it gave up no sooner than this one.
        """
        known = self.problem.cache.sum_matches.get((self.objective, self.budget))
        if known is not None and known.abandoned_above >= self.limits.abandon_above:
            self.bound, self.best_sum_budget = known.bound, known.sum_budget
            self.least_within_sum = known.least_within_sum
            return known.answer
        answer = self._search_unproven(fastest)
        # That nothing fits is remembered too: a search below a lower value would try the same budgets once more.
        self.problem.cache.sum_matches[self.objective, self.budget] = SumMatch(
            answer, self.best_sum_budget, self.bound, self.least_within_sum, self.limits.abandon_above
        )
        return answer

    def _search_unproven(self, fastest: Assignment) -> Answer:
        """As `find_unproven`, where no earlier search serves."""
        self.bound = fastest.bound
        self.simulate(fastest)
        smallest = find_least_memory(self.problem, self.objective, enough=self.budget)
        if smallest is not None and memory_bytes(smallest) > self.budget:
            # No sum is within the budget. A peak may be, but rarely is: the few assignments of nearly the least memory decide it, and save
            # searches among sums of up to FIRST_BUDGET_FACTOR times the budget.
            self.simulate(smallest)
            bound = float("inf") if no_sum_fits(self.problem, self.budget) else fastest.bound
            nothing_fits = Answer(None, float("inf"), bound, memory_bytes(smallest))
            infeasible = self.best_of_small_sums(nothing_fits, memory_bytes(smallest))
            if infeasible.assignment is None:
                return infeasible
        unproven, most = replace(self.limits, prove=False, max_open_gap=0.0), memory_bytes(fastest)
        return self.best_fitting(min(self.budget * FIRST_BUDGET_FACTOR, most - 1), most, unproven)

    def best_fitting(self, sum_budget: float, upper: float, limits: SearchLimits) -> Answer:
        """Return the best answer whose simulated peak fits. Budgets of the sum between 0 and `upper` are tried, first `sum_budget`."""
        best: Answer | None = None
        lower, highest = 0.0, upper
        for _ in range(MAX_SUM_BUDGETS):
            answer = self._best_within_sum(sum_budget, limits)
            is_too_slow = answer.bound > limits.abandon_above
            # The bound of sums within the GPU's budget is taken for that of all that fits, so it ends the search.
            is_over = is_too_slow and limits.of_sums and sum_budget >= self.budget
            if is_too_slow and not is_over and upper < highest and upper - sum_budget > BUDGET_TOLERANCE * upper:
                # A larger sum may be quicker and still fit: Llama-3-8B of two layers, of which 5 GB hold none below 67.2 ms with a sum of
                # 4.74 GB, takes 66.3 ms with a sum of 4.86.
                lower, sum_budget = sum_budget, (sum_budget + upper) / 2
                continue
            if answer.assignment is None or is_too_slow:
                return best or self._answer_without_plan(answer, sum_budget)
            self.bound = max(self.bound, answer.bound if sum_budget >= self.budget else 0.0)
            sum_bytes, peak = memory_bytes(answer.assignment), self.simulate(answer.assignment)
            if sum_bytes <= self.budget:
                self.least_within_sum = min(self.least_within_sum, answer.value)
            if peak > self.budget:
                if sum_bytes > sum_budget and best is None:  # nothing has a smaller sum, and it does not fit
                    return self.best_of_small_sums(self._answer_without_plan(answer, sum_budget), sum_bytes)
                upper = min(sum_budget, sum_bytes)
                if not limits.prove and sum_bytes - (peak - self.budget) < self.budget < upper:
                    sum_budget = self.budget  # since the bound there holds for the answer
                    continue
            else:
                best = self._better_of(best, answer, sum_budget)
                lower = max(sum_budget, sum_bytes)
            sum_budget = self._next_sum_budget(sum_bytes, peak)
            done = limits.prove and best is not None and not self.max_points  # no other budget can be proven
            if (
                done
                or upper - lower < BUDGET_TOLERANCE * upper
                or (peak <= self.budget and sum_budget < lower * (1 + BUDGET_TOLERANCE))
            ):
                break
            # The step from the last peak left the range that is open, so the middle of the range is tried.
            if not lower < sum_budget < upper:
                sum_budget = (lower + upper) / 2
        # Peaks may be far above sums: with more GPUs than samples, Llama-3-8B on 512 GPUs holds 380 GiB of buffers at a sum of 4.
        return best or self.best_of_small_sums(self._answer_without_plan(answer, sum_budget), sum_bytes)

    def _better_of(self, best: Answer | None, answer: Answer, sum_budget: float) -> Answer:
        """Return the better of the best answer so far and one that fits, which a search at `sum_budget` gave."""
        if best is not None and best.value <= answer.value:
            return best
        self.best_sum_budget = sum_budget
        # A search at a smaller sum than the budget did not look at all plans that fit, so its bound is not theirs.
        return replace(answer, bound=answer.bound if sum_budget >= self.budget else min(self.bound, answer.value))

    def _next_sum_budget(self, sum_bytes: float, peak: float) -> float:
        """Return the budget of the sum at which the peak would just fill the GPU, if sum and peak differ there as much as here."""
        sum_budget = sum_bytes + self.budget - peak
        if peak > self.budget and self.limits.max_open_gap:
            # The next peak is often too high again, by a few MB only. With 80 GB, sums of 79.57, 79.54 and 79.51 were tried for EXAONE-4
            # 32B, whose values differ by 0.1 %; a sum of 79.49 fits at once.
            sum_budget -= BUDGET_MARGIN * self.budget
        return sum_budget

    def _answer_without_plan(self, answer: Answer, sum_budget: float) -> Answer:
        """Return the answer of a search that ended without a plan, with a bound on every plan that fits.

        A plan with a larger sum than `sum_budget` may fit by its peak, so only bounds at the GPU's budget and above it hold. Example:
        with 80 GB, no plan of a sum up to 78 GB takes less than 9 s, and none up to 80 GB less than 7 s. A plan of 79 GB may take 7 s.
        """
        bound = answer.bound if sum_budget >= self.budget else self.bound
        return replace(answer, assignment=None, bound=bound)

    def best_of_small_sums(self, answer: Answer, least_sum: float) -> Answer:
        """Return the fastest of a few assignments of small sums whose peak fits; otherwise the `answer` that nothing fits.

        The assignment of the least sum need not have the least peak, since the sum does not hold the buffers of weights that are gathered.
        """
        nothing_fits = least_sum > self.budget  # then only the least peak is asked for
        prices = SMALL_SUM_PRICES[:1] if nothing_fits else SMALL_SUM_PRICES
        fitting = self._fitting_at_prices(self.problem, prices)
        if not fitting:
            # One layer of Llama that recomputes nothing has the least sum, and a larger peak than one that recomputes.
            fitting = [a for p in _each_policy_alone(self.problem) for a in self._fitting_at_prices(p, prices[:1])]
        if fitting:
            best = min(fitting, key=lambda a: a.seconds)
            self.best_sum_budget = memory_bytes(best)
            return replace(answer, assignment=best, value=best.seconds, bound=min(self.bound, best.seconds))
        smallest, least = min(self.peaks, key=lambda simulated: simulated[1])
        return replace(answer, assignment=None, least_memory=least, smallest=smallest)

    def _fitting_at_prices(self, problem: Problem, prices: Sequence[float]) -> list[Assignment]:
        """Return the best assignments of `problem` at these prices of memory, at either end, whose peak fits."""
        fitting = []
        for price, (f, b) in product(prices, ((1.0, 0.0), (0.0, 1.0))):
            objective = make_objective(problem, self.objective).with_prices(f * price, b * price)
            a = solve_folded(problem, replace(objective, exact=False))
            if a is not None and self.simulate(a) <= self.budget:
                fitting.append(a)
        return fitting

    def simulate(self, assignment: Assignment) -> float:
        """Simulate the peak memory of an assignment, and record it in `peaks`."""
        self.peaks.append((assignment, self._simulate_peak(assignment)))
        return self.peaks[-1][1]

    def _simulate_peak(self, assignment: Assignment) -> float:
        return simulated_peak(self.problem, self.graph, assignment, self.budget)

    def _best_within_sum(self, budget: float, limits: SearchLimits) -> Answer:
        """Return the best assignment whose sum is within `budget`, or one of nearly the least memory if no sum is."""
        assert limits.points is not None
        with limits.points.portion(self.max_points) as work:
            answer = search_within_budget(
                self.problem, objective=self.objective, budget=budget, limits=replace(limits, points=work)
            )
        if work.remaining < 0:
            self.max_points = 0
        if answer.assignment is None and answer.smallest is not None:
            smallest = _solve_near_least_memory(self.problem, self.objective)
            if smallest is not None:
                return replace(answer, assignment=smallest, value=smallest.seconds)
        return answer
