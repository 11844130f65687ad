"""Prices a plan on other links than its cluster has, and finds the plan that would be best on them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from explorer.text import units
from planner_core.core import Cluster, Graph, Level, NoPlanFits, Plan
from planner_core.cost import cost_model_of, price, step_seconds, units_of
from planner_core.planning import Request, choose, meshes, prepare
from planner_core.planning.methods import EXACT

FACTORS = ("0.03125", "0.0625", "0.125", "0.25", "0.5", "1", "2", "4", "8", "16")
"""The factors by which a slider may change a bandwidth or latency, as text for the address."""


@dataclass(frozen=True, slots=True)
class Goals:
    """The best plans by bytes, by communication time and by step time; each with its price on the real links."""

    volume: Plan
    communication: Plan
    time: Plan


def changed(cluster: Cluster, bandwidth: Sequence[str], latency: Sequence[str]) -> Cluster:
    """The cluster with each level's bandwidth and latency times its factor; a level without one stays as it is."""
    for level, factor in enumerate(bandwidth[: len(cluster.levels)]):
        cluster = cluster.with_bandwidth(float(factor), level)
    for level, factor in enumerate(latency[: len(cluster.levels)]):
        cluster = cluster.with_latency(float(factor), level)
    return cluster


def repriced(plan: Plan, cluster: Cluster, graph: Graph) -> Plan:
    """The same layout on other links of the same GPUs: its price there."""
    model = cost_model_of(plan, cluster)
    return replace(plan, cluster=cluster.to_json(), cost=price(plan.blocks, graph, model))


def step_times(plan: Plan, graph: Graph) -> Callable[[Cluster], float]:
    """Seconds of a step of the same layout by the links of its GPUs: as `repriced`, without memory."""

    def seconds(there: Cluster) -> float:
        model = cost_model_of(plan, there)
        return step_seconds(units_of(plan.blocks, graph, model), model)

    return seconds


def goals(request: Request, cluster: Cluster, graph: Graph | None) -> Goals:
    """The best plan by each goal on these links. Raises NoPlanFits."""
    planner = prepare(replace(request, cluster=cluster.to_json(), method="exact", objective="time"), graph)
    options = meshes(planner.request, planner.cluster)

    def best(objective: str, by_volume: bool) -> Plan:
        return choose(planner, options, method=replace(EXACT, objective=objective, by_volume=by_volume))

    return Goals(best("communication", True), best("communication", False), choose(planner, options))


def best_there(request: Request, cluster: Cluster, graph: Graph | None) -> Plan | None:
    """The plan that the request's method chooses on these links; None where none fits."""
    planner = prepare(replace(request, cluster=cluster.to_json()), graph)
    try:
        return choose(planner, meshes(planner.request, planner.cluster))
    except NoPlanFits:
        return None


def bandwidth_words(level: Level, factor: str) -> str:
    """`90.0 GB/s (× 0.25)`."""
    return f"{units.significant(level.bytes_per_s * float(factor) / 1e9)} GB/s{_times(factor)}"


def latency_words(level: Level, factor: str) -> str:
    """`6.00 µs (× 2)`."""
    return f"{units.seconds(level.latency_s * float(factor))}{_times(factor)}"


def _times(factor: str) -> str:
    return "" if float(factor) == 1 else f" (× {units.significant(float(factor), 3).rstrip('0').rstrip('.')})"
