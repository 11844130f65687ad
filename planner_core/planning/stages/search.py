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

The searches of the whole model, on which bounds and policies rest, are in `whole_models`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from planner_core.core import Graph, Plan, Sentence
from planner_core.planning.fitting.shortage import states_can_fit
from planner_core.planning.methods import tool_stages
from planner_core.planning.planner import Planner
from planner_core.planning.request import Progress, Request
from planner_core.planning.stages.cuts import find_cut, plan_of_cut, plan_of_least_memory
from planner_core.planning.stages.degrees import (
    MICRO_BATCH_SAMPLES,
    WHOLE_SEARCH,
    Breadth,
    PipelineDegrees,
    list_degrees,
)
from planner_core.planning.stages.estimates import DegreeEstimates, least_compute_s, least_host_s
from planner_core.planning.stages.pieces import CopyPolicy, RangeCosts
from planner_core.planning.stages.tool_forms import MAX_ZERO_OF_TOOLS, list_tool_degrees, may_deal_experts
from planner_core.planning.stages.whole_models import STRONG_RECOMPUTATIONS, WholeModels
from planner_core.search import check_bound
from planner_core.search.algebra import best_first

ZERO_STAGES = (1, 2, 3)
"""The ZeRO stages of plans with stages. Stage 2 scatters gradients and stage 3 gathers weights in every micro-batch, and stages need
many micro-batches. So a higher one is searched only where the one before leaves too little memory for activations."""
MAX_RANKS_BY_SHARED_BOUND = 4
"""Up to so many ranks, the bound S of all ranks together is mostly above that of each rank."""
MAX_SLOWDOWN = 1.15
"""Degrees are pruned if their estimate is this many times the best step with stages. Estimates are low, so as long as a plan of one stage
is the best, degrees are pruned already where their estimate reaches its step."""


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """The best plan with stages. `bound`: no plan of the searched degrees is quicker."""

    plan: Plan
    planner: Planner
    bound: float


def search_stages(
    planner: Planner,
    report_progress: Progress = lambda text: None,
    load_graph: Callable[[Request], Graph] | None = None,
    best_of_one_stage: Plan | None = None,
    breadths: Sequence[Breadth] = WHOLE_SEARCH,
) -> StagedPlan | None:
    """Return the best plan with stages that fits; None if none is quicker than the `best_of_one_stage`, by the last of `breadths`."""
    return _StageSearch(planner, report_progress, load_graph, best_of_one_stage, breadths).run()


def find_smallest_stages(
    planner: Planner, report_progress: Progress, load_graph: Callable[[Request], Graph] | None
) -> StagedPlan | None:
    """Return a plan with stages of little memory, for an answer where none fits; None if the model has none."""
    return _StageSearch(planner, report_progress, load_graph, None).find_smallest()


