"""The search of pipeline stages: what a range of copies takes, where stages win, and that depth costs little."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner_core.core import InputError, Pipeline, Plan, StageCost, load_cluster
from planner_core.cost import (
    bound_s,
    cost_model,
    ops_at_the_ends,
    pipe_link,
    price_pipeline,
    price_stages,
    simulated_pipeline,
    stage_costs,
    stage_plans,
    step,
)
from planner_core.cost.memory import peak
from planner_core.cost.schedule.pipeline import price as stage_prices
from planner_core.cost.schedule.pipeline import timing
from planner_core.models import load_model
from planner_core.planning import FIRST_PASSES, add_stages, may_use_stages, plan_model, prepare_planner
from planner_core.planning.methods.layout import parse_layout
from planner_core.planning.pricing import Pricer, Statement
from planner_core.planning.request import Request
from planner_core.planning.stages import search_stages
from planner_core.planning.stages.cuts import find_best_cut, price_cut
from planner_core.planning.stages.degrees import PipelineDegrees
from planner_core.planning.stages.interleaved import find_interleaved_cut
from planner_core.planning.stages.pieces import RangeCosts, policy_from_plan
from planner_core.planning.stages.search import _StageSearch
from planner_core.search import make_block_plans, search_within_budget

SLOW = "8x8-h100:inter=12.5"


def request(model: str, cluster: str, batch: int, seq: int, **more: Any) -> Request:
    return Request(model, cluster=cluster, batch=batch, seq=seq, accumulate=1, recompute="auto", **more)


@pytest.fixture(scope="module")
def slow() -> tuple[Plan, float]:
    """Llama-3-70B on 8 nodes of slow Ethernet, and the bound of the search."""
    found = search_stages(prepare_planner(request("llama-3-70b", SLOW, 512, 4096)))
    assert found is not None
    return found.plan, found.bound


@pytest.mark.slow
def test_stages_win_on_slow_links(slow: tuple[Plan, float]) -> None:
    plan, bound = slow
    assert plan.fits and plan.pipeline is not None and plan.cost.pipeline is not None
    assert bound <= plan.cost.step_time_s
    assert plan.cost.pipeline.bound_s <= plan.cost.step_time_s <= 1.03 * plan.cost.pipeline.bound_s
    whole = search_stages(prepare_planner(request("llama-3-70b", SLOW, 512, 4096, zero=1)))
    assert whole is not None and plan.workload.zero > 1 == whole.plan.workload.zero
    assert plan.cost.step_time_s < 0.99 * whole.plan.cost.step_time_s  # gradients of 70 B weights fill the memory
    first = plan_model(replace(request("llama-3-70b", SLOW, 512, 4096), accumulate=None), passes=FIRST_PASSES)
    assert plan.cost.step_time_s < 0.8 * first.best.cost.step_time_s
    staged = add_stages(first).staged
    assert staged is not None and staged.cost.step_time_s == pytest.approx(plan.cost.step_time_s, rel=0.02)
    assert "where the best plan of one stage takes" in staged.notes[0].sentence


# Layout, micro-batches, and per cent of the step above its bound as measured.
BOUND_GAPS = {
    "gpt2-xl": [
        ("dp=2,tp=1,pp=8,zero=1", 8, 0.0),
        ("dp=4,tp=1,pp=4,schedule=gpipe", 16, 0.0),
        ("dp=4,tp=1,pp=4,vp=3,schedule=interleaved", 8, 0.0),
    ],
    "llama-3-8b": [
        ("dp=4,tp=2,pp=2,zero=1", 8, 0.0),
        ("dp=2,tp=1,pp=8,zero=1", 8, 0.0),
        ("dp=2,tp=2,pp=4,vp=2,zero=1", 8, 0.0),
        ("dp=2,tp=2,pp=4,schedule=zb", 16, 0.0),
        ("dp=4,tp=1,pp=4,schedule=gpipe", 8, 0.0),
        ("dp=4,tp=1,pp=4,schedule=gpipe", 16, 0.0),
        ("dp=4,tp=1,pp=4,vp=3,schedule=interleaved", 8, 0.0),
        ("dp=4,tp=1,pp=4,vp=3,schedule=interleaved", 16, 0.0),
    ],
    "mixtral-8x7b": [("dp=4,tp=1,pp=4,vp=2,schedule=zbv", 8, 0.0)],
    "t5-large": [
        ("dp=4,tp=2,pp=2,zero=1", 8, 0.0),
        ("dp=2,tp=1,pp=8,zero=1", 16, 0.0),
        ("dp=4,tp=1,pp=4,schedule=gpipe", 8, 0.0),
        ("dp=2,tp=2,pp=4,vp=2,zero=1", 8, 0.0),
        ("dp=2,tp=2,pp=4,schedule=zb", 8, 0.0),
    ],
}


def percent_above_bound(pricer: Pricer, layout: str, micro_batches: int) -> float:
    plan = pricer.plan(Statement(parse_layout(layout), 1, micro_batches, 1024))
    assert plan is not None and plan.cost.pipeline is not None
    return 100 * (plan.cost.step_time_s / plan.cost.pipeline.bound_s - 1)


@pytest.mark.parametrize(
    ("model", "layout", "micro_batches"),
    [
        # Of these 8 ranks the first two, the fourth and the last by themselves miss 5.6 %, for which the fifth waits alone.
        ("llama-3-8b", "tp=2,pp=8,vp=3", 8),
        # No rank by itself is within 1.7 %, and the first with the one that waits longest is not either.
        ("llama-3-8b", "dp=4,pp=4,vp=2,schedule=zbv", 8),
        # No rank but the seventh is within 6.1 %.
        ("t5-large", "dp=2,pp=8,vp=2,zero=1", 4),
    ],
)
def test_ranks_that_wait_for_slow_sends_and_for_each_other_are_in_the_bound(
    model: str, layout: str, micro_batches: int
) -> None:
    pricer = Pricer(model, load_cluster("2x8-h100:inter=5"))
    assert 0 <= percent_above_bound(pricer, layout, micro_batches) < 0.1


@pytest.mark.parametrize("model", BOUND_GAPS)
def test_a_step_is_as_far_above_its_bound_as_measured(model: str) -> None:
    pricer = Pricer(model, load_cluster("2x8-h100"))
    for layout, micro_batches, percent in BOUND_GAPS[model]:
        assert 0 <= percent_above_bound(pricer, layout, micro_batches) < percent + 0.1, (layout, micro_batches)


@pytest.mark.slow
def test_depth_costs_little() -> None:
    spent = []
    for layers in (32, 128):
        planner = prepare_planner(request("llama-3-8b", SLOW, 128, 2048, layers=layers))
        start = time.process_time()
        assert search_stages(planner) is not None
        spent.append(time.process_time() - start)
    assert spent[1] < 3 * spent[0] + 1


def test_a_range_takes_what_its_stage_takes() -> None:
    """Sums over pieces are the seconds of a stage that is priced as one."""
    asked = Request("llama-3-8b", cluster="2x8-h100", batch=32, seq=2048, accumulate=8, layers=8, zero=1)
    planner = prepare_planner(asked)
    d = PipelineDegrees(2, 1, 4, 2, 1, 8)
    problem = planner.problem(planner.cost_model(d.mesh, pipe=d.pipe), uniform=True)
    found = search_within_budget(problem, objective="time")
    assert found.assignment is not None
    blocks, ends = make_block_plans(problem, found.assignment), ops_at_the_ends(planner.coarse)
    model = cost_model(planner.cluster, d.mesh, planner.workload, d.pipe)
    costs = RangeCosts([policy_from_plan("one", blocks, planner.graph, model, ends, d.pipe)], 8, float("inf"))
    stages = stage_plans(blocks, planner.graph, Pipeline(2, "1f1b", (3, 5)))
    whole = stage_costs(stages, model, ends, pipe_link(planner.cluster, d.mesh, d.pipe))
    for (first, last), cost in zip(((0, 3), (3, 8)), whole, strict=True):
        own, _, _ = costs.best(first, last, 1) or (0.0, 0.0, None)
        mine = 8 * (cost.forward_s + cost.backward_s) + cost.first_s + cost.last_s + cost.step_s
        assert own == pytest.approx(mine, rel=0.02)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), pytest.param(4, 16, marks=pytest.mark.slow)])
def test_no_cut_is_better_where_embedding_and_head_are_tied(stages: int, micro_batches: int) -> None:
    """Against the price of every cut. Over slow Ethernet the sum of a tied embedding takes as long as several layers."""
    d = PipelineDegrees(stages, 1, 16 // stages, 1, 1, micro_batches, 1)
    samples = 16 // stages * micro_batches
    planner = prepare_planner(
        Request(
            "gpt2-xl",
            cluster="2x8-v100-eth",
            batch=samples,
            seq=512,
            accumulate=micro_batches,
            layers=12,
            dtype="float16",
            zero=1,
        )
    )
    problem, ends = (
        planner.problem(planner.cost_model(d.mesh, pipe=d.pipe), uniform=True),
        ops_at_the_ends(planner.coarse),
    )
    found = search_within_budget(problem, objective="time")
    assert found.assignment is not None
    blocks = make_block_plans(problem, found.assignment)
    model = cost_model(planner.cluster, d.mesh, planner.workload, d.pipe)

    def form_s(copies: tuple[int, ...]) -> float:
        """The form that the search minimises, of stages that are priced as they are."""
        pipeline = Pipeline(stages, "1f1b", copies)
        costs, _ = price_stages(stage_plans(blocks, planner.graph, pipeline), pipeline, model, ends)
        delay_s, longest_s = 0.0, 0.0
        for number, cost in enumerate(costs):
            each_s = cost.forward_s + cost.backward_s
            once_s = cost.last_s + cost.step_s + (0.0 if number else cost.first_s)
            longest_s = max(longest_s, delay_s + micro_batches * each_s + once_s)
            delay_s += each_s + 2 * cost.send_s
        return longest_s

    costs = RangeCosts(
        [policy_from_plan("one", blocks, planner.graph, model, ends, d.pipe)], micro_batches, float("inf")
    )
    cut = find_best_cut(d, costs, float("inf"))
    inner = itertools.combinations(range(1, 12), stages - 1)
    every = [tuple(b - a for a, b in itertools.pairwise((0, *places, 12))) for places in inner]
    assert cut is not None and form_s(cut[0]) <= 1.005 * min(map(form_s, every))


def test_stages_share_the_work_of_pricing_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of other numbers of copies walk and price the copy inside once, and a bound makes the orders of the ranks that it simulates."""
    run = Statement(parse_layout("dp=2,tp=1,pp=8,zero=1"), 1, 8, 1024, layers=13)
    pricer = Pricer("llama-3-8b", load_cluster("2x8-h100"))
    plan = pricer.plan(run)
    assert plan is not None and plan.pipeline is not None and plan.cost.pipeline is not None
    assert set(plan.pipeline.copies) == {1, 2} and len(plan.blocks) == 2
    planner, walked, priced, orders = pricer.planner(run), Counter[str](), Counter[str](), Counter[int]()
    walk, price, order = peak._simulate_copy, step.price_units, timing.work_columns
    monkeypatch.setattr(peak, "_simulate_copy", lambda label, *rest: walked.update([label]) or walk(label, *rest))
    monkeypatch.setattr(
        stage_prices, "price_units", lambda blocks, *a, **b: priced.update(list(blocks)) or price(blocks, *a, **b)
    )
    monkeypatch.setattr(timing, "work_columns", lambda p, rank, m: orders.update([rank]) or order(p, rank, m))
    stages = stage_plans(plan.blocks, planner.graph, plan.pipeline)
    model = cost_model(planner.cluster, plan.mesh, planner.workload, plan.pipeline.axis)
    costs, _ = price_stages(stages, plan.pipeline, model, ops_at_the_ends(planner.coarse))
    (label,) = (label for label in plan.blocks if label)
    assert costs == plan.cost.pipeline.stages
    assert walked[label] == priced[label] == 1 < priced[""]
    bound_s(plan.pipeline, costs, 8)
    assert 2 < len(orders) <= 7 and orders.total() == len(orders)


