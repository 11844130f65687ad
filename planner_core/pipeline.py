"""From a model and a cluster to plans: the passes in order, every value between them kept.

    graph -> coarsen -> strategies -> for each mesh: network -> search -> plan
                                   -> candidates of each block, baselines, other methods

This is the one place that knows the order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from planner_core import methods
from planner_core.assemble import assemble
from planner_core.candidates import Candidates, matrices, score
from planner_core.cluster import Cluster, load_cluster
from planner_core.coarsen import CoarseGraph, coarsen
from planner_core.collectives import volume_link
from planner_core.eliminate import TooWide
from planner_core.errors import InputError, NoPlanFits
from planner_core.expert import EXPERT
from planner_core.graph import Graph
from planner_core.hardware import CostModel, Workload, cost_model
from planner_core.memory import walk
from planner_core.mesh import DeviceMesh, axis_names, parse_mesh
from planner_core.narrow import NOTE, narrow
from planner_core.opening import open_model
from planner_core.plan import Plan
from planner_core.price import price
from planner_core.problem import Networks, Problem, Restriction, build_networks, build_problem
from planner_core.search import OBJECTIVES, Answer, corners, memory_of, search, value_of, weights
from planner_core.solve import Assignment, block_totals, solve
from planner_core.strategy import BlockStrategies, block_strategies
from planner_core.tables import COMM, MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterator

Progress = Callable[[str], None]
"""Called with what is being done; may raise to stop."""
USABLE_MEMORY = 0.92
"""Share of a GPU's memory that plans may fill unless a budget is given; the rest is left to the allocator's fragmentation,
to NCCL's buffers and to kernels' workspaces, which the memory walk does not count. An assumption."""
MAX_FRONT = 6
"""Corners of the front that become plans."""
FRONT_STEP = 0.03
"""Corners of the front that save less memory than this share of the one before are left out."""
METHODS = ("exact", "tap", "taps", "atp")


WALKS = 12
"""How often a search is asked for less memory until the walk fits."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for; None means the model's or the cluster's own default."""

    model: str
    cluster: str | Mapping[str, Any] = "2x8-h100"
    mesh: str | None = None
    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    optimizer: str = "adamw"
    zero: int = 3
    recompute: str = "none"
    memory_gb: float | None = None
    layers: int | None = None
    method: str = "exact"
    objective: str = "time"


@dataclass(frozen=True, slots=True)
class Result:
    """Everything a report or a page shows. `plans`: the chosen plan, then the front, then the baselines."""

    request: Request
    graph: Graph
    coarse: CoarseGraph
    cluster: Cluster
    workload: Workload
    candidates: tuple[Candidates, ...]
    dropped: Mapping[str, int]
    unknown_ops: tuple[str, ...]
    plans: tuple[Plan, ...]
    timings_s: Mapping[str, float]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Plan:
        """The chosen plan."""
        return self.plans[0]


