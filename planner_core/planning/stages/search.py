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
    DeviceMesh,
    Graph,
    InputError,
    Pipeline,
    Plan,
    axis_names,
    divisors,
    load_cluster,
)
from planner_core.cost import (
    Component,
    check_micro_batches,
    cost_model,
    even_copies,
    in_flight,
    named_mesh,
    ops_at_the_ends,
    price_pipeline,
    rank_orders,
    with_parts,
)
from planner_core.planning.fitting.micro_batch_numbers import GraphSource
from planner_core.planning.fitting.model_identity import model_identity
from planner_core.planning.methods import EXACT
from planner_core.planning.pipeline import Result, plan_model
from planner_core.planning.request import Progress, Request
from planner_core.planning.session import Planner, prepare, recomputation, with_recompute
from planner_core.planning.stages.pieces import Range, Ranges, Way, way_of
from planner_core.search import assemble, quick, search
from planner_core.search.algebra import StageOption, TooWide, best_partition
from planner_core.search.network import Problem

STAGES = "stages"
"""The name of the best plan with pipeline stages."""
MICRO_BATCHES = (1, 2, 4)
"""Samples of a micro-batch on one data-parallel rank. With stages small ones are best: more of them make a smaller bubble."""
VIRTUAL = (1, 2, 4, 8)
ZERO_STAGE = 1
"""The ZeRO stage beside stages: weights that are gathered or scattered in every micro-batch cost most with many micro-batches."""
MOST_RANKS = 64
MOST_TRIED = 10
"""Degrees whose whole model is searched, at most."""
PARTS = (1.0, 0.6, 0.35, 0.2)
"""The parts of the ranks' memory for which a way is searched."""
LOOKED_AT = 1.15
"""Degrees that seem to take so many times as long as the best are left out."""
SMALLEST, AGAIN = 0.04, 0.33
"""The least share of activations that recomputation leaves, and what it adds to a step at most: of estimates that order the degrees."""
FITS_IN = 3
"""How often a cut is searched again with less memory."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """How many stages, on what, and how many micro-batches. `samples`: of a micro-batch on one data-parallel rank."""

    ranks: int
    virtual: int
    data: int
    tensor: int
    samples: int
    micro_batches: int

    @property
    def schedule(self) -> str:
        """One stage a rank, or several in turn."""
        return "1f1b" if self.virtual == 1 else "interleaved"

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of one rank's group."""
        if self.tensor == 1 or self.data == 1:
            return DeviceMesh(axis_names(1), (max(self.data, self.tensor),))
        return DeviceMesh(axis_names(2), (self.data, self.tensor))

    def least(self, whole_s: float) -> float:
        """Seconds that no cut is below, if the whole model takes `whole_s` on one rank's mesh for all micro-batches."""
        m, p = self.micro_batches, self.ranks
        return whole_s / p if self.virtual > 1 else whole_s / m / (1 - (1 - 1 / m) ** p)

    @property
    def held(self) -> float:
        """Micro-batches of a whole rank that the first rank holds at most."""
        ahead = self.ranks if self.virtual == 1 else (self.virtual - 1) * self.ranks + 2 * self.ranks - 1
        return min(ahead / self.virtual, self.micro_batches)

    def about(self, one_s: float) -> float:
        """Seconds of a step with equal stages, if the whole model takes `one_s` for a micro-batch."""
        return one_s / self.ranks * (self.micro_batches + (self.ranks - 1) / self.virtual)


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan with stages; `bound`: no plan with stages of the degrees that were looked at is quicker."""

    plan: Plan
    planner: Planner
    bound: float


def with_stages(
    request: Request, chosen: Plan, say: Progress = lambda text: None, source: GraphSource = None
) -> Found | None:
    """The best plan with stages, of as many samples a step, if it is quicker than the `chosen` one of one stage; else None."""
    asked = replace(request, batch=chosen.workload["batch"], seq=chosen.workload["seq"], accumulate=1, zero=ZERO_STAGE)
    if not may_win(request, load_cluster(request.cluster)):
        return None
    graph = source if callable(source) else None
    try:
        planner = prepare(asked, graph(asked) if graph else None)
    except InputError:  # the model has no such micro-batch
        return None
    known = chosen.cost.step_time_s if chosen.fits else math.inf
    found = best_with_stages(planner, say, graph, below=known)
    if found is None:
        return None
    step, gains = found.plan.cost.step_time_s, "it fits"
    if chosen.fits:
        gains = f"a step of {1e3 * step:.4g} ms, where the best plan of one stage takes {1e3 * known:.4g} ms"
    return replace(found, plan=replace(found.plan, notes=(gains, *found.plan.notes)))


def plan_with_stages(request: Request, say: Progress) -> Result:
    """`plan_model`, with the best plan with stages as the last of its plans, if it is quicker."""
    result = plan_model(request, progress=say)
    staged = with_stages(request, result.best, say)
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
    planner: Planner, say: Progress = lambda text: None, graph: Callable[[Request], Graph] | None = None,
    below: float = math.inf,
) -> Found | None:  # fmt: skip
    """The best plan with stages that fits; None if there is none below a value."""
    return _Search(planner, say, graph, below).run()


class _Search:
    """The state of one search: the planners by number of micro-batches, what is known of S, and the best plan."""

    def __init__(self, planner: Planner, say: Progress, graph: Callable[[Request], Graph] | None, below: float) -> None:
        self.first, self.say, self.graph, self.below = planner, say, graph, below
        self.planners: dict[int, Planner | None] = {}
        self.micro: dict[tuple[int, int], tuple[float, float]] = {}
        self.ways: dict[tuple[int, int, int], list[Way]] = {}
        self.known: dict[tuple[int, int, int], float] = {}
        self.best: tuple[Plan, Planner] | None = None
        self.bound = math.inf

    def run(self) -> Found | None:
        every = list(self.degrees())
        for d in sorted(every, key=lambda d: -d.ranks):  # with many ranks memory does not matter
            self.say("degrees of pipeline stages")
            if (d.tensor, d.samples) not in self.micro and (quickest := self.of_any_memory(d)) is not None:
                self.micro[d.tensor, d.samples] = quickest
        hopeful = [(about, d) for d in every if (about := self.about(d)) < math.inf]
        for about, d in sorted(hopeful, key=lambda pair: pair[0]):
            limit = min(self.below, self.best[0].cost.step_time_s if self.best else math.inf)
            if len(self.known) == MOST_TRIED or about > LOOKED_AT * limit:
                break
            whole = self.whole_s(d)
            self.bound = min(self.bound, d.least(whole))
            # Several stages a rank have equally many copies, so then the estimate from S is close.
            if (d.least(whole) if d.virtual == 1 else d.about(whole / d.micro_batches)) < limit:
                self.try_out(d, limit)
        if self.best is None:
            return None
        plan, planner = self.best
        gap = plan.cost.step_time_s / min(self.bound, plan.cost.step_time_s) - 1
        told = f"at most {100 * gap:.2g} % above the best there is with stages of the degrees that were looked at"
        return Found(replace(plan, notes=(told, *plan.notes)), planner, self.bound)

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

    # --- degrees -------------------------------------------------------------------------------------

    def degrees(self) -> Iterator[Degrees]:
        """All degrees that suit the cluster, the batch and the model."""
        cluster, batch = self.first.cluster, self.first.workload.batch
        calls = sum(self.first.graph.num_repeats.values())
        for ranks in divisors(cluster.num_gpus)[1:]:
            for tensor in divisors(cluster.levels[0].size):
                group = cluster.num_gpus // ranks
                if ranks > min(MOST_RANKS, calls) or group % tensor:
                    continue
                for samples in MICRO_BATCHES:
                    yield from self._with(ranks, group // tensor, tensor, samples, batch, calls)

    def _with(self, ranks: int, data: int, tensor: int, samples: int, batch: int, calls: int) -> Iterator[Degrees]:
        number, rest = divmod(batch, data * samples)
        if rest or number < ranks:
            return
        for virtual in VIRTUAL:
            d = Degrees(ranks, virtual, data, tensor, samples, number)
            try:
                check_micro_batches(Pipeline(ranks, d.schedule, (1,) * (ranks * virtual)), number)
            except InputError:
                continue
            if calls >= ranks * virtual:
                yield d

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
        return None if found.impossible or found.whole is not None else found

    def of_any_memory(self, d: Degrees) -> tuple[float, float] | None:
        """Seconds and bytes of activations of a micro-batch of the whole model on the mesh of a rank, without recomputation."""
        problem, m = self.problem(d, "none", uniform=False), d.micro_batches
        with self.first.clock("search"):
            found = quick(problem, "time") if problem else None
        if found is None:
            return None
        kept = found.totals[Component.AFTER_FORWARD] - found.totals[Component.AFTER_BACKWARD]
        return found.seconds / m, max(0.0, float(kept))

    def whole_s(self, d: Degrees) -> float:
        """Seconds that the whole model takes at least on the mesh of a rank, for all micro-batches, in the memory of all ranks."""
        at = d.ranks, d.tensor, d.samples
        if at not in self.known:
            self.say(f"the whole model on {d.ranks} x {d.mesh}")
            problem = self.problem(d, self.first.request.recompute, uniform=False)
            with self.first.clock("search"):
                self.known[at] = search(problem, budget=self.room(d), prove=False).bound if problem else math.inf
        return self.known[at]

    def room(self, d: Degrees, part: float = 1.0) -> float:
        """Bytes that the whole model may take on the mesh of a rank, if each rank has a part of its budget."""
        return part * d.ranks * self.first.budget

    # --- cuts ----------------------------------------------------------------------------------------

    def try_out(self, d: Degrees, limit: float) -> None:
        """Search the best cut for some degrees, and keep its plan if it is the best so far."""
        self.say(f"{d.ranks * d.virtual} stages on {d.ranks} x {d.mesh}, {d.micro_batches} micro-batches")
        planner, at = self.planner(d.micro_batches), (d.ranks, d.tensor, d.samples)
        if planner is None:
            return
        if at not in self.ways:
            self.ways[at] = list(self.find_ways(d))
        for kind in dict.fromkeys(way.handed_on for way in self.ways[at]):
            plan = self.cut(d, planner, [w for w in self.ways[at] if w.handed_on == kind], limit)
            if plan:
                self.best, limit = (plan, planner), plan.cost.step_time_s

    def cut(self, d: Degrees, planner: Planner, ways: list[Way], limit: float) -> Plan | None:
        """The plan of the best cut in these ways, if it fits and is below a limit."""
        budget, cut_in = planner.budget, _even if d.virtual > 1 else _best_cut
        for _ in range(FITS_IN):
            cut = cut_in(d, Ranges(ways, d.micro_batches, budget), limit)
            plan = _priced(d, planner, ways, *cut) if cut else None
            if plan is None or plan.cost.step_time_s >= limit:
                return None
            if plan.fits:
                return plan
            budget -= 1.01 * (plan.cost.memory_bytes["peak"] - planner.budget)
        return None

    def find_ways(self, d: Degrees) -> Iterator[Way]:
        """The ways to run the copies on the mesh of a rank, from the quickest to the smallest."""
        problem = self.problem(d, self.first.request.recompute, uniform=True)
        if problem is None:
            return
        seen: list[Mapping[str, BlockPlan]] = []
        for part in PARTS:
            with self.first.clock("search"):
                found = search(problem, budget=self.room(d, part), prove=False)
            if found.assignment is None:
                return
            blocks = assemble(problem, found.assignment)
            if blocks not in seen:
                seen.append(blocks)
                ends = ops_at_the_ends(self.first.coarse)
                yield way_of(f"{part:g}", blocks, problem.coarse.graph, problem.model, ends, d.ranks)


def _priced(d: Degrees, planner: Planner, ways: list[Way], copies: tuple[int, ...], chosen: tuple[Range, ...]) -> Plan:
    """The plan of a cut, priced by its simulated step and the walk of its memory."""
    pipeline = with_parts(Pipeline(d.ranks, d.schedule, copies), graph := planner.graph)
    blocks = mixed(graph, ways, pipeline, chosen)
    model = cost_model(planner.cluster, d.mesh, planner.workload, d.ranks)
    cost = price_pipeline(blocks, graph, pipeline, model, ops_at_the_ends(planner.coarse))
    return Plan(
        name=STAGES, method=EXACT.name, objective="time", optimal=False, model=model_identity(graph),
        workload=replace(planner.workload, recompute=recomputation(blocks)).to_json(), cluster=planner.cluster.to_json(),
        mesh=named_mesh(d.mesh, blocks), blocks=blocks, cost=cost, fits=cost.memory_bytes["peak"] <= planner.budget, pipeline=pipeline,
    )  # fmt: skip


def _best_cut(d: Degrees, ranges: Ranges, limit: float) -> tuple[tuple[int, ...], tuple[Range, ...]] | None:
    """The best of all cuts, one stage a rank."""

    def options(stage: int, first: int, last: int) -> list[StageOption]:
        found = ranges.best(first, last, min(d.micro_batches, d.ranks - stage))
        return [StageOption(*found)] if found else []

    cut = best_partition(len(ranges.kinds), d.ranks, options, limit)
    return (cut.copies, tuple(c for c in cut.choices if isinstance(c, Range))) if cut else None


def _even(d: Degrees, ranges: Ranges, limit: float) -> tuple[tuple[int, ...], tuple[Range, ...]] | None:
    """Equally many copies a stage, several stages a rank: all stages in the quickest way in which the fullest rank fits."""
    pipeline = Pipeline(d.ranks, d.schedule, even_copies(len(ranges.kinds), d.ranks * d.virtual))
    held = [in_flight(order) for order in rank_orders(pipeline, d.micro_batches)]
    for number in range(len(ranges.ways)):
        if all(
            ranges.fit([(*pipeline.calls(s), held[r][s]) for s in pipeline.stages_of(r)], number)
            for r in range(d.ranks)
        ):
            return pipeline.copies, (Range(number, number),) * len(pipeline.copies)
    return None


def mixed(graph: Graph, ways: list[Way], pipeline: Pipeline, chosen: tuple[Range, ...]) -> dict[str, BlockPlan]:
    """The plan's blocks, each copy in the way that its stage chose for it."""
    way_of_call: list[int] = []
    for stage, choice in enumerate(chosen):
        count = pipeline.copies[stage]
        way_of_call += [choice.fast] * (count - choice.of_slow) + [choice.slow] * choice.of_slow
    labels = {p: label for label, block in ways[0].blocks.items() for p in block.prefixes}
    found = {"": ways[0].blocks[""]}
    prefixes: dict[tuple[str, int], list[str]] = {}
    for call, number in zip(graph.calls(), way_of_call, strict=True):
        prefixes.setdefault((labels[call.prefix], number), []).append(call.prefix)
    seen: dict[str, int] = {}
    for (label, number), own in prefixes.items():
        name = label.partition("#")[0]
        variant = seen.get(name, 0)
        seen[name] = variant + 1
        found[f"{name}#{variant}" if variant else name] = replace(ways[number].blocks[label], prefixes=tuple(own))
    return found