def test_an_interleaved_cut_is_refused_by_the_bound_of_its_price() -> None:
    """Sums over pieces give the bound that the price of the cut has, but for hosts, so a cut that is too slow is never priced."""
    asked = Request("llama-3-8b", cluster="2x8-h100", batch=32, seq=2048, accumulate=8, layers=8, zero=1)
    planner, d = prepare_planner(asked), PipelineDegrees(2, 2, 4, 2, 1, 8)
    problem = planner.problem(planner.cost_model(d.mesh, pipe=d.pipe), uniform=True)
    found = search_within_budget(problem, objective="time")
    assert found.assignment is not None
    blocks = make_block_plans(problem, found.assignment)
    model = cost_model(planner.cluster, d.mesh, planner.workload, d.pipe)
    policy = policy_from_plan("one", blocks, planner.graph, model, ops_at_the_ends(planner.coarse), d.pipe)
    costs = RangeCosts([policy], 8, float("inf"))
    cut = find_interleaved_cut(d, costs, float("inf"))
    assert cut is not None
    priced = price_cut(d, planner, [policy], cut)
    plan = priced.plan()
    price = plan.cost.pipeline
    assert price is not None
    assert priced.bound_s == pytest.approx(price.bound_s, rel=1e-12)  # the bound and the step are one, but for rounding
    assert priced.memory_bytes == plan.cost.memory_bytes
    assert plan.cost == price_pipeline(
        plan.blocks, planner.graph, priced.pipeline, model, ops_at_the_ends(planner.coarse)
    )
    assert plan.pipeline is not None
    ahead = [replace(c, host_forward_s=0.0, host_backward_s=0.0, host_step_s=0.0) for c in price.stages]
    seconds = bound_s(plan.pipeline, ahead, d.micro_batches)
    assert find_interleaved_cut(d, costs, 0.98 * seconds) is None
    assert find_interleaved_cut(d, costs, 1.02 * seconds) == cut


