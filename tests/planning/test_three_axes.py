"""Meshes of three axes: where they are searched, that the plan is never worse for it, and that it runs as predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner_core as shardscope
from planner_core.core import Plan, load_cluster
from planner_core.planning import choose_mesh
from planner_core.planning.fitting import three_axes
from planner_core.planning.fitting.three_axes import _first_gpus, meshes_of_three, with_third_axis
from planner_core.planning.planner import candidate_meshes, prepare_planner
from planner_core.planning.request import Request
from planner_core.verification.fake.group import verify_fake
from tests.support.plans import searched, with_pairs

ROWS = "2x8-h100:nodes=16"
FEW_SAMPLES = Request("llama-3-8b", cluster=ROWS, batch=32, layers=4)
"""A quarter of a sample on each of 128 GPUs."""


def sizes(request: Request) -> list[tuple[int, ...]]:
    return [mesh.axis_sizes for mesh in meshes_of_three(prepare_planner(request, None))]


def test_which_meshes_are_searched() -> None:
    """The inner axis is a node or half of one; the outer two are about as long as each other."""
    assert sizes(FEW_SAMPLES) == [(2, 8, 8), (4, 4, 8), (4, 8, 4)]
    assert sizes(replace(FEW_SAMPLES, cluster="2x8-h100:nodes=64")) == [(4, 16, 8), (8, 8, 8), (8, 16, 4)]
    many = sizes(replace(FEW_SAMPLES, cluster="2x8-h100:nodes=2048"))
    assert many and all(a * b * c == 16384 and a <= b <= 4 * a and c in (4, 8) for a, b, c in many)


def test_the_inner_axis_is_a_host_of_several_levels() -> None:
    assert sizes(replace(FEW_SAMPLES, cluster=with_pairs(ROWS))) == sizes(FEW_SAMPLES)


def test_few_gpus_are_searched_on_three_axes_if_two_do_not_fit() -> None:
    planner = prepare_planner(replace(FEW_SAMPLES, cluster="2x8-h100"), None)
    assert meshes_of_three(planner) == []
    assert [m.axis_sizes for m in meshes_of_three(planner, short=True)] == [(2, 2, 4), (2, 4, 2)]


@pytest.mark.parametrize(
    "changes",
    [
        {"cluster": "2x8-h100:nodes=8"},
        {"batch": 128},
        {"mesh": "16x8"},
        {"tool": "megatron"},
        {"method": "taps"},
        {"objective": "communication"},
    ],
    ids=str,
)
def test_where_two_axes_are_enough_there_are_none(changes: dict[str, object]) -> None:
    """On 64 GPUs; where every GPU has a sample; and where the user said what to search."""
    assert sizes(replace(FEW_SAMPLES, **changes)) == []  # type: ignore[arg-type]


def test_a_part_of_a_cluster_computes_as_its_gpus_alone() -> None:
    """Four GPUs of a cluster that states its hosts counted as half a node, and no straggler made them faster than they are."""
    costs = []
    for cluster in (_first_gpus(load_cluster("64x8-h100"), 4), load_cluster("1x8-h100:gpus=4")):
        assert cluster is not None
        plan = shardscope.price(
            "llama-3-8b", cluster=cluster, layout="fsdp=4", micro_batch=1, accumulate=1, layers=1, advise=False
        ).plan
        costs.append((plan.cost.compute_time_s, plan.cost.step_time_s))
    assert costs[0] == costs[1]


def test_it_wins_where_gpus_share_samples() -> None:
    """By more than one in a hundred over every mesh of two axes, and it is proven on those that were searched.

    Of eight layers: of four, the ends of the step, which no mesh hides, take too large a part. Under ZeRO-3: where weights may also be
    gathered once a step, two axes do as well. Of torchtitan, whose waits for the host are not known, so work decides.
    """
    deeper = replace(FEW_SAMPLES, layers=8, zero=3, stack="torchtitan")
    planner = prepare_planner(deeper, None)
    two = choose_mesh(planner, candidate_meshes(planner.request, planner.cluster))
    best = searched(deeper)
    assert len(best.mesh.axis_sizes) == 3 and best.optimal
    assert best.cost.step_time_s < 0.99 * two.cost.step_time_s


def test_a_plan_of_two_axes_stays_if_it_is_better() -> None:
    planner = prepare_planner(FEW_SAMPLES, None)
    best = searched(FEW_SAMPLES)
    faster = replace(best, cost=replace(best.cost, step_time_s=best.cost.step_time_s / 2))
    assert with_third_axis(planner, faster, lambda text: None) is faster


def test_where_nothing_fits_the_plan_of_less_memory_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its note says that no plan needs less, so a shorter step counts for nothing."""
    planner, best = prepare_planner(FEW_SAMPLES, None), searched(FEW_SAMPLES)

    def too_large(step: float, memory: float) -> Plan:
        peak = int(memory * best.cost.memory_bytes["peak"])
        cost = replace(
            best.cost,
            step_time_s=step * best.cost.step_time_s,
            memory_bytes={**best.cost.memory_bytes, "peak": peak},
        )
        return replace(best, fits=False, cost=cost)

    plan = too_large(1, 1)
    for other, chosen in ((too_large(0.5, 1.1), plan), (found := too_large(2, 0.9), found)):
        monkeypatch.setattr(three_axes, "choose_mesh", lambda *args, other=other, **options: other)
        assert with_third_axis(planner, plan, lambda text: None).cost == chosen.cost


def test_the_plan_runs_as_predicted() -> None:
    report = verify_fake(searched(FEW_SAMPLES))
    assert report["ok"] and report["memory_bytes"]["rel_error"] < 0.02
