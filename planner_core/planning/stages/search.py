"""Search pipeline stages: how many, on which mesh each, how many micro-batches, where the model is cut, how each copy runs.

    degrees (stages, stages a rank, mesh of a rank, micro-batch), the most promising first
        -> the whole model's best plan on that mesh, within the memory of all ranks together: a bound of what any cut takes
        -> ways to run the copies, from the quickest to the smallest -> the best cut of all (`search.algebra.partition`) -> simulated price

Two bounds leave degrees out. Every rank holds at least one micro-batch of its stages. So all ranks together hold what the whole model
holds on the mesh of one, and a search of the whole model within the sum of their budgets gives seconds S that no cut is below. If that
takes S seconds for m micro-batches, p stages in 1F1B take at least

    S / m / (1 - (1 - 1/m)^p)

however the model is cut: rank r waits for those before it, so later stages must be smaller, and this is where all ranks end at once. With
several stages a rank only S / p is known. Before S is known, it is taken to be that of other degrees with the same work of a GPU.

A way is the best plan of the whole model, with equal copies, in a part of that memory. The memory of a stage counts the micro-batches that
are in flight on its rank. The walk of the priced plan decides what fits: what a rank is over the budget there, the cut's budget is lowered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from planner_core.core import (
    ITEM_BYTES,
    BlockPlan,
    Cluster,
    Graph,
    InputError,
    Plan,
    load_cluster,
)
from planner_core.cost import (
    Component,
    ops_at_the_ends,
)
from planner_core.cost.memory import weight_bytes
from planner_core.planning.fitting.micro_batch_numbers import GraphSource
from planner_core.planning.methods import EXACT
from planner_core.planning.pipeline import Result, plan_model
from planner_core.planning.request import Progress, Request
from planner_core.planning.session import Planner, prepare, with_recompute
from planner_core.planning.stages.cuts import best_cut, even_cut, priced_cut
from planner_core.planning.stages.degrees import Degrees, every_degrees
from planner_core.planning.stages.pieces import Ranges, Way, way_of
from planner_core.search import make_block_plans, search_roughly, search_within_budget
from planner_core.search.algebra import TooWide
from planner_core.search.network import Problem

ZERO_STAGE = 1
"""The ZeRO stage beside stages: weights that are gathered or scattered in every micro-batch cost most with many micro-batches."""
MOST_TRIED, MOST_IN_VAIN = 10, 5
"""Degrees whose whole model is searched, at most; and those of them, one after the other, of which no cut was quicker."""
PARTS, WITH_POLICY = (1.0, 0.35), 0.6
"""The parts of the ranks' memory for which a way is searched: with recomputation chosen for each block, and with one policy for all."""
RECOMPUTE_MUCH = ("selective", "keep-attention", "full")
LOOKED_AT = 1.15
"""Degrees that seem to take so many times as long as the best are left out."""
LESS_COMPUTE, LESS_WITHOUT = 0.85, 0.75
"""Other degrees are taken to compute at least these shares of the plan of one stage: its products have other shapes, and it may compute
its forward pass twice."""
SMALLEST, AGAIN = 0.04, 0.33
"""The least share of activations that recomputation leaves, and what it adds to a step at most: of estimates that order the degrees."""
FITS_IN = 3
"""How often a cut is searched again with less memory."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan with stages; `bound`: no plan with stages of the degrees that were looked at is quicker."""

    plan: Plan
    planner: Planner
    bound: float