class _Clock:
    """Seconds by pass."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(
            ("capture", "coarsen", "fold", "network", "search", "front", "baselines"), 0.0
        )

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


@dataclass
class Planner:
    """A model on a cluster, ready to be planned on any mesh: what all meshes and methods share."""

    request: Request
    graph: Graph
    cluster: Cluster
    workload: Workload
    coarse: CoarseGraph
    strategies: Mapping[str, BlockStrategies]
    clock: _Clock
    networks: dict[tuple[tuple[int, ...], int, bool], Networks] = field(default_factory=dict)

    @property
    def budget(self) -> float:
        """Bytes per GPU that a plan may take: what the user said, else the GPU's memory less what the walk does not count."""
        return self.cluster.gpu.memory_bytes * (1.0 if self.request.memory_gb is not None else USABLE_MEMORY)

    def problem(
        self,
        mesh: DeviceMesh,
        restrict: Restriction | None = None,
        *,
        zero: int | None = None,
        uniform: bool = False,
        by_volume: bool = False,
    ) -> Problem:
        """The folded cost network on one mesh; `by_volume` prices a byte alike on every axis."""
        workload = self.workload if zero is None else replace(self.workload, zero=min(zero, self.workload.zero))
        model = cost_model(self.cluster, mesh, workload)
        if by_volume:
            model = replace(model, links=tuple(volume_link(link.size) for link in model.links))
        key = (mesh.axis_sizes, workload.zero, by_volume)
        with self.clock("network"):
            if key not in self.networks:
                self.networks[key] = build_networks(self.coarse, self.strategies, model)
            nets = self.networks[key]
            try:
                return build_problem(self.coarse, self.strategies, model, restrict, uniform, nets)
            except TooWide:
                less = narrow(nets, self.coarse, restrict)
                problem = build_problem(self.coarse, self.strategies, model, less, uniform, nets)
                return replace(problem, narrowed=True)

    def solve(self, problem: Problem, objective: str, abandon_above: float = float("inf")) -> Answer:
        """The best assignment whose walked peak is within the memory.

        The network's memory is a sum that stands a few per cent beside the walk. Where the walk is above the budget, the search
        is asked for less; the answer is then called optimal only if no plan at all beats it.
        """
        with self.clock("search"):
            budget, bound = self.budget, 0.0
            for attempt in range(WALKS):
                answer = search(problem, objective=objective, budget=budget, abandon_above=abandon_above)
                bound = bound if attempt else answer.bound
                if answer.assignment is None:
                    return answer
                over = walk(assemble(problem, answer.assignment), self.graph, problem.model)["peak"] - self.budget
                if over <= 0:
                    break
                budget = min(budget, memory_of(answer.assignment)) - max(over, 1.0)
            return replace(answer, bound=min(bound, answer.value))

    def plan(self, problem: Problem, answer: Answer, name: str, method: str, objective: str) -> Plan:
        """The answer as a plan."""
        assert answer.assignment is not None
        blocks = assemble(problem, answer.assignment)
        model = cost_model(
            self.cluster, problem.model.mesh, problem.model.workload
        )  # the real links, whatever it was chosen by
        cost = price(blocks, self.graph, model)
        told = f"best found; the bound is {100 * answer.gap:.2g} % lower"
        return Plan(
            name=name, method=method, objective=objective, optimal=answer.optimal and not problem.narrowed,
            model=model_identity(self.graph),
            workload=model.workload.to_json(),
            cluster=self.cluster.to_json(), mesh=model.mesh, blocks=blocks, cost=cost,
            fits=cost.memory_bytes["peak"] <= self.budget,
            notes=() if answer.optimal and not problem.narrowed else (NOTE if problem.narrowed else told,),
        )  # fmt: skip


def model_identity(graph: Graph) -> dict[str, Any]:
    """What a plan keeps of its model."""
    return {
        "name": graph.name, "source": graph.source, "params": graph.num_params, "loss": graph.loss, "config": dict(graph.config),
        "layers": graph.num_repeats,
    }  # fmt: skip


def plan_model(request: Request, graph: Graph | None = None, progress: Progress | None = None) -> Result:
    """All passes: load or capture, coarsen, strategies, network and search per mesh, candidates, baselines.

    Raises PlannerError (see `errors`) with one sentence for anything a user can get wrong, NoPlanFits where nothing
    fits an explicit memory budget.
    """
    say = progress or (lambda text: None)
    start = time.perf_counter()
    planner = prepare(request, graph, say)
    chosen = choose(planner, meshes(request, planner.cluster), say)
    say("trade-offs")
    front = trade_offs(planner, meshes(request, planner.cluster), chosen)
    say("baselines")
    others = baselines(planner, meshes(request, planner.cluster))
    say("candidates")
    scored = block_candidates(planner, chosen)
    notes = _memory_notes(planner, chosen)
    timings = {**planner.clock.seconds, "total": time.perf_counter() - start}
    return Result(
        request=request, graph=planner.graph, coarse=planner.coarse, cluster=planner.cluster, workload=planner.workload,
        candidates=tuple(scored), dropped=_dropped(scored, planner.budget), unknown_ops=_unknown(planner), plans=(chosen, *front, *others),
        timings_s=timings, notes=notes,
    )  # fmt: skip


def prepare(request: Request, graph: Graph | None = None, say: Progress = lambda text: None) -> Planner:
    """Everything that does not depend on the mesh. Raises InputError."""
    if request.method not in METHODS:
        raise InputError(f"--method {request.method!r} is not one of {', '.join(METHODS)}")
    if request.objective not in OBJECTIVES:
        raise InputError(f"--objective {request.objective!r} is not one of {', '.join(OBJECTIVES)}")
    clock = _Clock()
    cluster = (
        Cluster.from_json(request.cluster) if isinstance(request.cluster, Mapping) else load_cluster(request.cluster)
    )
    if request.memory_gb is not None:
        if not 0 < request.memory_gb < 1e6:
            raise InputError(f"--memory-gb {request.memory_gb} is not between 0 and 10^6; give e.g. --memory-gb 40")
        cluster = cluster.with_memory(int(request.memory_gb * 1e9))
    request = replace(request, dtype=request.dtype or cluster.gpu.training_dtype)
    assert request.dtype is not None
    Workload(request.batch or 1 if request.batch is None else request.batch, request.seq or 1 if request.seq is None else request.seq,
             request.dtype, request.optimizer, request.zero, request.recompute).check()  # fmt: skip
    if graph is None:
        say(f"graph of {request.model}")
        with clock("capture"):
            graph = open_model(
                request.model, batch=request.batch, seq=request.seq, dtype=request.dtype, layers=request.layers
            )
    workload = Workload(
        graph.workload["batch"],
        graph.workload["seq"],
        request.dtype,
        request.optimizer,
        request.zero,
        request.recompute,
    )
    say("coarsen")
    with clock("coarsen"):
        coarse = coarsen(graph)
        strategies = {"": block_strategies(coarse.top), **{n: block_strategies(b) for n, b in coarse.blocks.items()}}
    return Planner(request, graph, cluster, workload, coarse, strategies, clock)


