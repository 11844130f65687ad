"""A router that is unfair by a stated factor: what is dealt out over GPUs takes longer, and the plan may change."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner_core as shardscope
from planner_core.core import InputError, Shard, Workload, load_cluster, plan_from_json, plan_to_json
from planner_core.cost.communication import collective_time
from planner_core.cost.compute import kernel_seconds
from planner_core.cost.model import cost_model_of
from planner_core.ops import rows
from planner_core.planning.methods import parse_layout
from planner_core.planning.pipeline import Result
from planner_core.planning.pricing import Pricer, Statement
from planner_core.planning.request import Request
from tests.support.plans import planned


def mixtral(load: float) -> Result:
    asked = Request("mixtral-8x7b", cluster="1x8-h100", batch=8, mesh="8", layers=2, recompute="full")
    return planned(replace(asked, expert_imbalance=load), "baselines", "notes")


def test_only_what_is_dealt_out_takes_longer() -> None:
    """Kernels of the experts, and the all_to_alls; not the gather of the router's choices, which all GPUs send alike."""
    found = mixtral(1.0)
    block = found.graph.blocks["MixtralDecoderLayer"]
    op = next(o for o in block.ops if o.fn == "moe_experts")
    even = cost_model_of(found.plans[0])
    uneven = replace(even, workload=replace(even.workload, expert_imbalance=2.0))
    for row in rows(op, block.values):
        factor = 2.0 if row.name in ("experts", "dispatch") else 1.0
        assert kernel_seconds(op, block.values, [row], uneven) == pytest.approx(
            [factor * s for s in kernel_seconds(op, block.values, [row], even)]
        )


def test_the_plan_is_priced_as_it_was_searched() -> None:
    """The same plan at two loads: each all_to_all of dealt-out tokens takes as long as one of so many times the bytes."""
    fair, unfair = mixtral(1.0).plans[0], mixtral(1.02).plans[0]
    assert fair.optimal and unfair.optimal and fair.blocks == unfair.blocks
    site = next(s for b in fair.blocks.values() for n, s in b.sites.items() if n.endswith("moe_experts"))
    assert site.inputs[0].dst.forward == site.inputs[3].dst.forward == (Shard(0),), "tokens and experts are dealt out"
    assert fair.cost.collectives() == unfair.cost.collectives(), "bytes are those of all GPUs together"
    assert fair.cost.compute_time_s < unfair.cost.compute_time_s < 1.02 * fair.cost.compute_time_s
    link = cost_model_of(fair).links[0]
    (there,) = (t for t in fair.cost.traffic if (t.phase, t.kind) == ("forward", "all_to_all"))
    (then,) = (t for t in unfair.cost.traffic if (t.phase, t.kind) == ("forward", "all_to_all"))
    # Tokens x 2 copies x 4096 numbers of 2 bytes; there and back in two layers.
    each, times = (
        8 * 4096 * 2 * 4096 * 2,
        2 * 2,
    )
    more = collective_time("all_to_all", 1.02 * each, link)[0] - collective_time("all_to_all", each, link)[0]
    assert then.time_s - there.time_s == pytest.approx(times * more)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_fullest_keeps_as_many_times_the_tensors_of_its_experts(recompute: str) -> None:
    """Copies of tokens, what gate and up make of them, the activation's two tensors, and the results: 4096 and 14 336 wide, 2 bytes."""
    pricer = Pricer("mixtral-8x7b", load_cluster("1x8-h100"))
    run = Statement(parse_layout("fsdp=8,ep=8"), seq=4096, layers=2, recompute=recompute)
    planner = pricer.planner(run)
    peaks = {}
    for load in (1.0, 1.5, 2.0):
        uneven = planner.changed(workload=replace(planner.workload, expert_imbalance=load))
        plan = uneven.of_layout(run.layout)
        assert plan is not None
        peaks[load] = plan.cost.memory_bytes["peak"]
        problem = uneven.of_space(run.layout.space())
        answer = uneven.solve(problem, "time")
        assert plan.cost.step_time_s == pytest.approx(answer.value, rel=1e-5)
    copies = 8 * 4096 * 2 // 8
    kept = copies * (4096 + 2 * 14336 + 2 * 14336 + 4096) * 2
    blocks = 2 if recompute == "none" else 1
    for load in (1.5, 2.0):
        assert peaks[load] - peaks[1.0] == pytest.approx((load - 1) * blocks * kept, rel=0.1)


def test_a_stated_run_takes_the_factor_too() -> None:
    """Also as the capacity to which experts are padded; where none are dealt out it changes nothing."""
    times = {}
    for layout, factor in (("fsdp=8,ep=8", 1.0), ("fsdp=8,ep=8", 1.25), ("fsdp=8", 1.0), ("fsdp=8", 1.25)):
        priced = shardscope.price(
            "mixtral-8x7b", cluster="1x8-h100", layout=layout, seq=2048, layers=2, advise=False, expert_imbalance=factor
        )
        assert priced.plan is not None
        assert any("1.25 times the mean" in note for note in priced.notes) == (factor > 1)
        times[layout, factor] = priced.plan.cost.step_time_s
    assert times["fsdp=8,ep=8", 1.25] > times["fsdp=8,ep=8", 1.0]
    assert times["fsdp=8", 1.25] == times["fsdp=8", 1.0]


def test_more_imbalance_never_makes_the_best_plan_faster() -> None:
    times = [mixtral(load).plans[0].cost.step_time_s for load in (1.0, 1.5, 8.0)]
    assert times == sorted(times)


def test_it_is_said_and_kept() -> None:
    found = mixtral(1.5)
    assert any("1.5 times the mean" in note.sentence for note in found.notes)
    assert not any("the mean" in note.sentence for note in mixtral(1.0).notes)
    assert plan_from_json(plan_to_json(found.plans[0])).workload.expert_imbalance == 1.5
    assert "expert_imbalance" not in plan_to_json(mixtral(1.0).plans[0])["workload"]


@pytest.mark.parametrize("load", [0.5, -1.0, 1e6, float("nan")])
def test_an_impossible_load_is_refused(load: float) -> None:
    with pytest.raises(InputError, match=r"expert_imbalance=.* is not between 1 and 1000"):
        Workload(1, 1, expert_imbalance=load).check()
