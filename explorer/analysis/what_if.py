"""What if: the best plan for some changed settings, and how it differs from the current plan.

Only the best plan is searched, on every mesh; trade-offs, baselines and candidates wait until the settings are applied.
`quick_plan` answers sooner: it searches two meshes and one or two numbers of micro-batches. No Streamlit here.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from explorer.address import settings
from explorer.address.settings import SETTINGS
from explorer.analysis.differences import group_copies
from explorer.jobs.malloc_trim import trim_memory
from explorer.text import units, words
from planner_core.core import Cluster, NoPlanFits, Plan, Unreadable, divisors, glob_name, join_name
from planner_core.planning import (
    FIRST_PASSES,
    Effort,
    GraphSource,
    Planner,
    Progress,
    Request,
    candidate_meshes,
    choose_mesh,
    choose_micro_batches,
    find_faster_baseline,
    least_state_bytes,
    plan_model,
    prepare_planner,
    rare_collections,
    usable_bytes,
)
from planner_core.planning.methods import BASELINES, METHODS
from planner_core.planning.pricing import name_throughput

CHANGEABLE = ("batch", "seq", "dtype", "precision", "optimizer", "zero", "recompute", "nodes", "gpus", "intra", "inter")
"""What the panel may change."""
POWERS = tuple(2**k for k in range(13))
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
GPUS = (1, 2, 4, 8, 16)
GB_PER_S = (1, 2, 4, 8, 12, 16, 25, 32, 50, 64, 100, 150, 200, 300, 400, 450, 600, 800, 900, 1200, 1600, 1800, 3200)
DEFAULT_INTER_GB_PER_S = 400.0
"""GB/s out of a node where a cluster of one node is given several."""
MAX_MOVED_SHOWN = 12
PATIENCE_S = 2.0
_PLANNING = threading.Lock()
FIRST_FIGURES = Effort(0, 0, of_sums=True)
"""Nothing that the first figures say is a proof. Points of a network alone took 0.5 of 0.7 s on two nodes with a slow link, and bounds
of walks a tenth of all where memory binds."""
MIN_PLAN_GAIN = 0.005
"""What is shown at once is searched on while it may be this much quicker. The best plan, which follows, is searched to the end."""
WIDE_GAP = 0.01
"""A gap of the first plan from which on more micro-batches are looked at."""
TENSOR_PARALLEL = ("megatron", "megatron-sp", "hf-expert")
"""Usual layouts that split weights, of 0.05 s each."""


@rare_collections()
def best_plan(request: Request, graph: GraphSource = None, report_progress: Progress = lambda text: None) -> Plan:
    """Find the best plan alone; raises PlannerError as `plan_model` does."""
    with _wait_for_turn(report_progress):
        try:
            if METHODS[request.method].describe_aim(request.objective) is not None:
                # In as many micro-batches as the plan of least time.
                return plan_model(request, graph, report_progress, passes={}).searched
            searched = choose_micro_batches(request, graph, report_progress)
            if not searched[1].cost.host_wait_s:
                return searched[1]
            # The search minimises the GPU's own part of a step. Where a GPU waits for its host, a usual layout or a trade-off may have
            # the shorter step, and only the whole planning compares with those.
            return plan_model(request, graph, report_progress, passes=FIRST_PASSES, searched=searched).searched
        finally:
            trim_memory()


@rare_collections()
def quick_plan(request: Request, before: Plan, graph: GraphSource = None) -> Plan | None:
    """Find a good plan at once, unproven: on two meshes, in as many micro-batches as memory should need.

    The meshes are that of `before`, if its cluster stands, and nodes x GPUs of a node. Where the GPUs would wait for their hosts, which no
    search minimises, usual layouts are priced too: of Llama-3-8B with 2 samples on 2 x 8 H100, 252 ms and not 298.
    None if nothing of the kind fits; then only `best_plan` can tell. Raises InputError as `best_plan` does.
    """
    planner = _close_open_choices(request, before, graph)
    cluster, meshes = planner.cluster, candidate_meshes(planner.request, planner.cluster)
    near = {_mesh_sizes(cluster, cluster.num_gpus // cluster.near_gpus)}
    if cluster == before.cluster:
        near.add(before.mesh.axis_sizes)
    options = sorted((m for m in meshes if m.axis_sizes in near), key=lambda m: m.axis_sizes != before.mesh.axis_sizes)
    plans: list[Plan] = []
    for mesh in options:
        with suppress(NoPlanFits):
            plans.append(choose_mesh(planner, [mesh], below=_least_value(planner, plans), prove=False))
    if plans:
        plan = min(plans, key=lambda p: (not p.fits, planner.value(p)))
        number = planner.workload.accumulate
        more = next((n for n in divisors(planner.workload.batch) if n > number and n % number == 0), None)
        # A gap is what the limit of memory may cost, and with fewer activations a faster layout may fit: over 25 GB/s between nodes
        # Llama-3-8B takes 1042 ms in one micro-batch, and 1003 in two.
        if request.accumulate is None and more and plan.bound and planner.value(plan) > (1 + WIDE_GAP) * plan.bound:
            with suppress(NoPlanFits):
                below = _least_value(planner, plans)
                plans.append(choose_mesh(_at_number(planner, more, graph), options, below=below, prove=False))
    best = min((p for p in plans if p.fits), key=lambda p: p.cost.step_time_s, default=None)
    if request.tool is None and any(plan.cost.host_wait_s for plan in plans):
        usual = _mesh_sizes(cluster, planner.workload.graph_batch)
        # where every GPU has samples data parallel is the usual layout, else those that split weights
        names = TENSOR_PARALLEL if len(usual) > 1 else ("data-parallel",)
        of_these = {name: BASELINES[name] for name in names}
        below = best.cost.step_time_s if best else math.inf
        best = find_faster_baseline(planner, [m for m in meshes if m.axis_sizes == usual], of_these, below) or best
    return best


def _least_value(planner: Planner, plans: Sequence[Plan]) -> float:
    """Return the value below which a further search may end, infinity where it may not.

    The search minimises the GPU's own part of a step, and where GPUs wait for their hosts the mesh of the least part may have the longer
    step. Of GPT-2 XL with 8 samples and whole states on 2 x 8 H100, one axis takes 261 ms, and 2 x 8 takes 374.
    """
    if any(plan.cost.host_wait_s for plan in plans):
        return math.inf
    return (1 - MIN_PLAN_GAIN) * min((planner.value(plan) for plan in plans if plan.fits), default=math.inf)


def _mesh_sizes(cluster: Cluster, outer: int) -> tuple[int, ...]:
    """Return the sizes of a mesh of `outer` x the rest, which lies within a node: 4 x 4 of 16 GPUs for 4 samples, and 2 x 8 for one."""
    num_gpus = cluster.num_gpus
    outer = max(math.gcd(outer, num_gpus), num_gpus // cluster.levels[0].size)
    return tuple(size for size in (outer, num_gpus // outer) if size > 1)


def _close_open_choices(request: Request, before: Plan, graph: GraphSource) -> Planner:
    """Return the planner of a request whose open choices are made from the plan before.

    The number of micro-batches is the least with which that plan would fit if its activations grew with the tokens. An open ZeRO stage
    lets the search shard all weights and states, which leaves room for fewer micro-batches; recomputation is then left to the search too.
    Example: 128 samples of Llama-3-8B on 16 H100 take 8 micro-batches as the plan for 16 samples keeps its weights, and 4 with all sharded.
    """
    batch, seq, number = before.workload.batch, before.workload.seq, before.accumulate
    tokens = batch * seq / number
    batch, seq = request.batch or batch, request.seq or seq
    memory = before.cost.memory_bytes
    growing_bytes = memory["activations"] + memory["buffers"]
    usable = usable_bytes(before.cluster.gpu.memory_bytes, request)

    def least_number(states_bytes: float) -> int:
        room_bytes = usable - states_bytes
        fitting = (n for n in divisors(batch) if growing_bytes * batch * seq / n <= room_bytes * tokens)
        return next(fitting, batch)

    number = request.accumulate or least_number(memory["peak"] - growing_bytes)
    recompute = before.workload.recompute if request.recompute == "auto" else request.recompute
    closed = replace(request, batch=batch, accumulate=number, recompute=recompute)
    planner = prepare_planner(closed, graph(closed) if callable(graph) else graph, effort=FIRST_FIGURES)
    if request.accumulate is None and request.zero is None:
        fewer = least_number(least_state_bytes(planner))
        if fewer < number:
            return _at_number(replace(planner, request=replace(closed, recompute=request.recompute)), fewer, graph)
    return planner


def _at_number(planner: Planner, number: int, graph: GraphSource) -> Planner:
    """Return the planner with another number of micro-batches."""
    of_number = replace(planner.request, accumulate=number)
    return prepare_planner(of_number, graph(of_number) if callable(graph) else graph, effort=FIRST_FIGURES)


@contextmanager
def _wait_for_turn(report_progress: Progress) -> Iterator[None]:
    """Let one search run at a time: threads of one interpreter that plan at once all end late.

    After `PATIENCE_S` the next one starts all the same, since the one before may be long.
    """
    acquired = False
    start = time.monotonic()
    while not acquired and time.monotonic() - start < PATIENCE_S:
        # In short waits, so that `report_progress`, which raises where the visitor has left, is asked ten times a second.
        if not (acquired := _PLANNING.acquire(timeout=0.1)):
            report_progress("another visitor's plan")
    try:
        yield
    finally:
        if acquired:
            _PLANNING.release()


def parse_changes(texts: tuple[str, ...]) -> dict[str, Any]:
    """Read the changed settings from the address (`batch:32`); parts that cannot be read are left out."""
    changes: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.partition(":")
        try:
            if key in CHANGEABLE:
                changes[key] = SETTINGS[key].parse(value)
        except Unreadable:
            continue
    return changes


def unreadable_changes(texts: tuple[str, ...]) -> list[str]:
    """Return what `parse_changes` left out."""
    return [t for t in texts if not parse_changes((t,))]


def format_changes(changes: Mapping[str, Any]) -> tuple[str, ...]:
    """Write the changes as the address keeps them."""
    return tuple(f"{k}:{SETTINGS[k].format(v)}" for k, v in changes.items() if k in CHANGEABLE and v is not None)


def apply_changes(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings with the changes; a mesh is dropped where the number of GPUs changes."""
    changed = {**values, **changes}
    if any(k in changes and changes[k] != values[k] for k in ("nodes", "gpus")):
        changed["mesh"] = None
    return changed


