"""Search pipeline stages: their number, the mesh of each, the micro-batches, the cut of the model, and the policy of each copy.

    degrees (ranks, stages a rank, mesh of a rank, micro-batch), the most promising first
        -> the copies that each rank has time and memory for (`rank_bound`): a bound on every cut
        -> the best plan of the whole model on that mesh, within the memory of all ranks together: another bound on every cut
        -> policies for the copies, the quickest first -> the best cut (`search.algebra.partition`) -> simulated price

Two bounds prune degrees. That of `rank_bound` counts the micro-batches in flight on each rank. For the other, every rank holds at least
one micro-batch of its stages, so all ranks together hold what the whole model holds on the mesh of one rank. A search of the whole model
within the sum of their budgets therefore gives S, a lower bound on the seconds of all stages together. With m micro-batches and p stages
in 1F1B a step takes at least

    S / m / (1 - (1 - 1/m)^p)

for every cut. Rank r starts after one micro-batch of each stage before it, so later stages must be smaller; the bound is the cut in which
all ranks end at once. Example: S = 8 s, m = 4, p = 2: 2 / (1 - 0.75²) = 4.57 s, while equal stages take 1 s · (4 + 1) = 5 s.
With several stages a rank it is S / p. Work once a step, such as the optimizer's, delays no other rank: were all of S such work, a step
could take S / p. So S / p is what an answer states, or the bound of `rank_bound` where it is higher. Until S is searched, the S of degrees
with the same work per GPU stands in for it.

A copy policy is the best plan of the whole model, with equal copies, in a share of that memory. The memory of a stage counts the
micro-batches in flight on its rank. The walk of the priced plan decides whether a cut fits. If a rank exceeds the budget there, the cut
is searched again with the budget lowered by the excess.

For a tool the same search sees fewer plans (`tool_forms`): one layout on the mesh of a rank, so that a policy is a recomputation, and no
two policies in one plan.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner_core.core import (
    BlockPlan,
    Graph,
    InputError,
    Plan,
    Sentence,
)
from planner_core.cost import Component, ops_at_the_ends
from planner_core.planning.fitting.shortage import states_can_fit
from planner_core.planning.methods import list_switches
from planner_core.planning.methods.legality import unsearchable_faults
from planner_core.planning.planner import Planner, prepare_planner, with_recompute, with_zero
from planner_core.planning.request import Progress, Request
from planner_core.planning.stages.cuts import find_cut, plan_of_cut, plan_of_least_memory
from planner_core.planning.stages.degrees import (
    MICRO_BATCH_SAMPLES,
    WHOLE_SEARCH,
    Breadth,
    ModelKey,
    PipelineDegrees,
    list_degrees,
)
from planner_core.planning.stages.estimates import DegreeEstimates, least_compute_s, least_host_s
from planner_core.planning.stages.pieces import CopyPolicy, RangeCosts, policy_from_plan
from planner_core.planning.stages.rank_bound import RankBound, rank_bound
from planner_core.planning.stages.tool_forms import FORMS, MOST_ZERO_OF_TOOLS
from planner_core.search import SearchLimits, check_bound, make_block_plans, search_roughly, search_within_budget
from planner_core.search.algebra import TooWide
from planner_core.search.network import Problem

ZERO_STAGES = (1, 2, 3)
"""The ZeRO stages of plans with stages. Stage 2 scatters gradients and stage 3 gathers weights in every micro-batch, and stages need
many micro-batches. So a higher one is searched only where the one before leaves too little memory for activations."""
FEW_RANKS = 4
"""Up to so many ranks, the bound S of all ranks together is mostly above that of each rank."""
MEMORY_SHARES, POLICY_MEMORY_SHARE = (1.0, 0.35), 0.6
"""The shares of the ranks' memory in which a copy policy is searched: with recomputation chosen for each block, and with one
recomputation for all."""
STRONG_RECOMPUTATIONS = ("selective", "keep-attention", "full")
MAX_SLOWDOWN = 1.15
"""Degrees are pruned if their estimate is this many times the best step with stages. Estimates are low, so where the best step is that of
one stage, they are pruned if their estimate is as long."""


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """The best plan with stages. `bound`: no plan of the searched degrees is quicker."""

    plan: Plan
    planner: Planner
    bound: float


def search_stages(
    planner: Planner,
    say: Progress = lambda text: None,
    load_graph: Callable[[Request], Graph] | None = None,
    known: Plan | None = None,
    breadths: Sequence[Breadth] = WHOLE_SEARCH,
) -> StagedPlan | None:
    """Return the best plan with stages that fits; None if none is quicker than the `known` plan of one stage, by the last of `breadths`."""
    return _StageSearch(planner, say, load_graph, known, breadths).run()


def find_smallest_stages(
    planner: Planner, say: Progress = lambda text: None, load_graph: Callable[[Request], Graph] | None = None
) -> StagedPlan | None:
    """Return a plan with stages of little memory, for an answer where none fits; None if the model has none."""
    return _StageSearch(planner, say, load_graph, None).find_smallest()


class _StageSearch:
    """The state of one search.

    Attributes:
        first: The planner of the request.
        breadths: How many degrees are looked at, in one search after the other.
        below_s: The step that a plan must be below, by the known plan of one stage.
        min_compute_s: The least compute that other degrees are taken to have.
        host_s: The least seconds in which a host issues a micro-batch of the whole model, and what comes once a step.
        form: What the request's tool can be told; None if every plan may be chosen.
        estimates: Rough steps of degrees at the ZeRO stages that the request and the tool allow.
        planners: Planners by number of micro-batches and ZeRO stage; None where the model has no such batch.
        micro_batches: Seconds and activation bytes of a micro-batch of the whole model, by `gpu_work`.
        policies: The copy policies with the bounds of their searches, by `whole_model`, recomputation and share of memory; None where
            nothing fits, or the bound ended the search.
        uniform: The last network in which all copies are alike, by `whole_model` and recomputation.
        model_s: The bound S by `PipelineDegrees.whole_model`.
        prices: The prices of memory that gave this bound, by the same key.
        best: The best plan so far, with its planner and degrees.
        bounding: The networks of bounds by `whole_model`.
        rank_bounds: The least costs of a copy by `whole_model`; None where the model has no plan.
        shared_s: By searched degrees S / p, the bound S evenly shared by the ranks.
    """

    def __init__(
        self,
        planner: Planner,
        say: Progress,
        load_graph: Callable[[Request], Graph] | None,
        known: Plan | None,
        breadths: Sequence[Breadth] = WHOLE_SEARCH,
    ) -> None:
        self.first, self.say, self.load_graph, self.breadths = planner, say, load_graph, breadths
        self.below_s = known.cost.step_time_s / breadths[-1].least_gain if known else math.inf
        self.min_compute_s = least_compute_s(known) if known else 0.0
        self.host_s = least_host_s(planner, known) if known else (0.0, 0.0)
        self.form = FORMS.get(str(planner.request.tool))
        highest = min(planner.workload.zero, MOST_ZERO_OF_TOOLS if self.form else max(ZERO_STAGES))
        admitted = planner.request.zero_stages
        zero_stages = tuple(z for z in ZERO_STAGES if z <= highest and z in admitted) or (highest,)
        self.estimates = DegreeEstimates(planner, zero_stages, self.form)
        self.planners: dict[tuple[int, int], Planner | None] = {}
        self.micro_batches: dict[tuple[int, int, str], tuple[float, float]] = {}
        self.policies: dict[tuple[ModelKey, str, float], tuple[CopyPolicy | None, float]] = {}
        self.uniform: tuple[tuple[ModelKey, str], Problem | None] | None = None
        self.model_s: dict[ModelKey, float] = {}
        self.prices: dict[ModelKey, tuple[float, float]] = {}
        self.best: tuple[Plan, Planner, PipelineDegrees] | None = None
        self.bounding: dict[ModelKey, Problem | None] = {}
        self.rank_bounds: dict[ModelKey, RankBound | None] = {}
        self.shared_s: dict[PipelineDegrees, float] = {}

    def run(self) -> StagedPlan | None:
        """Search the degrees that may be quicker, the most promising first."""
        # Stages share weights and states no better than all GPUs evenly do.
        if not states_can_fit(self.first):
            return None
        candidates = [
            d
            for d in self.degrees
            if d.equal_stages_s(self.min_compute_s * d.ranks / d.micro_batches) < self.below_s
            and d.equal_stages_s(self.host_s[0]) + self.host_s[1] / d.ranks < self.below_s
        ]
        for breadth in self.breadths:
            admitted = [d for d in candidates if d.samples in breadth.samples or not breadth.samples]
            self.find_micro_batches(admitted)
            self.search_promising(admitted, breadth)
        if self.best is None:
            return None
        plan, planner, _ = self.best
        return StagedPlan(plan, planner, self.least_step_s(plan.cost.step_time_s))

    def find_smallest(self) -> StagedPlan | None:
        """Return the plan of least memory among those of the fewest and of the most ranks: of one sample at once, all recomputed, with the
        most tensor ranks and the highest ZeRO stage."""
        ones = [d for d in self.degrees if d.samples == d.virtual == 1]
        most = [d for d in ones if d.tensor == max(other.tensor for other in ones)]
        # Few ranks share the states of embedding and head among more GPUs, many hold fewer whole weights where no data rank shards them.
        requested, found = self.first.request.recompute, list[StagedPlan]()
        for d in dict.fromkeys(replace(d, zero=self.estimates.zero_stages[-1]) for d in (*most[:1], *most[-1:])):
            self.say(Sentence(f"the least memory of {d.ranks} stages, each on ", d.mesh.term))
            problem = self.problem(d, STRONG_RECOMPUTATIONS[-1] if requested == "auto" else requested, uniform=True)
            if (planner := self.planner(d)) and problem and (plan := plan_of_least_memory(d, planner, problem)):
                found.append(StagedPlan(plan, planner, 0.0))
        return min(found, key=lambda one: one.plan.cost.memory_bytes["peak"], default=None)

    def find_micro_batches(self, candidates: list[PipelineDegrees]) -> None:
        """Find what a micro-batch takes, by one search without a budget for all degrees with the same work."""
        first: dict[tuple[int, int, str], PipelineDegrees] = {}
        unknown = (d for d in candidates if d.gpu_work not in self.micro_batches)
        for d in sorted(unknown, key=lambda d: -d.ranks):  # the most ranks first: there memory binds least
            first.setdefault(d.gpu_work, d)
        least, most = min(MICRO_BATCH_SAMPLES), max(MICRO_BATCH_SAMPLES)
        # Seconds and bytes grow nearly linearly with the samples: 0.33, 0.57 and 1.01 s for 1, 2 and 4 of EXAONE-4 32B on four GPUs.
        for d in sorted(first.values(), key=lambda d: least < d.samples < most):
            self.say("degrees of pipeline stages")
            few, many = (self.micro_batches.get((d.tensor, n, d.inner)) for n in (least, most))
            if least < d.samples < most and few and many:
                share = (d.samples - least) / (most - least)
                seconds, num_bytes = (a + share * (b - a) for a, b in zip(few, many, strict=True))
                self.micro_batches[d.gpu_work] = seconds, num_bytes
            elif (quickest := self.unconstrained(d)) is not None:
                self.micro_batches[d.gpu_work] = quickest

    def search_promising(self, candidates: list[PipelineDegrees], breadth: Breadth) -> None:
        """Search the candidates, the most promising first, until no other one may be quicker."""
        failures, failed = Counter[int](), dict[int, set[object]]()
        for d in self.by_promise(candidates, failures, breadth):
            if (is_best := self.search_degrees(d)) is not None:
                failed[d.zero] = set() if is_best else {*failed.get(d.zero, ()), d.whole_model if self.form else d}
                failures[d.zero] = len(failed[d.zero])
            # The estimate chose one place for the pipeline's axis. Degrees that are the best so far are tried in the others at once,
            # since a better place makes the limit tighter for all degrees that follow.
            for at in self.estimates.places(d) if is_best else ():
                if at != d:
                    self.search_degrees(at)

    def is_hopeless(self, d: PipelineDegrees, failures: Counter[int], breadth: Breadth) -> bool:
        """Return whether a search of these degrees is not begun. `failures`: degrees in a row of which no cut was quicker, by ZeRO
        stage."""
        # Other stages a rank of a whole model that has been searched cost little. Example: the tenth search was that of 8 x 8 tensor
        # ranks with one stage each, 13.2 s; with two stages, which came next, the step takes 12.0 s.
        # A whole model that does not fit into the memory of all ranks costs no search of cuts.
        searched = {other.whole_model for other, shared_s in self.shared_s.items() if shared_s < math.inf}
        bounded = {**self.model_s, **self.rank_bounds}
        for known, most in ((bounded, breadth.bounded), (searched, breadth.searched)):
            if len(known) >= most and d.whole_model not in known:
                return True
        # The estimates of ZeRO-2 and 3 miss traffic that compute does not hide, so failures there must not end the search of ZeRO-1. While
        # nothing fits, the promising degrees are those that hold most at once, and others may fit.
        if failures[d.zero] >= breadth.failures and self.limit < math.inf:
            return True
        # These seconds may come from another data-parallel degree, hence the margin.
        return d.optimistic_s(self.micro_batches[d.gpu_work][0]) >= self.longest_estimate_s

    def by_promise(
        self, candidates: list[PipelineDegrees], failures: Counter[int], breadth: Breadth
    ) -> Iterator[PipelineDegrees]:
        """Yield candidates in the order of their estimates, or of their bounds where these are higher; none that are too slow.

        Bounds are found when their estimate is the least, so few are. Example: ZeRO-3 is estimated to take 169 s and ZeRO-1 172 s. The
        bounds are 180 and 170 s, so ZeRO-1 is searched first, and its plan of 180.5 s leaves little to do for ZeRO-3."""
        numbers = itertools.count()  # candidates that tie are not compared
        queue = [(estimate_s, next(numbers), d, False) for estimate_s, d in self.estimate_degrees(candidates)]
        heapq.heapify(queue)
        while queue and queue[0][0] <= self.longest_estimate_s:
            seconds, _, d, is_bounded = heapq.heappop(queue)
            # A bound costs a network. EXAONE-4 32B on 16 GPUs had 18, of which 8 were of degrees that no search was left for.
            if d in self.shared_s or self.is_hopeless(d, failures, breadth):
                continue
            if is_bounded:
                yield d
            else:
                heapq.heappush(queue, (max(seconds, self.highest_bound_s(d)), next(numbers), d, True))

    @property
    def longest_estimate_s(self) -> float:
        """The longest estimate of degrees that are looked at."""
        return (MAX_SLOWDOWN if self.best else 1.0) * self.limit

    def highest_bound_s(self, d: PipelineDegrees) -> float:
        """Return the bound that is mostly the higher one: of all ranks together where they are few, or of each rank."""
        # On 16 GPUs S is above the limit where the bound of each rank, which takes ten times as long, is 10 % below. On 8 ranks and more
        # of a 405 B model that bound is 13 to 24 % above S, since it counts the micro-batches in flight.
        return self.rank_bound_s(d) if d.ranks > FEW_RANKS else self.shared_bound_s(d, self.limit)

    def shared_bound_s(self, d: PipelineDegrees, limit: float) -> float:
        """Optimistic seconds of a step by the bound S, which is searched as far as the `limit` needs."""
        return d.optimistic_s(self.search_model_s(d, limit) / d.micro_batches)

    @property
    def limit(self) -> float:
        """The step that a plan must be below: that of one stage from the begin, since what is not below it is of no use."""
        return min(self.below_s, self.best[0].cost.step_time_s if self.best else math.inf)

    def search_degrees(self, d: PipelineDegrees) -> bool | None:
        """Search some degrees. Returns whether their plan is the best so far; None if their bound says that it cannot be."""
        limit = self.limit
        # Not `lower_bound_s`: that holds for the work of micro-batches alone, and S has the work once a step too.
        self.shared_s[d] = self.search_model_s(d, limit) / d.ranks
        if self.shared_bound_s(d, limit) >= limit or self.rank_bound_s(d) >= limit:
            return None
        return self.try_degrees(d, limit)

    def rank_bound_s(self, d: PipelineDegrees) -> float:
        """Return the bound of `stages.rank_bound` on every cut; infinite if the model has no plan on these degrees."""
        if (key := d.whole_model) not in self.rank_bounds:
            problem = self.bounding_problem(d)
            self.rank_bounds[key] = (
                rank_bound(problem, self.first.budget, d.ranks, self.copies) if problem is not None else None
            )
        known = self.rank_bounds[key]
        return known.least_step_s(d, self.copies, 2 * self.estimates.least_send_s(d)) if known else math.inf

    def least_step_s(self, step_s: float) -> float:
        """Return the least bound of the searched degrees, or `step_s` if that is less. A cut that the search missed is not below it
        either."""
        for d, shared_s in sorted(self.shared_s.items(), key=lambda pair: pair[1]):
            # The bounds of ranks are not below these, which rise, so those that follow change nothing.
            if shared_s >= step_s:
                break
            step_s = min(step_s, max(shared_s, self.rank_bound_s(d)))
        return step_s

    @property
    def copies(self) -> int:
        """The copies of all repeated blocks."""
        return sum(self.first.graph.num_repeats.values())

    @property
    def degrees(self) -> Iterator[PipelineDegrees]:
        """All degrees that suit the cluster, the batch, the model and the tool."""
        first = self.first
        deals = self.form is not None and self.form.may_deal_experts(first.graph)
        for d in list_degrees(first.cluster, first.workload.batch, self.copies, deals=deals):
            yield from self.form.list_degrees(d, first.graph) if self.form else (d,)

    def estimate_degrees(self, candidates: list[PipelineDegrees]) -> Iterator[tuple[float, PipelineDegrees]]:
        """Yield a rough step of each candidate, at each ZeRO stage that it may need."""
        for d in candidates:
            if known := self.micro_batches.get(d.gpu_work):
                yield from self.estimates.estimate(d, *known)

    def planner(self, d: PipelineDegrees) -> Planner | None:
        """Return the planner of a number of micro-batches and a ZeRO stage; None if the model has no such batch."""
        if (key := (d.micro_batches, d.zero)) not in self.planners:
            # The graph depends on the size of a micro-batch alone, so planners of other ZeRO stages share it.
            other = next((p for (number, _), p in self.planners.items() if number == d.micro_batches), self.first)
            if other is self.first:
                request = replace(self.first.request, batch=self.first.workload.batch, accumulate=d.micro_batches)
                try:
                    graph = self.load_graph(request) if self.load_graph else None
                    other = prepare_planner(request, graph, like=self.first)
                except InputError:
                    other = None
            self.planners[key] = other and with_zero(other, d.zero)
        return self.planners[key]

    def problem(self, d: PipelineDegrees, recompute: str, *, uniform: bool, at_least: bool = False) -> Problem | None:
        """Return the network of the whole model on the mesh of a rank; None if it has no plan, or its cost is not a sum over its parts.
        `at_least`: its sums of memory are of no plan above what a GPU holds, as a bound needs."""
        planner = self.planner(d)
        if planner is None:
            return None
        planner = with_recompute(planner, recompute)
        layout = self.form.layout(d) if self.form else None
        try:
            if layout is None:
                problem = planner.problem(d.mesh, uniform=uniform, pipe=d.pipe, at_least=at_least)
            elif unsearchable_faults(planner.graph, layout):
                return None
            else:
                problem = planner.of_space(layout.space(), uniform, at_least)
        except TooWide:
            return None
        # A restricted problem bounds only its own smaller space, and every bound here must hold for the whole one.
        return None if problem.is_infeasible or problem.unrestricted is not None else problem

    def bounding_problem(self, d: PipelineDegrees) -> Problem | None:
        """Return the network of the bounds on all cuts of some degrees."""
        if (key := d.whole_model) not in self.bounding:
            self.bounding[key] = self.problem(d, self.first.request.recompute, uniform=False, at_least=True)
        return self.bounding[key]

    def unconstrained(self, d: PipelineDegrees) -> tuple[float, float] | None:
        """Return the seconds and activation bytes of a micro-batch of the whole model on the mesh of a rank, without recomputation or a
        budget."""
        problem = self.problem(d, "none", uniform=False)
        with self.first.clock("search"):
            solution = search_roughly(problem, "time") if problem else None
        if solution is None:
            return None
        activations = solution.totals[Component.AFTER_FORWARD] - solution.totals[Component.AFTER_BACKWARD]
        return solution.seconds / d.micro_batches, max(0.0, float(activations))

    def search_model_s(self, d: PipelineDegrees, limit: float) -> float:
        """Return the bound S: least seconds of the whole model on the mesh of a rank, for all micro-batches, in the memory of all ranks.

        The search stops early once every cut would take the `limit` if no work were once a step (`lower_bound_s`); the result is then
        a smaller bound."""
        key = d.whole_model
        if key not in self.model_s:
            self.say(Sentence(f"the whole model on {d.ranks} x ", d.mesh.term, f", ZeRO {d.zero}"))
            problem = self.bounding_problem(d)
            with self.first.clock("search"):
                max_s = limit / d.lower_bound_s(1.0)  # the bound is linear in S
                self.model_s[key] = math.inf
                if problem:
                    limits = SearchLimits(abandon_above=max_s, prove=False, bound_only=True)
                    result = search_within_budget(problem, budget=self.model_budget(d), limits=limits)
                    self.prices[key] = result.prices
                    # No plan and a low bound: the whole model does not fit into all ranks' memory, so S stays infinite: no cut fits either.
                    if result.assignment or result.bound > max_s:
                        self.model_s[key] = result.bound
        return self.model_s[key]

    def model_budget(self, d: PipelineDegrees, share: float = 1.0) -> float:
        """Return the bytes for the whole model on the mesh of a rank, if each rank gives a share of its budget."""
        return share * d.ranks * self.first.budget

    # --- cuts ----------------------------------------------------------------------------------------

    def try_degrees(self, d: PipelineDegrees, limit: float) -> bool:
        """Search the best cut of some degrees. Returns whether its plan is the best so far."""
        stages = f"{d.ranks * d.virtual} stages on {d.ranks} x "
        self.say(Sentence(stages, d.mesh.term, f", {d.micro_batches} micro-batches"))
        planner = self.planner(d)
        if planner is None:
            return False
        # No cut beats the quickest policy without a budget. If even that is too slow, the slower policies need no search.
        quickest = next(self.find_policies(d, limit), None)
        if quickest is None:
            return False
        is_even = self.form is not None and self.form.even
        unlimited = RangeCosts([quickest], d.micro_batches, math.inf)
        if limit < math.inf and not find_cut(d, unlimited, limit, is_even):
            return False
        best_before = self.best
        policies = sorted(self.find_policies(d, limit), key=lambda policy: float(policy.micro_batch_s.sum()))
        mixable: dict[object, list[CopyPolicy]] = {}
        for policy in policies:  # only equal boundaries mix, and a tool runs all copies in one way
            mixable.setdefault(policy.name if self.form else policy.boundary, []).append(policy)
        for mixed in mixable.values():
            plan = plan_of_cut(d, planner, mixed, limit, is_even)
            if plan:
                least_s = max(self.shared_s.get(d, 0.0), self.rank_bound_s(d))
                check_bound(plan.cost.step_time_s, least_s, f"a plan of {d.ranks} ranks with stages")
                self.best, limit = (plan, planner, d), plan.cost.step_time_s
        return self.best is not best_before

    def find_policies(self, d: PipelineDegrees, limit: float) -> Iterator[CopyPolicy]:
        """Yield the copy policies on the mesh of a rank: the best plans in shares of the ranks' memory, then the best plan under each
        recomputation that saves much memory, since the first ranks hold many micro-batches."""
        # Several stages a rank all run under one policy, so a policy that is too slow for equal stages needs no search to the end. One
        # stage a rank mixes policies: a slow one may serve the few copies for which memory lacks.
        max_s = d.micro_batches * limit / d.optimistic_s(1.0) if d.virtual > 1 else math.inf
        seen: list[Mapping[str, BlockPlan]] = []
        for recompute, shares in self.recomputations:
            for share in shares:
                policy = self.search_policy(d, recompute, share, max_s)
                # The shares fall, so the plans of those that follow are slower still, or do not fit either.
                if policy is None:
                    break
                # Where memory is plenty, several shares and recomputations have the same best plan.
                if policy.blocks not in seen:
                    seen.append(policy.blocks)
                    yield policy

    @property
    def recomputations(self) -> Sequence[tuple[str, Sequence[float]]]:
        """The recomputations under which copy policies are searched, each with its shares of memory."""
        requested = self.first.request.recompute
        if self.form:  # a layout leaves no choice that trades time for memory
            switches = list_switches(self.first.request.tool) if requested == "auto" else (requested,)
            return [(one, (1.0,)) for one in switches]
        others = STRONG_RECOMPUTATIONS if requested == "auto" else ()
        return [(requested, MEMORY_SHARES), *((other, (POLICY_MEMORY_SHARE,)) for other in others)]

    def search_policy(self, d: PipelineDegrees, recompute: str, share: float, max_s: float) -> CopyPolicy | None:
        """Return the copy policy of the best plan in a share of the ranks' memory; None if nothing fits, or a micro-batch of all ranks
        takes more than `max_s` for sure."""
        key = d.whole_model, recompute, share
        # Ranks with one stage and with several have the same policies, so only a search that was given up too early is begun again.
        policy, bound = self.policies.get(key, (None, -math.inf))
        if policy is None and bound <= max_s:
            policy, bound = self.policies[key] = self.search_new_policy(d, recompute, share, max_s)
        return policy if bound <= max_s else None

    def search_new_policy(
        self, d: PipelineDegrees, recompute: str, share: float, max_s: float
    ) -> tuple[CopyPolicy | None, float]:
        """Search as `search_policy` does. Returns the policy with its bound; the bound is infinite if nothing fits."""
        # The shares of one recomputation follow each other, and the second begins with the solutions of the first.
        if self.uniform is None or self.uniform[0] != (d.whole_model, recompute):
            self.uniform = (d.whole_model, recompute), self.problem(d, recompute, uniform=True)
        problem = self.uniform[1]
        if problem is None:
            return None, math.inf
        with self.first.clock("search"):
            prices = self.prices.get(d.whole_model, (0.0, 0.0))
            limits = SearchLimits(abandon_above=max_s, prove=False, prices=prices)
            whole, budget = self.model_budget(d), self.model_budget(d, share)
            result = search_within_budget(problem, budget=budget, limits=limits)
            # Where the states take most of the memory, no plan is within the share, but one within all of it may be too large for a rank.
            if result.smallest is not None and result.least_memory < whole:
                budget = result.least_memory + share * (whole - result.least_memory)
                result = search_within_budget(problem, budget=budget, limits=limits)
        if result.assignment is None or result.bound > max_s:
            return None, result.bound if result.bound > max_s else math.inf
        blocks, ends = make_block_plans(problem, result.assignment), ops_at_the_ends(self.first.coarse)
        name = f"{recompute} {share:g}"
        return policy_from_plan(name, blocks, problem.coarse.graph, problem.model, ends, d.pipe), result.bound