def with_stages(
    request: Request,
    chosen: Plan,
    say: Progress = lambda text: None,
    source: GraphSource = None,
    like: Planner | None = None,
) -> Found | None:
    """The best plan with stages, of as many samples a step, if it is quicker than the `chosen` one of one stage; else None. `like`: the
    planner of that plan, whose graphs serve here too."""
    asked = replace(request, batch=chosen.workload["batch"], seq=chosen.workload["seq"], accumulate=1, zero=ZERO_STAGE)
    if not may_win(request, load_cluster(request.cluster)):
        return None
    graph = source if callable(source) else None
    try:
        planner = prepare(asked, graph(asked) if graph else None, like=like)
    except InputError:  # the model has no such micro-batch
        return None
    found = best_with_stages(planner, say, graph, known=chosen if chosen.fits else None)
    if found is None:
        return None
    step, gains = found.plan.cost.step_time_s, "it fits"
    if chosen.fits:
        known = chosen.cost.step_time_s
        gains = f"a step of {1e3 * step:.4g} ms, where the best plan of one stage takes {1e3 * known:.4g} ms"
    return replace(found, plan=replace(found.plan, notes=(gains, *found.plan.notes)))


def plan_with_stages(request: Request, say: Progress) -> Result:
    """`plan_model`, with the best plan with stages as the last of its plans, if it is quicker."""
    result = plan_model(request, progress=say)
    staged = with_stages(request, result.best, say, like=result.planner)
    return replace(result, plans=(*result.plans, staged.plan)) if staged else result


def may_win(request: Request, cluster: Cluster) -> bool:
    """Whether stages are looked at: several nodes, and a request that leaves the mesh, the tool and the micro-batches open. The model is
    made for each size of a micro-batch, so it comes from a config or the zoo."""
    if ".py:" in request.model or request.model.endswith(".pt2"):
        return False
    free = request.mesh is None and request.tool is None and request.method == EXACT.name
    several = cluster.num_gpus > cluster.levels[0].size and request.objective == "time"
    return free and several and request.accumulate is None and request.micro_batch is None


def best_with_stages(
    planner: Planner,
    say: Progress = lambda text: None,
    graph: Callable[[Request], Graph] | None = None,
    known: Plan | None = None,
) -> Found | None:
    """The best plan with stages that fits; None if there is none that is quicker than the `known` plan of one stage."""
    return _Search(planner, say, graph, known).run()


