"""Plans that deal tokens out to experts run as predicted: on real processes, at full size, with recomputation."""

from __future__ import annotations

from functools import cache

import pytest

from planner_core.core import Plan, Shard
from planner_core.models.loading import capture_graph, load_plan_graph
from planner_core.ops import DISPATCH
from planner_core.planning.pipeline import Result
from planner_core.planning.request import Request
from planner_core.verification.api import scaled
from planner_core.verification.fake.group import verify_fake_all
from planner_core.verification.numerics import verify_all
from planner_core.verification.static import check_rules
from tests.support.plans import planned, searched
from tests.support.runtime_plans import forced, make_plan
from tests.support.tiny_models import tiny_config


@cache
def mixtral(cluster: str = "2x8-h100", recompute: str = "auto", batch: int = 16) -> Result:
    return planned(Request("mixtral-8x7b", cluster=cluster, batch=batch, recompute=recompute))


def dealt(plan: Plan) -> bool:
    """Whether the experts' operator takes tokens and weights sharded on one axis."""
    sites = [s for b in plan.blocks.values() for name, s in b.sites.items() if name.endswith("moe_experts")]
    both = [[e.dst.forward for e in (s.inputs[0], s.inputs[3])] for s in sites]
    return any(x == y == Shard(0) for hidden, up in both for x, y in zip(hidden, up, strict=True))


def test_mixtral_deals_its_tokens_out_inside_the_nodes() -> None:
    """An axis of experts of its own, and weights sharded over the nodes besides."""
    plan = searched(Request("mixtral-8x7b", cluster="2x8-h100", batch=16, recompute="auto"))
    assert plan.fits and plan.mesh.axis_sizes == (2, 8) and dealt(plan)
    assert plan.cost.collectives()["forward"]["all_to_all"]["count"] >= 2 * 32
    assert check_rules(plan, load_plan_graph(plan)) == []


@pytest.mark.slow
def test_the_best_plan_runs_as_predicted() -> None:
    """Loss, every gradient, a step of AdamW; kinds, numbers and bytes of all collectives. One rank sends what its router chooses, so of
    an all_to_all the bytes of all ranks together are compared."""
    plan = scaled(mixtral().plans[0], 4)
    (found,) = verify_all([plan])
    assert found["ok"], (found["loss"], found["grad"], found["param"], found["collectives"])
    assert dealt(plan)


@pytest.mark.parametrize(
    "sizes", [(2,), pytest.param((4,), marks=pytest.mark.slow), pytest.param((2, 2), marks=pytest.mark.slow)]
)
def test_every_axis_may_deal_tokens_out(sizes: tuple[int, ...]) -> None:
    """Two layers of 64 tokens of width 32, two experts each: four all_to_alls of 64 x 2 x 32 numbers forward, and four backward."""
    graph = capture_graph(tiny_config("mixtral"), batch=4, seq=16, dtype="float32")
    plans = [make_plan(graph, sizes, choice) for choice in forced("moe_experts", DISPATCH, sizes)]
    for found in verify_all(plans):
        assert found["numbers_ok"], (found["loss"], found["grad"])
        for phase in ("forward", "backward"):
            sent = found["collectives"]["measured"][phase]["all_to_all"]
            assert (sent["count"], sent["bytes"]) == (4, 4 * 64 * 2 * 32 * 4)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["auto", "full", "selective"])
def test_traffic_and_memory_at_full_size(recompute: str) -> None:
    results = [mixtral(cluster, recompute, batch) for cluster, batch in (("2x8-h100", 16), ("8x8-h100", 128))]
    reports = verify_fake_all([r.plans[0] for r in results], graphs=[r.graph for r in results])
    for result, report in zip(results, reports, strict=True):
        assert dealt(result.plans[0]) and report["ok"], report["order"]
        assert report["memory_bytes"]["rel_error"] < 0.002, report["memory_bytes"]
