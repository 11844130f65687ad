"""Plans that tests share: a request is planned once for all processes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any
from unittest import mock

from planner_core.core import Cluster, Plan, load_cluster
from planner_core.cost import can_run_in_chunks, cost_model_of, price
from planner_core.cost.resolved_ops import block_of
from planner_core.models import load_plan_graph
from planner_core.planning import GraphSource, Result, library
from planner_core.planning.methods import parse_layout
from planner_core.planning.pipeline import FIRST_PASSES, PASSES, Pass, add_third_axis, plan_model
from planner_core.planning.pricing import Pricer, Statement
from planner_core.planning.request import Progress, Request
from tests.support.plan_cache import on_disk

_PASSES = {**FIRST_PASSES, **PASSES}


def with_ample_memory(cluster: str) -> Cluster:
    """Return a cluster whose GPUs hold every plan, for budgets that are never exceeded."""
    return load_cluster(cluster).with_memory(10**15)


def with_pairs(cluster: str) -> Cluster:
    """Return the same cluster with pairs of GPUs as its level 0, of which each host has several: what a node is stays as it was."""
    plain = load_cluster(cluster)
    node, *outer = plain.levels
    levels = (replace(node, size=2), replace(node, name="PCIe", size=node.size // 2, unit_bytes_per_s=1e11), *outer)
    return replace(plain, levels=levels, gpus_per_node=node.size)


@lru_cache(maxsize=64)
@on_disk
def planned(request: Request, *passes: str) -> Result:
    """Return what `plan_model` finds, or what it finds in some `passes` alone. Results are values that nothing changes, so tests may share one.

    A test of planning itself (that it stops, that it tells its progress, that two runs agree) calls `plan_model`.
    """
    return plan_model(request, passes={name: _PASSES[name] for name in passes} if passes else PASSES)


@lru_cache(maxsize=16)
@on_disk
def _recorded(request: Request, passes: tuple[str, ...], shows_first: bool) -> tuple[list[str | Plan], Result]:
    """Return what `plan_model` tells on its way, progress and first plans in their order, and what it finds."""
    told: list[str | Plan] = []
    by_name = {name: _PASSES[name] for name in passes}
    show = told.append if shows_first else None
    return told, plan_model(request, progress=told.append, show_first=show, passes=by_name)


def replay_plan_model(
    request: Request,
    graph: GraphSource = None,
    progress: Progress | None = None,
    show_first: Callable[[Plan], None] | None = None,
    passes: Mapping[str, Pass] = PASSES,
) -> Result:
    """Return what `plan_model` tells and finds, computed once for all processes; for tests of what is made of it."""
    if graph is not None:
        return plan_model(request, graph, progress, show_first=show_first, passes=passes)
    told, result = _recorded(request, tuple(passes), show_first is not None)
    for one in told:
        if isinstance(one, str) and progress:
            progress(one)
        elif isinstance(one, Plan) and show_first:
            show_first(one)
    return result


def search_alone(request: Request) -> Plan:
    """Return the plan that the search finds, without baselines, trade-offs and candidates beside it: half the work.

    Raises NoPlanFits if the user gave a budget that no plan fits.
    """
    return plan_model(request, passes={"third axis": add_third_axis}).plans[0]


searched = lru_cache(maxsize=64)(on_disk(search_alone))
"""The same, once for all processes, for a request that names its cluster."""


@cache
def pricer(model: str, cluster: str) -> Pricer:
    """Return what prices layouts of a model on a cluster. Its graphs and networks are made once for all tests."""
    return Pricer(model, load_cluster(cluster))


def plan_of_layout(model: str, cluster: str, layout: str, **run: Any) -> Plan:
    """Return the plan of a stated layout. `run`: fields of the statement."""
    plan = pricer(model, cluster).plan(Statement(parse_layout(layout), **run))
    assert plan is not None, f"{model} does not follow {layout}"
    return plan


@cache
def own_planned(gpus: int = 2, **options: Any) -> Result:
    """Return the best plan and the baselines of the model of tests/support/own_model.py, which needs torch."""
    from tests.support import own_model

    model, inputs = own_model.OwnGPT(), own_model.batch(0)
    return plan_in_passes(model, "baselines", inputs=inputs, cluster=f"1x8-h100:gpus={gpus}", **options)


def plan_in_passes(model: Any, *passes: str, **options: Any) -> Result:
    """Return what `shardscope.plan` finds in some passes alone."""
    import planner_core as shardscope

    in_passes = partial(plan_model, passes={name: _PASSES[name] for name in passes})
    with mock.patch.object(library, "plan_model", in_passes):
        return shardscope.plan(model, **options)


def in_chunks(plan: Plan, chunks: int = 4) -> Plan:
    """Return the plan with every product in chunks that can be, whether it gains or not."""
    graph, plan = load_plan_graph(plan), replace(plan, workload=replace(plan.workload, chunks=chunks))
    model, blocks = cost_model_of(plan), {}
    for label, bp in plan.blocks.items():
        block, sites = block_of(graph, label), dict(bp.sites)
        for op in block.ops:
            edge = sites[op.name].outputs[0]
            if op.name not in bp.kept and can_run_in_chunks(block, op, edge, model.sizes, max(2, chunks)):
                sites[op.name] = replace(sites[op.name], outputs=(replace(edge, chunks=chunks),))
        blocks[label] = replace(bp, sites=sites)
    return replace(plan, blocks=blocks, cost=price(blocks, graph, model))