def test_policies_that_are_too_slow_by_themselves_are_not_priced() -> None:
    """Where even the bound of a policy is above the limit, its pieces are not priced for interleaved stages."""
    planner = prepare_planner(request("llama-3-8b", "2x8-h100", 16, 2048, layers=8))
    search, d = _StageSearch(planner, lambda text: None, None, None), PipelineDegrees(2, 2, 4, 2, 1, 4)
    unlimited = list(search.models.find_policies(d, float("inf")))
    assert unlimited
    least_s = d.micro_batches * min(float(p.micro_batch_s.sum()) for p in unlimited)
    limit = 0.9 * d.optimistic_s(least_s / d.micro_batches)
    assert list(search.models.find_policies(d, limit)) == []


def test_higher_stages_of_zero_are_searched_where_memory_lacks() -> None:
    """70 B weights, float32 gradients and states: 66 GB of 79 on each of 8 ranks; on each of 4 ranks 119 GB, or 53 GB under ZeRO-2."""
    search = _StageSearch(prepare_planner(request("llama-3-70b", SLOW, 512, 4096)), lambda text: None, None, None)
    search.micro_batches[1, 1, ""] = 1.0, 1e9
    degrees = [PipelineDegrees(8, 1, 8, 1, 1, 64), PipelineDegrees(4, 1, 16, 1, 1, 32)]
    assert [(d.ranks, d.zero) for _, d in search.estimate_degrees(degrees)] == [(8, 1), (4, 2)]
    search.micro_batches[1, 1, ""] = 1.0, 40e9
    assert [(d.ranks, d.zero) for _, d in search.estimate_degrees(degrees)] == [(8, 1), (8, 2), (4, 2), (4, 3)]
    below = _StageSearch(
        prepare_planner(request("llama-3-70b", SLOW, 512, 4096, zero=1)), lambda text: None, None, None
    )
    assert below.estimates.zero_stages == (1,)


