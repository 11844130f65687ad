"""Which axis lies inside a node: the place of the pipeline's axis, in prices, in the search and in what it may be stated as."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planner_core.core import DeviceMesh, InputError, PipelineAxis, Plan, load_cluster, plan_from_json, plan_to_json
from planner_core.cost.communication import bytes_between_gpus, gpus_of_ranks, pipe_link, rank_links
from planner_core.planning import prepare_planner
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import Pricer, Statement
from planner_core.planning.request import Request
from planner_core.planning.stages.degrees import PipelineDegrees
from planner_core.planning.stages.search import _StageSearch, search_stages

NODES = "1x4-a100-pcie:nodes=2,inter=1"
"""Two nodes of four GPUs; 1 GB/s leaves a node, so that sends of many micro-batches take long there."""


def stated(order: str) -> Plan:
    layout = parse_layout(f"dp=2,tp=2,pp=2,zero=0,order={order}")
    plan = Pricer("llama-3-8b", load_cluster(NODES)).plan(Statement(layout, accumulate=8, seq=512, layers=4))
    assert plan is not None and plan.pipeline is not None
    return plan


@pytest.mark.parametrize(
    ("outer", "pipe", "data", "tensor"),
    [(0, "node", "inside", "inside"), (1, "inside", "node", "inside"), (2, "inside", "node", "inside")],
)
def test_the_place_of_the_pipeline_decides_what_leaves_a_node(outer: int, pipe: str, data: str, tensor: str) -> None:
    cluster, mesh = load_cluster(NODES), DeviceMesh(("data", "tensor"), (2, 2))
    links = [pipe_link(cluster, mesh, PipelineAxis(2, outer)), *rank_links(cluster, mesh, PipelineAxis(2, outer))]
    inside = cluster.levels[0].name
    assert ["inside" if link.levels == (inside,) else "node" for link in links] == [pipe, data, tensor]


@pytest.mark.parametrize("outer", [0, 1, 2])
def test_every_gpu_has_one_place_in_one_rank(outer: int) -> None:
    plan = stated(["tp-dp-pp", "tp-pp-dp", "pp-tp-dp"][outer])
    assert plan.pipeline_axis == PipelineAxis(2, outer)
    gpus = gpus_of_ranks(plan)
    assert sorted(gpus.ravel()) == list(range(8))
    for own in gpus:
        assert [plan.pipeline_axis.rank_in_mesh(plan.mesh, int(gpu)) for gpu in own] == [0, 1, 2, 3]
    assert plan_from_json(plan_to_json(plan)).pipeline == plan.pipeline


def test_stages_inside_a_node_send_less_between_nodes_and_sum_more() -> None:
    cluster, over, inside = load_cluster(NODES), stated("tp-dp-pp"), stated("tp-pp-dp")
    assert over.cost.pipeline is not None and inside.cost.pipeline is not None
    assert inside.cost.pipeline.stages[0].send_s < over.cost.pipeline.stages[0].send_s
    assert inside.cost.pipeline.stages[0].last_s > over.cost.pipeline.stages[0].last_s
    sent = [bytes_between_gpus(plan, cluster, ("forward",))[:4, 4:].sum() for plan in (over, inside)]
    assert sent[1] < 1e3 < 1e8 < sent[0]  # the loss is summed over the data-parallel ranks
    # Where data-parallel ranks are on two nodes, the norms' gradients are the same on both tensor ranks, but divided and summed over all
    # four: of n bytes each GPU sends n / 2 inside the node, n / 2 between the nodes, n / 2 inside; a ring of two sends n between nodes.
    (joint,) = (t for t in inside.cost.traffic if t.axes == (0, 1))
    assert joint.wire_bytes == 1.5 * joint.num_bytes
    added = inside.num_gpus * joint.num_bytes / 2
    assert bytes_between_gpus(over, cluster).sum() + added == pytest.approx(bytes_between_gpus(inside, cluster).sum())


def test_an_order_needs_stages_and_is_known() -> None:
    with pytest.raises(InputError, match="order say how the stages of pp ranks run"):
        parse_layout("dp=4,tp=2,order=tp-pp-dp")
    with pytest.raises(InputError, match="tp-dp-pp, tp-pp-dp, pp-tp-dp, the innermost ranks first"):
        parse_layout("dp=4,pp=2,order=dp-pp")
    assert str(parse_layout("dp=2,tp=2,pp=2,order=tp-pp-dp")) == "dp=2,tp=2,pp=2,order=tp-pp-dp"


@pytest.mark.slow
@pytest.mark.parametrize(("inter", "batch", "outer"), [(2, 256, 1), (25, 64, 0)])
def test_no_degrees_in_any_place_are_better(inter: int, batch: int, outer: int) -> None:
    """The search takes one place by an estimate and tries the others of the degrees that won. All degrees in all places are its judge."""
    cluster = f"1x4-a100-pcie:nodes=2,inter={inter}"
    planner = prepare_planner(
        Request("gpt2-xl", cluster=cluster, batch=batch, seq=1024, accumulate=1, recompute="auto", layers=4, zero=1)
    )
    found = search_stages(planner)
    assert found is not None and found.plan.pipeline is not None
    best_s, best_outer = math.inf, 0
    every = _StageSearch(planner, lambda text: None, None, None)
    for d in every.degrees:
        for at in every.estimates.places(d):
            alone = _StageSearch(planner, lambda text: None, None, None)
            alone.models.planners = every.models.planners
            if alone.try_degrees(at, best_s) and alone.best is not None:
                best_s, best_outer = alone.best[0].cost.step_time_s, at.outer
    assert found.plan.cost.step_time_s <= best_s * (1 + 1e-9)
    assert found.plan.pipeline.outer == best_outer == outer


def test_stages_lie_inside_a_node_where_sends_are_slow() -> None:
    """2 GB/s between nodes and many samples: gradients are summed there once a step, and stages would send in every micro-batch."""
    cluster = "1x4-a100-pcie:nodes=2,inter=2"
    request = Request("gpt2-xl", cluster=cluster, batch=256, seq=1024, accumulate=1, layers=4, zero=1)
    search = _StageSearch(prepare_planner(request), lambda text: None, None, None)
    seconds: dict[int, float] = {}
    for at in search.estimates.places(PipelineDegrees(2, 1, 2, 2, 4, 32)):
        search.best = None
        assert search.try_degrees(at, math.inf) and search.best is not None
        seconds[at.outer] = search.best[0].cost.step_time_s
    found = search_stages(search.first)
    assert found is not None and found.plan.pipeline is not None and found.plan.pipeline.outer == 1
    assert found.plan.cost.step_time_s <= seconds[1] < 0.8 * seconds[0]


def test_only_places_with_other_links_are_tried() -> None:
    """Where each rank is several nodes, or all GPUs are in one node, the place changes nothing, or puts tensor ranks on slower links."""
    planner = prepare_planner(Request("gpt2-xl", cluster=NODES, batch=64, seq=512, accumulate=1, layers=4))
    search = _StageSearch(planner, lambda text: None, None, None)
    places = [at.outer for at in search.estimates.places(PipelineDegrees(2, 1, 1, 4, 1, 64))]
    assert places == [0]  # inside of the pipeline's axis, four tensor ranks would lie on two nodes
    one = replace(planner, cluster=load_cluster("1x8-h100"))
    inside = _StageSearch(one, lambda text: None, None, None)
    assert [at.outer for at in inside.estimates.places(PipelineDegrees(2, 1, 2, 2, 1, 32))] == [0]