class _Search:
    """The state of one search: the planners by number of micro-batches, what is known of S, and the best plan."""

    def __init__(
        self, planner: Planner, say: Progress, graph: Callable[[Request], Graph] | None, known: Plan | None
    ) -> None:
        self.first, self.say, self.graph = planner, say, graph
        self.below = known.cost.step_time_s if known else math.inf
        again = known is not None and known.workload["recompute"] != "none"
        self.compute_s = LESS_COMPUTE * (LESS_WITHOUT if again else 1.0) * (known.cost.compute_time_s if known else 0.0)
        self.planners: dict[int, Planner | None] = {}
        self.micro: dict[tuple[int, int], tuple[float, float]] = {}
        self.ways: dict[tuple[int, int, int], _Ways] = {}
        self.known: dict[tuple[int, int, int], float] = {}
        self.best: tuple[Plan, Planner] | None = None
        self.bound = math.inf

    def run(self) -> Found | None:
        """Look at the degrees that may be quicker, the most promising first."""
        if self.standing > self.first.budget:
            return None
        every = [d for d in self.degrees if d.about(self.compute_s * d.ranks / d.micro_batches) < self.below]
        for d in sorted(every, key=lambda d: -d.ranks):  # with many ranks memory does not matter
            self.say("degrees of pipeline stages")
            if (d.tensor, d.samples) not in self.micro and (quickest := self.of_any_memory(d)) is not None:
                self.micro[d.tensor, d.samples] = quickest
        in_vain = 0
        hopeful = [(about, d) for d in every if (about := self.about(d)) < math.inf]
        for about, d in sorted(hopeful, key=lambda pair: pair[0]):
            limit = min(self.below, self.best[0].cost.step_time_s if self.best else math.inf)
            if len(self.known) == MOST_TRIED or about > LOOKED_AT * limit:
                break
            if d.hoped(self.micro[d.tensor, d.samples][0]) >= LOOKED_AT * limit:  # of another data-parallel degree
                continue
            whole = self.whole_s(d, limit)
            self.bound = min(self.bound, d.least(whole))
            if d.hoped(whole / d.micro_batches) < limit:
                in_vain = 0 if self.try_out(d, limit) else in_vain + 1
            if in_vain == MOST_IN_VAIN:
                break
        if self.best is None:
            return None
        plan, planner = self.best
        gap = plan.cost.step_time_s / min(self.bound, plan.cost.step_time_s) - 1
        told = f"at most {100 * gap:.2g} % above the best there is with stages of the degrees that were looked at"
        return Found(replace(plan, notes=(told, *plan.notes)), planner, self.bound)

    @property
    def standing(self) -> float:
        """Bytes of weights, gradients and states on a GPU if all GPUs share them evenly, which no stages are below."""
        graph, total = self.first.graph, 0
        repeated = [(graph.blocks[name], times) for name, times in graph.num_repeats.items()]
        for block, times in ((graph.top, 1), *repeated):
            for i, v in enumerate(block.values):
                if v.kind == "parameter" and i not in block.inputs:
                    each = weight_bytes(ITEM_BYTES[v.meta.dtype], v.grad, self.first.workload)
                    total += times * math.prod(v.meta.shape) * (each.stored + each.moments + each.gradient)
        return total / self.first.cluster.num_gpus

    @property
    def degrees(self) -> Iterator[Degrees]:
        """All degrees that suit the cluster, the batch and the model."""
        first = self.first
        return every_degrees(first.cluster, first.workload.batch, sum(first.graph.num_repeats.values()))

    def about(self, d: Degrees) -> float:
        """About how long a step takes: equal stages, and more recomputation the more memory is short. It only orders the degrees."""
        known = self.micro.get((d.tensor, d.samples))
        if known is None:
            return math.inf
        seconds, activations = known
        load = self.first.workload
        weights = self.first.graph.num_params * (ITEM_BYTES[load.dtype] + load.kept_item(ITEM_BYTES[load.dtype]))
        left = self.first.budget - weights / (d.ranks * d.tensor)
        need = activations * d.held / d.ranks
        if left < SMALLEST * need:
            return math.inf
        return d.about(seconds) * (1 + AGAIN * max(0.0, 1 - left / need))

    def planner(self, micro_batches: int) -> Planner | None:
        """The planner of a number of micro-batches; None if the model has no such batch."""
        if micro_batches not in self.planners:
            first = self.first
            request = replace(first.request, batch=first.workload.batch, accumulate=micro_batches, zero=ZERO_STAGE)
            try:
                graph = self.graph(request) if self.graph else None
                self.planners[micro_batches] = prepare(request, graph, like=first)
            except InputError:
                self.planners[micro_batches] = None
        return self.planners[micro_batches]

    def problem(self, d: Degrees, recompute: str, *, uniform: bool) -> Problem | None:
        """The network of the whole model on the mesh of a rank."""
        planner = self.planner(d.micro_batches)
        if planner is None:
            return None
        try:
            found = with_recompute(planner, recompute).problem(d.mesh, uniform=uniform, ranks=d.ranks)
        except TooWide:
            return None
        return None if found.is_infeasible or found.unrestricted is not None else found

    def of_any_memory(self, d: Degrees) -> tuple[float, float] | None:
        """Seconds and bytes of activations of a micro-batch of the whole model on the mesh of a rank, without recomputation."""
        problem, m = self.problem(d, "none", uniform=False), d.micro_batches
        with self.first.clock("search"):
            found = search_roughly(problem, "time") if problem else None
        if found is None:
            return None
        kept = found.totals[Component.AFTER_FORWARD] - found.totals[Component.AFTER_BACKWARD]
        return found.seconds / m, max(0.0, float(kept))

    def whole_s(self, d: Degrees, limit: float) -> float:
        """Seconds that the whole model takes at least on the mesh of a rank, for all micro-batches, in the memory of all ranks; less than
        that if stages cannot be below the `limit` anyway."""
        at = d.ranks, d.tensor, d.samples
        if at not in self.known:
            self.say(f"the whole model on {d.ranks} x {d.mesh}")
            problem = self.problem(d, self.first.request.recompute, uniform=False)
            with self.first.clock("search"):
                most = limit / d.least(1.0)
                self.known[at] = math.inf
                if problem:
                    found = search_within_budget(
                        problem, budget=self.room(d), abandon_above=most, prove=False, bound_only=True
                    )
                    if found.assignment or found.bound > most:
                        self.known[at] = found.bound
        return self.known[at]

    def room(self, d: Degrees, part: float = 1.0) -> float:
        """Bytes that the whole model may take on the mesh of a rank, if each rank has a part of its budget."""
        return part * d.ranks * self.first.budget

    # --- cuts ----------------------------------------------------------------------------------------

    def try_out(self, d: Degrees, limit: float) -> bool:
        """Search the best cut for some degrees, and keep its plan if it is the best so far. Returns whether it is."""
        self.say(f"{d.ranks * d.virtual} stages on {d.ranks} x {d.mesh}, {d.micro_batches} micro-batches")
        planner, at = self.planner(d.micro_batches), (d.ranks, d.tensor, d.samples)
        if planner is None:
            return False
        if at not in self.ways:
            self.ways[at] = _Ways(self.find_ways(d))
        # No cut is quicker than the quickest way; that is known before the slower ways, for less memory, are searched.
        quickest, cut_in = next(iter(self.ways[at]), None), even_cut if d.virtual > 1 else best_cut
        if quickest is None or not cut_in(d, Ranges([quickest], d.micro_batches, math.inf), limit):
            return False
        before, ways = self.best, sorted(self.ways[at], key=lambda way: float(way.each.sum()))
        for kind in dict.fromkeys(way.handed_on for way in ways):
            plan = self.cut(d, planner, [w for w in ways if w.handed_on == kind], limit)
            if plan:
                self.best, limit = (plan, planner), plan.cost.step_time_s
        return self.best is not before

    def cut(self, d: Degrees, planner: Planner, ways: list[Way], limit: float) -> Plan | None:
        """The plan of the best cut in these ways, if it fits and is below a limit."""
        budget, cut_in = planner.budget, even_cut if d.virtual > 1 else best_cut
        for _ in range(FITS_IN):
            cut = cut_in(d, Ranges(ways, d.micro_batches, budget), limit)
            plan = priced_cut(d, planner, ways, *cut) if cut else None
            if plan is None or plan.cost.step_time_s >= limit:
                return None
            if plan.fits:
                return plan
            budget -= 1.01 * (plan.cost.memory_bytes["peak"] - planner.budget)
        return None

    def find_ways(self, d: Degrees) -> Iterator[Way]:
        """The ways to run the copies on the mesh of a rank, the quickest first: the best plans in parts of the ranks' memory; and since the
        first ranks hold many micro-batches, the best plan under each policy that recomputes much."""
        asked = self.first.request.recompute
        policies = RECOMPUTE_MUCH if asked == "auto" else ()
        seen: list[Mapping[str, BlockPlan]] = []
        for recompute, parts in ((asked, PARTS), *((policy, (WITH_POLICY,)) for policy in policies)):
            problem = self.problem(d, recompute, uniform=True)
            for part in parts if problem else ():
                assert problem is not None
                with self.first.clock("search"):
                    found = search_within_budget(problem, budget=self.room(d, part), prove=False)
                if found.assignment is None:
                    break
                blocks = make_block_plans(problem, found.assignment)
                if blocks not in seen:
                    seen.append(blocks)
                    ends, name = ops_at_the_ends(self.first.coarse), f"{recompute} {part:g}"
                    yield way_of(name, blocks, problem.coarse.graph, problem.model, ends, d.ranks)


class _Ways:
    """The ways to run the copies, each searched when it is asked for the first time."""

    def __init__(self, source: Iterator[Way]) -> None:
        self._source, self._known = source, list[Way]()

    def __iter__(self) -> Iterator[Way]:
        yield from self._known
        for way in self._source:
            self._known.append(way)
            yield way