def test_the_bound_of_any_cut() -> None:
    """Stages that all end at once: c, c (1 - 1/m), ... add up to S / m."""
    d = PipelineDegrees(4, 1, 8, 2, 1, 16)
    c = d.lower_bound_s(160.0) / 16
    assert sum(c * (1 - 1 / 16) ** r for r in range(4)) == pytest.approx(10.0)
    ends = [c * sum((1 - 1 / 16) ** s for s in range(r)) + 16 * c * (1 - 1 / 16) ** r for r in range(4)]
    assert np.ptp(ends) < 1e-9
    assert PipelineDegrees(4, 2, 8, 2, 1, 16).lower_bound_s(160.0) == 40.0


@pytest.mark.parametrize("micro_batches", [4, 16])
def test_the_stated_bound_holds_for_work_once_a_step(micro_batches: int) -> None:
    """Steps of random stages are never below the even shares of all of their work, and below the bound of micro-batches alone where the
    optimizer takes most."""
    rng, p, m = np.random.default_rng(micro_batches), 4, micro_batches
    d = PipelineDegrees(p, 1, 1, 1, 1, m)
    below = 0
    for once in (0.0, 0.1, 1.0, 100.0):
        for _ in range(8):
            stages = [
                StageCost(
                    *rng.uniform(0.1, 1.0, 2),
                    0.0,
                    0.0,
                    0.0,
                    once * rng.uniform(0.8, 1.0),
                    0.0,
                    send_bytes=0,
                    peak_bytes=0,
                )
                for _ in range(p)
            ]
            whole_s = sum(m * (s.forward_s + s.backward_s) + s.step_s for s in stages)
            step_s = simulated_pipeline(Pipeline(p, "1f1b", (1,) * p), stages, m).step_s
            assert step_s >= whole_s / p * (1 - 1e-9)
            below += step_s < d.lower_bound_s(whole_s)
            if not once:
                assert step_s >= d.lower_bound_s(whole_s) * (1 - 1e-9)
    assert below


