"""Moments in the host's memory: their price by hand, what they leave free, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner_core.core import InputError, gpu_names, load_cluster, load_gpu
from planner_core.cost import cost_model_of
from planner_core.cost.memory import tensors_at_peak
from planner_core.models import load_plan_graph
from planner_core.planning import plan_model
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import Pricer, Statement
from planner_core.planning.pricing.suggest import find_suggestions
from planner_core.planning.request import Request
from tests.support.plans import planned, searched

LAYERS = 2
HIDDEN, KV, FFN, VOCAB = 4096, 1024, 14336, 128256
PARAMS = LAYERS * (2 * HIDDEN**2 + 2 * HIDDEN * KV + 3 * HIDDEN * FFN + 2 * HIDDEN) + HIDDEN + 2 * VOCAB * HIDDEN


@pytest.mark.parametrize(("optimizer", "moments"), [("adamw", 2), ("sgd-momentum", 1)])
def test_the_step_takes_both_ways_of_the_moments_longer(optimizer: str, moments: int) -> None:
    """FSDP over 8: an eighth of the moments in float32 comes and goes over 0.8 of 64 GB/s."""
    pricer = Pricer("llama-3-8b", load_cluster("1x8-h100"))
    stated = Statement(parse_layout("fsdp=8"), layers=LAYERS, optimizer=optimizer)
    usual, away = pricer.plan(stated), pricer.plan(stated.but(offload=True))
    assert usual and away and usual.cost and away.cost
    held = usual.cost.memory_bytes["optimizer"]
    assert held == pytest.approx(moments * 4 * PARAMS / 8, rel=1e-3)  # norms stay whole
    assert away.cost.step_time_s - usual.cost.step_time_s == pytest.approx(2 * held / (0.8 * 64e9), rel=1e-6)
    assert away.cost.optimizer_time_s - usual.cost.optimizer_time_s == pytest.approx(2 * held / (0.8 * 64e9), rel=1e-6)
    assert away.cost.memory_bytes["optimizer"] == 0
    assert usual.cost.memory_bytes["peak"] - away.cost.memory_bytes["peak"] == pytest.approx(held, rel=0.02)


def test_the_search_counts_them_as_the_plan_does() -> None:
    """The exact plan is proven; the tensors at its peak add up to it."""
    plan = searched(Request("llama-3-8b", cluster="1x8-h100", layers=LAYERS, mesh="2x4", offload=True))
    assert plan.optimal and plan.workload.offload is True and plan.cost
    held = tensors_at_peak(plan.blocks, load_plan_graph(plan), cost_model_of(plan))
    assert sum(h.total_bytes for h in held) == plan.cost.memory_bytes["peak"]
    assert not [h for h in held if h.kind == "optimizer" and h.num_bytes]


def test_it_makes_room_where_moments_are_what_does_not_fit() -> None:
    stated = Statement(parse_layout("fsdp=8"), recompute="full", seq=4096)
    pricer = Pricer("llama-3-8b", load_cluster("1x8-h100"), memory_gb=20)
    plan = pricer.plan(stated)
    assert plan and not plan.fits
    assert "the optimizer's moments in the host's memory" in [s.change for s in find_suggestions(pricer, stated, plan)]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="sgd keeps no states that the host could hold"):
        planned(Request("llama-3-8b", cluster="1x8-h100", optimizer="sgd", offload=True))
    cluster = load_cluster("1x8-h100")
    unknown = replace(cluster, gpu=replace(cluster.gpu, host=None)).to_json()
    with pytest.raises(InputError, match="does not say how fast its link to the host's memory is"):
        plan_model(Request("llama-3-8b", cluster=unknown, offload=True))


def test_every_gpu_that_comes_along_says_its_link() -> None:
    for name in gpu_names():
        host = load_gpu(name).host
        assert host is not None and 16e9 <= host.bytes_per_s <= 64e9 and 0 < host.efficiency < 1


def test_a_cluster_with_a_host_link_is_read_as_it_was_written() -> None:
    cluster = load_cluster("2x8-v100-eth")
    assert load_cluster(cluster.to_json()) == cluster and cluster.gpu.host is not None