def meshes(request: Request, cluster: Cluster) -> list[DeviceMesh]:
    """The mesh asked for, or every factorisation of the cluster into at most two axes."""
    n = cluster.num_gpus
    if request.mesh:
        return [parse_mesh(request.mesh, n)]
    found = [DeviceMesh(axis_names(1), (n,))]
    found += [DeviceMesh(axis_names(2), (a, n // a)) for a in range(2, n) if n % a == 0]
    return found


def choose(planner: Planner, options: Iterable[DeviceMesh], say: Progress = lambda text: None) -> Plan:
    """The best plan over the meshes by the request's method; raises NoPlanFits where an explicit budget is below every
    plan's need."""
    lens = methods.LENSES.get(planner.request.method)
    objective = lens.objective if lens else planner.request.objective
    best: tuple[float, Problem, Answer] | None = None
    least: tuple[Answer, Problem] | None = None
    wide: TooWide | None = None
    for mesh in options:
        say(f"search on {mesh}")
        restrict = lens.restrict(planner.graph, mesh) if lens else None
        if lens and restrict is None:
            continue
        try:
            problem = (
                planner.problem(mesh, restrict, zero=lens.zero, uniform=lens.uniform, by_volume=lens.by_volume)
                if lens
                else planner.problem(mesh)
            )
        except TooWide as error:  # another mesh may do; said only where none does
            wide = error
            continue
        answer = planner.solve(problem, objective, best[0] if best else float("inf"))
        if answer.least_memory < (least[0].least_memory if least else float("inf")):
            least = (answer, problem)
        if answer.assignment is not None and (best is None or answer.value < best[0]):
            best = (answer.value, problem, answer)
    if best:
        return planner.plan(best[1], best[2], "best", planner.request.method, objective)
    if least is None and wide is not None:
        raise wide
    if least is None:
        raise NoPlanFits("no plan of this model can run on these meshes; try another --mesh or --batch")
    least_bytes, smallest = least[0].least_memory, least[0].smallest
    there = f"{planner.budget / 1e9:.1f} GB"
    needs = f"the least memory that any plan needs is {least_bytes / 1e9:.1f} GB per GPU, but there are {there}"
    if planner.request.memory_gb is not None:
        raise NoPlanFits(
            f"no plan fits: {needs}; use more GPUs, a smaller --batch, --recompute full or --memory-gb {math.ceil(least_bytes / 1e9)}"
        )
    assert smallest is not None
    plan = planner.plan(
        least[1], Answer(smallest, 0.0, 0.0, least_bytes), "least memory", planner.request.method, objective
    )
    return replace(plan, fits=False, notes=(f"does not fit: {needs}",))


def trade_offs(planner: Planner, options: Iterable[DeviceMesh], chosen: Plan) -> list[Plan]:
    """Plans of the whole model that trade step time against memory: the corners of the front over all meshes, without
    the chosen plan. Between two corners lie only mixtures of them (see `search`)."""
    points: list[tuple[float, float, Problem, Assignment]] = []
    for mesh in options:
        problem = planner.problem(mesh)
        with planner.clock("front"):
            points += [(value_of(a, "time"), memory_of(a), problem, a) for a in corners(problem)]
    points.sort(key=lambda p: p[:2])
    kept: list[tuple[float, float, Problem, Assignment]] = []
    for point in points:
        if not kept or point[1] < kept[-1][1] * (1 - FRONT_STEP):
            kept.append(point)
    if len(kept) > MAX_FRONT:  # evenly along the front, both ends kept
        kept = [kept[round(i * (len(kept) - 1) / (MAX_FRONT - 1))] for i in range(MAX_FRONT)]
    found = [planner.plan(p, Answer(a, t, t, m), "", "exact", "time") for t, m, p, a in kept]
    plans = [p for p in found if p.blocks != chosen.blocks or p.mesh != chosen.mesh]
    return [replace(plan, name=f"trade-off {k + 1}") for k, plan in enumerate(plans)]


def baselines(planner: Planner, options: Iterable[DeviceMesh]) -> list[Plan]:
    """The best plan of each baseline over the meshes; one that suits no mesh is left out."""
    found = []
    options = list(options)
    for b in (*methods.BASELINES, EXPERT):
        best: tuple[float, Problem, Answer] | None = None
        for mesh in options:
            restrict = b.restrict(planner.graph, mesh)
            if restrict is None:
                continue
            problem = planner.problem(mesh, restrict, zero=min(b.zero, 3))
            with planner.clock("baselines"):
                answer = search(problem, objective="time")
            if answer.assignment is None:
                continue
            over = memory_of(answer.assignment) > planner.budget
            rank = answer.value + (1e6 if over else 0.0)
            if best is None or rank < best[0]:
                best = (rank, problem, answer)
        if best:
            found.append(planner.plan(best[1], best[2], b.name, b.method, "time"))
    return found


def block_candidates(planner: Planner, chosen: Plan) -> list[Candidates]:
    """Candidates of every repeated block on the tensor axis: the chosen mesh's last, or all GPUs of a node. The other GPUs
    split the batch."""
    n, size = planner.cluster.num_gpus, planner.cluster.levels[0].size
    if len(chosen.mesh.axis_sizes) > 1:
        size = chosen.mesh.axis_sizes[-1]
    mesh = DeviceMesh(axis_names(2), (n // size, size)) if size < n else DeviceMesh(axis_names(1), (n,))
    restrict = methods.DataAxis(planner.graph) if size < n else None
    problem = planner.problem(mesh, restrict, zero=0)
    whole = solve(problem, [weights("communication")])
    found = []
    for name, repeats in planner.graph.num_repeats.items():
        one = score(planner.coarse.blocks[name], planner.strategies[name], problem.model, repeats, restrict)
        if one is not None and whole is not None:
            rest = whole.totals - block_totals(problem, whole, name)
            one = replace(one, rest_comm_s=float(rest[COMM]), rest_memory_bytes=float(rest[MEMORY]))
        if one is not None:
            found.append(one)
    return found


def _one_axis(planner: Planner, mesh: DeviceMesh) -> CostModel:
    """Costs on the tensor axis alone, weights kept, the links of adjacent GPUs."""
    n = mesh.axis_sizes[0]
    whole = DeviceMesh(("data", "tensor"), (planner.cluster.num_gpus // n, n))
    model = cost_model(planner.cluster, whole, replace(planner.workload, zero=0))
    return replace(model, mesh=mesh, links=model.links[-1:])


def _dropped(found: Iterable[Candidates], budget: float) -> dict[str, int]:
    """Why candidates are no choice: a split is not even, the whole model does not fit, or another is better in both."""
    counts = {"uneven": 0, "memory": 0, "dominated": 0}
    for c in found:
        runs = np.isfinite(c.comm_s)
        fits = c.model_memory_bytes <= budget
        counts["uneven"] += c.space - int(runs.sum())
        counts["memory"] += int((runs & ~fits).sum())
        counts["dominated"] += int((runs & fits & ~c.on_front).sum())
    return counts


def _unknown(planner: Planner) -> tuple[str, ...]:
    names = [u for s in planner.strategies.values() for u in s.unknown]
    return tuple(dict.fromkeys(names))


def _memory_notes(planner: Planner, chosen: Plan) -> tuple[str, ...]:
    return chosen.notes if not chosen.fits else ()


def space(planner: Planner) -> int:
    """How many candidates the unique blocks have together."""
    return sum(3 ** len(matrices(b.block)) for b in planner.coarse.blocks.values())


def compare_methods(request: Request, progress: Progress | None = None) -> Result:
    """Every method and baseline side by side: the `compare --json` object has the form of `plan --json`."""
    result = plan_model(request, progress=progress)
    say = progress or (lambda text: None)
    planner = prepare(request, result.graph)
    extra = []
    for method in METHODS:
        for objective in OBJECTIVES if method == "exact" else OBJECTIVES[:1]:
            if (method, objective) == (request.method, request.objective):
                continue
            say(f"{method}, least {objective}")
            one = replace_request(planner, method=method, objective=objective, memory_gb=None)
            try:
                plan = choose(one, meshes(request, planner.cluster))
            except NoPlanFits:
                continue
            lens = methods.LENSES.get(method)
            extra.append(
                replace(
                    plan,
                    name=lens.name.upper() if lens else f"least {objective}",
                    notes=(lens.says,) if lens else plan.notes,
                )
            )
    return replace(result, plans=(*result.plans, *extra))


def replace_request(planner: Planner, **changes: Any) -> Planner:
    """The same planner for another request of the same model, cluster and workload."""
    return replace(planner, request=replace(planner.request, **changes), networks=planner.networks)