@pytest.mark.slow  # tests/pages/test_one_answer.py finds stages of GPT-2 XL
@pytest.mark.parametrize("model", ["t5-large", "resnet50-100k"])
def test_other_models_are_cut(model: str) -> None:
    asked = Request(model, cluster="2x2-h100:inter=3", batch=64, accumulate=1)
    found = search_stages(prepare_planner(asked))
    assert found is not None and found.plan.pipeline is not None and found.plan.fits


def test_a_model_of_one_node_or_of_a_file_has_none() -> None:
    many, one = load_cluster("2x8-h100"), load_cluster("1x8-h100")
    asked = Request("gpt2-xl", accumulate=None)
    assert may_use_stages(asked, many) and not may_use_stages(asked, one)
    assert not may_use_stages(asked, many, load_model("gpt2-xl", layers=2))
    assert not may_use_stages(replace(asked, model="model.py:make"), many)
    with pytest.raises(InputError):
        prepare_planner(Request("no-such-model"))


LLAMA_405B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16384,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 53248,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
"""Llama-3.1-405B (Dubey et al. 2024, table 3)."""
MEGATRON: dict[str, Any] = {"stack": "megatron", "attention": "cudnn", "gradients": "float32"}


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [64, 2048])
def test_a_405b_model_on_its_published_layout(nodes: int, tmp_path: Path) -> None:
    """16 M tokens a step with TP 8 and PP 16, as published (table 4): it is priced, and no quicker than the plan that is found."""
    path, cluster = tmp_path / "config.json", f"4x8-h100:nodes={nodes},inter=400"
    path.write_text(json.dumps(LLAMA_405B))
    data, batch = nodes // 16, 2048
    pricer, stated = Pricer(str(path), load_cluster(cluster)), []
    for recompute, layout in (
        ("none", "pp=16"),
        ("full", "pp=16"),
        ("none", "pp=16,vp=7,schedule=interleaved"),
        ("full", "pp=16,vp=7,schedule=interleaved"),
    ):
        run = Statement(
            parse_layout(f"dp={data},tp=8,sp,{layout},zero=1"), 1, batch // data, 8192, recompute=recompute, **MEGATRON
        )
        plan = pricer.plan(run)
        assert plan is not None and plan.pipeline is not None
        stated.append((plan, pricer.speed(plan, run).mfu))
    found = search_stages(
        prepare_planner(
            Request(str(path), cluster=cluster, batch=batch, seq=8192, accumulate=1, recompute="auto", **MEGATRON)
        )
    )
    assert found is not None and found.plan.fits
    assert found.plan.cost.step_time_s <= min(plan.cost.step_time_s for plan, _ in stated if plan.fits)
    # On 2 048 nodes five numbers of stages a rank in a row are no quicker than 8.36 s, before the one that is.
    assert found.plan.cost.step_time_s < {64: 181.0, 2048: 7.8}[nodes]
    assert 0.3 < max(mfu for _, mfu in stated) < 0.5  # published: 38 to 43 %, on 8 and 16 thousand GPUs


def test_seven_layers_on_two_stages() -> None:
    found = search_stages(prepare_planner(request("llama-3-8b", "2x8-h100:inter=3", 64, 2048, layers=7)))
    assert found is not None and found.plan.pipeline is not None and found.plan.fits
    assert sum(found.plan.pipeline.copies) == 7
    cost = found.plan.cost
    assert cost.pipeline is not None
    assert cost.pipeline.bound_s <= cost.step_time_s <= 1.03 * cost.pipeline.bound_s
    stated = Statement(parse_layout("dp=4,tp=2,pp=2,zero=1"), 1, 16, 2048, layers=7)
    plan = Pricer("llama-3-8b", load_cluster("2x8-h100:inter=3")).plan(stated)
    assert plan is not None and plan.pipeline is not None and plan.pipeline.copies == (4, 3)