def changed_request(values: Mapping[str, Any], changes: Mapping[str, Any]) -> Request:
    """Return the request of the changed settings."""
    return settings.build_request(apply_changes(values, changes))


def current_numbers(cluster: Cluster, batch: int, seq: int) -> dict[str, Any]:
    """Return the panel's numbers now: of the workload and of the cluster (GB/s one way). No `inter` on one node."""
    inner, network = cluster.levels[0], cluster.network
    numbers = {
        "batch": batch,
        "seq": seq,
        "nodes": cluster.num_nodes,
        "gpus": cluster.node_gpus,
        "intra": inner.unit_bytes_per_s / 1e9,
    }
    return numbers | ({"inter": network.unit_bytes_per_s / 1e9} if network else {})


def slider_stops(steps: tuple[float, ...], now: float) -> list[float]:
    """Return the stops of a slider, with the current value."""
    return sorted({*steps, now})


@dataclass(frozen=True, slots=True)
class MetricChange:
    """One number now, and its change in words; `better` is None where the change is not worth a colour."""

    name: str
    now: str
    change: str
    better: bool | None


def metric_changes(before: Plan, after: Plan) -> list[MetricChange]:
    """Return step, communication and memory of the new plan, each against the old one.

    Steps of other batches or lengths do not compare: then the tokens of a second come second, and they alone are better or worse.
    """
    a, b = before.cost, after.cost
    rows = (
        ("step", a.step_time_s, b.step_time_s, units.seconds),
        ("communication", a.comm_time_s, b.comm_time_s, units.seconds),
        ("memory per GPU", a.memory_bytes["peak"], b.memory_bytes["peak"], units.memory),
    )
    changes = [MetricChange(name, unit(new), *_describe_change(old, new, unit)) for name, old, new, unit in rows]
    tokens = [p.workload.batch * p.workload.seq for p in (before, after)]
    if tokens[0] == tokens[1]:
        return changes
    old, new = (n / p.cost.step_time_s for n, p in zip(tokens, (before, after), strict=True))
    change, is_less = _describe_change(old, new, units.count)
    share = change.partition("(")[2].removesuffix(")") or change  # both figures are large: the share says it
    speed = MetricChange(name_throughput(after), units.count(new), share, None if is_less is None else not is_less)
    step, *others = (replace(one, better=None) for one in changes)
    return [step, speed, *others]


def _describe_change(old: float, new: float, unit: Any) -> tuple[str, bool | None]:
    """Return the change in words, and whether it is to less; None where nothing changed."""
    if abs(new - old) <= 0.001 * max(abs(old), abs(new)):
        return "as before", None
    sign = "+" if new > old else "-"  # an ASCII minus: st.metric colours by it
    ratio = f" ({sign}{units.percent(abs(new / old - 1))})" if old else ""
    return f"{sign}{unit(abs(new - old))}{ratio}", new < old


def moved_weights(before: Plan, after: Plan) -> list[tuple[str, str, str]]:
    """Return (weight, placement before, after) of every weight that is placed otherwise; equal copies are one row."""
    tables = [
        {
            at: cell if cell == words.WHOLE or before.mesh == after.mesh else f"{cell} of {plan.mesh}"
            for at, cell in words.placements_by_weight(plan).items()
        }
        for plan in (before, after)
    ]
    return [
        (join_name(glob_name(tuple(p)), weight) + (f" ×{len(p)}" if len(p) > 1 else ""), old, new)
        for (_, weight, (old, new)), p in group_copies(tables).items()
        if old != new
    ]