class _StageSearch:
    """The state of one search.

    Attributes:
        first: The planner of the request.
        breadths: How many degrees are looked at, in one search after the other.
        below_s: The step that a plan must be below, by the best plan of one stage.
        min_compute_s: The least compute that other degrees are taken to have.
        host_s: The least seconds in which a host issues a micro-batch of the whole model, and what comes once a step.
        form: What the request's tool can be told; None if every plan may be chosen.
        estimates: Rough steps of degrees at the ZeRO stages that the request and the tool allow.
        models: The searches of the whole model.
        micro_batches: Seconds and activation bytes of a micro-batch of the whole model, by `gpu_work`.
        best: The best plan so far, with its planner and degrees.
        shared_s: By searched degrees S / p, the bound S evenly shared by the ranks.
    """

    def __init__(
        self,
        planner: Planner,
        report_progress: Progress,
        load_graph: Callable[[Request], Graph] | None,
        best_of_one_stage: Plan | None,
        breadths: Sequence[Breadth] = WHOLE_SEARCH,
    ) -> None:
        self.first, self.report_progress, self.breadths = planner, report_progress, breadths
        self.below_s = best_of_one_stage.cost.step_time_s / breadths[-1].least_gain if best_of_one_stage else math.inf
        self.min_compute_s = least_compute_s(best_of_one_stage) if best_of_one_stage else 0.0
        self.host_s = least_host_s(planner, best_of_one_stage) if best_of_one_stage else (0.0, 0.0)
        self.form = tool_stages(planner.request.tool)
        highest = min(planner.workload.zero, MAX_ZERO_OF_TOOLS if self.form else max(ZERO_STAGES))
        admitted = planner.request.zero_stages
        zero_stages = tuple(z for z in ZERO_STAGES if z <= highest and z in admitted) or (highest,)
        self.estimates = DegreeEstimates(planner, zero_stages, self.form)
        self.models = WholeModels(planner, report_progress, load_graph, self.form)
        self.micro_batches: dict[tuple[int, int, str], tuple[float, float]] = {}
        self.best: tuple[Plan, Planner, PipelineDegrees] | None = None
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
            self.report_progress(Sentence(f"the least memory of {d.ranks} stages, each on ", d.mesh.term))
            problem = self.models.problem(
                d, STRONG_RECOMPUTATIONS[-1] if requested == "auto" else requested, uniform=True
            )
            if (planner := self.models.planner(d)) and problem and (plan := plan_of_least_memory(d, planner, problem)):
                found.append(StagedPlan(plan, planner, 0.0))
        return min(found, key=lambda one: one.plan.cost.memory_bytes["peak"], default=None)

    def find_micro_batches(self, candidates: list[PipelineDegrees]) -> None:
        """Find what a micro-batch takes, by one search without a budget for all degrees with the same work."""
        first: dict[tuple[int, int, str], PipelineDegrees] = {}
        unknown = (d for d in candidates if d.gpu_work not in self.micro_batches)
        for d in sorted(unknown, key=lambda d: -d.ranks):  # the most ranks first: there memory binds least
            first.setdefault(d.gpu_work, d)
        fewest, most = min(MICRO_BATCH_SAMPLES), max(MICRO_BATCH_SAMPLES)
        # Seconds and bytes grow nearly linearly with the samples: 0.33, 0.57 and 1.01 s for 1, 2 and 4 of EXAONE-4 32B on four GPUs.
        for d in sorted(first.values(), key=lambda d: fewest < d.samples < most):
            self.report_progress("degrees of pipeline stages")
            few, many = (self.micro_batches.get((d.tensor, n, d.inner)) for n in (fewest, most))
            if fewest < d.samples < most and few and many:
                share = (d.samples - fewest) / (most - fewest)
                seconds, num_bytes = (a + share * (b - a) for a, b in zip(few, many, strict=True))
                self.micro_batches[d.gpu_work] = seconds, num_bytes
            elif (quickest := self.models.unconstrained(d)) is not None:
                self.micro_batches[d.gpu_work] = quickest

    def search_promising(self, candidates: list[PipelineDegrees], breadth: Breadth) -> None:
        """Search the candidates in the order of their estimates, or of their bounds where these are higher, until no other may be quicker.

        A bound is worked out when its estimate is the least, so few are. Example: ZeRO-3 is estimated to take 169 s and ZeRO-1 172 s. The
        bounds are 180 and 170 s, so ZeRO-1 is searched first, and its plan of 180.5 s leaves little to do for ZeRO-3.
        """
        failures, failed = Counter[int](), dict[int, set[object]]()

        def is_needless(d: PipelineDegrees) -> bool:
            return d in self.shared_s or self.is_hopeless(d, failures, breadth)

        # A bound costs a network. EXAONE-4 32B on 16 GPUs had 18, of which 8 were of degrees that no search was left for.
        def bound_s(candidate: tuple[float, PipelineDegrees]) -> float:
            return math.inf if is_needless(candidate[1]) else self.highest_bound_s(candidate[1])

        cases = self.estimate_degrees(candidates)
        for _, d in best_first(cases, [itemgetter(0), bound_s], lambda: self.longest_estimate_s):
            if is_needless(d):
                continue
            if (is_best := self.search_degrees(d)) is not None:
                one = d.whole_model if self.form or breadth.counts_models else d
                failed[d.zero] = set() if is_best else {*failed.get(d.zero, ()), one}
                failures[d.zero] = len(failed[d.zero])
            # The estimate chose one place for the pipeline's axis. Degrees that are the best so far are tried in the others at once,
            # since a better place makes the limit tighter for all degrees that follow.
            for at in self.estimates.places(d) if is_best else ():
                if at != d:
                    self.search_degrees(at)

    def is_hopeless(self, d: PipelineDegrees, failures: Counter[int], breadth: Breadth) -> bool:
        """Return whether these degrees are not worth a search. `failures`: by ZeRO stage, how many degrees or whole models in a row
        gave no quicker cut."""
        # Other stages a rank of a whole model that has been searched cost little. Example: the tenth search was that of 8 x 8 tensor
        # ranks with one stage each, 13.2 s; with two stages, which came next, the step takes 12.0 s.
        # A whole model that does not fit into the memory of all ranks costs no search of cuts.
        searched = {other.whole_model for other, shared_s in self.shared_s.items() if shared_s < math.inf}
        for whole_models, most in ((self.models.bounded, breadth.bounded), (searched, breadth.searched)):
            if len(whole_models) >= most and d.whole_model not in whole_models:
                return True
        # The estimates of ZeRO-2 and 3 miss traffic that compute does not hide, so failures there must not end the search of ZeRO-1. While
        # nothing fits, the promising degrees are those that hold most at once, and others may fit.
        if failures[d.zero] >= breadth.failures and self.limit < math.inf:
            return True
        # These seconds may come from another data-parallel degree, hence the margin.
        return d.optimistic_s(self.micro_batches[d.gpu_work][0]) >= self.longest_estimate_s

    @property
    def longest_estimate_s(self) -> float:
        """The longest estimate of degrees that are looked at."""
        return (MAX_SLOWDOWN if self.best else 1.0) * self.limit

    def highest_bound_s(self, d: PipelineDegrees) -> float:
        """Return the bound that is mostly the higher one: of all ranks together where they are few, or of each rank."""
        # On 16 GPUs S is above the limit where the bound of each rank, which takes ten times as long, is 10 % below. On 8 ranks and more
        # of a 405 B model that bound is 13 to 24 % above S, since it counts the micro-batches in flight.
        return self.rank_bound_s(d) if d.ranks > MAX_RANKS_BY_SHARED_BOUND else self.shared_bound_s(d, self.limit)

    def shared_bound_s(self, d: PipelineDegrees, limit: float) -> float:
        """Optimistic seconds of a step by the bound S, which is searched as far as the `limit` needs."""
        return d.optimistic_s(self.models.search_model_s(d, limit) / d.micro_batches)

    @property
    def limit(self) -> float:
        """The step that a plan must be below. The plan of one stage sets it at first, since a slower plan with stages is of no use."""
        return min(self.below_s, self.best[0].cost.step_time_s if self.best else math.inf)

    def search_degrees(self, d: PipelineDegrees) -> bool | None:
        """Search some degrees. Returns whether their plan is the best so far; None if their bound says that it cannot be."""
        limit = self.limit
        # Not `lower_bound_s`: that holds for the work of micro-batches alone, and S has the work once a step too.
        self.shared_s[d] = self.models.search_model_s(d, limit) / d.ranks
        if self.shared_bound_s(d, limit) >= limit or self.rank_bound_s(d) >= limit:
            return None
        return self.try_degrees(d, limit)

    def rank_bound_s(self, d: PipelineDegrees) -> float:
        """Return the bound of `stages.rank_bound` on every cut; infinite if the model has no plan on these degrees."""
        rank_bound = self.models.find_rank_bound(d)
        return (
            rank_bound.least_step_s(d, self.models.copies, 2 * self.estimates.least_send_s(d))
            if rank_bound
            else math.inf
        )

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
    def degrees(self) -> Iterator[PipelineDegrees]:
        """All degrees that suit the cluster, the batch, the model and the tool."""
        first = self.first
        deals = self.form is not None and may_deal_experts(self.form, first.graph)
        for d in list_degrees(first.cluster, first.workload.batch, self.models.copies, deals=deals):
            yield from list_tool_degrees(self.form, d, first.graph) if self.form else (d,)

    def estimate_degrees(self, candidates: list[PipelineDegrees]) -> Iterator[tuple[float, PipelineDegrees]]:
        """Yield a rough step of each candidate, at each ZeRO stage that it may need."""
        for d in candidates:
            if micro_batch := self.micro_batches.get(d.gpu_work):
                yield from self.estimates.estimate(d, *micro_batch)

    def try_degrees(self, d: PipelineDegrees, limit: float) -> bool:
        """Search the best cut of some degrees. Returns whether its plan is the best so far."""
        stages = f"{d.ranks * d.virtual} stages on {d.ranks} x "
        self.report_progress(Sentence(stages, d.mesh.term, f", {d.micro_batches} micro-batches"))
        planner = self.models.planner(d)
        if planner is None:
            return False
        # No cut beats the quickest policy without a budget. If even that is too slow, the slower policies need no search.
        quickest = next(self.models.find_policies(d, limit), None)
        if quickest is None:
            return False
        is_even = self.form is not None and self.form.even
        unlimited = RangeCosts([quickest], d.micro_batches, math.inf)
        if limit < math.inf and not find_cut(d, unlimited, limit, is_even):
            return False
        best_before = self.best
        policies = sorted(self.models.find_policies(d, limit), key=lambda policy: float(policy.micro_batch_s.sum()))
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
