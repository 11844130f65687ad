"""The search of pipeline stages: what a range of copies takes, where stages win, and that depth costs little."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from planner_core.core import InputError, Pipeline, Plan
from planner_core.cost import cost_model, ops_at_the_ends, pipe_link, stage_costs, stage_plans
from planner_core.planning import plan_model, prepare, with_stages
from planner_core.planning.request import Request
from planner_core.planning.stages import best_with_stages
from planner_core.planning.stages.pieces import Ranges, way_of
from planner_core.planning.stages.search import Degrees
from planner_core.search import assemble, search

SLOW = "8x8-h100:inter=12.5"


def request(model: str, cluster: str, batch: int, seq: int, **more: object) -> Request:
    return Request(model, cluster=cluster, batch=batch, seq=seq, accumulate=1, recompute="auto", **more)


@pytest.fixture(scope="module")
def slow() -> tuple[Plan, float]:
    """Llama-3-70B on 8 nodes of slow Ethernet, and the bound of the search."""
    found = best_with_stages(prepare(request("llama-3-70b", SLOW, 512, 4096)))
    assert found is not None
    return found.plan, found.bound


@pytest.mark.slow
def test_stages_win_on_slow_links(slow: tuple[Plan, float]) -> None:
    plan, bound = slow
    assert plan.fits and plan.pipeline is not None and plan.cost.pipeline is not None
    assert bound <= plan.cost.step_time_s
    one = plan_model(replace(request("llama-3-70b", SLOW, 512, 4096), accumulate=None)).best
    assert plan.cost.step_time_s < 0.8 * one.cost.step_time_s
    staged = with_stages(replace(request("llama-3-70b", SLOW, 512, 4096), accumulate=None), one)
    assert staged is not None and staged.plan.cost.step_time_s == pytest.approx(plan.cost.step_time_s, rel=0.02)
    assert "where the best plan of one stage takes" in staged.plan.notes[0]


def test_the_closed_form_is_close(slow: tuple[Plan, float]) -> None:
    cost = slow[0].cost
    assert cost.pipeline is not None
    assert cost.pipeline.bound_s <= cost.step_time_s <= 1.03 * cost.pipeline.bound_s


@pytest.mark.slow
def test_depth_costs_little() -> None:
    spent = []
    for layers in (32, 128):
        planner = prepare(request("llama-3-8b", SLOW, 128, 2048, layers=layers))
        start = time.process_time()
        assert best_with_stages(planner) is not None
        spent.append(time.process_time() - start)
    assert spent[1] < 3 * spent[0] + 1


def test_a_range_takes_what_its_stage_takes() -> None:
    """Sums over pieces are the seconds of a stage that is priced as one."""
    asked = Request("llama-3-8b", cluster="2x8-h100", batch=32, seq=2048, accumulate=8, layers=8, zero=1)
    planner = prepare(asked)
    d = Degrees(2, 1, 4, 2, 1, 8)
    problem = planner.problem(d.mesh, uniform=True, ranks=2)
    found = search(problem, objective="time")
    assert found.assignment is not None
    blocks, ends = assemble(problem, found.assignment), ops_at_the_ends(planner.coarse)
    model = cost_model(planner.cluster, d.mesh, planner.workload, 2)
    ranges = Ranges([way_of("one", blocks, planner.graph, model, ends, 2)], 8, float("inf"))
    stages = stage_plans(blocks, planner.graph, Pipeline(2, "1f1b", (3, 5)))
    whole = stage_costs(stages, model, ends, pipe_link(planner.cluster, d.mesh, 2))
    for (first, last), cost in zip(((0, 3), (3, 8)), whole, strict=True):
        own, _, _ = ranges.best(first, last, 1) or (0.0, 0.0, None)
        mine = 8 * (cost.forward_s + cost.backward_s) + cost.first_s + cost.last_s + cost.step_s
        assert own == pytest.approx(mine, rel=0.02)


def test_the_bound_of_any_cut() -> None:
    """Stages that all end at once: c, c (1 - 1/m), ... add up to S / m."""
    d = Degrees(4, 1, 8, 2, 1, 16)
    c = d.least(160.0) / 16
    assert sum(c * (1 - 1 / 16) ** r for r in range(4)) == pytest.approx(10.0)
    ends = [c * sum((1 - 1 / 16) ** s for s in range(r)) + 16 * c * (1 - 1 / 16) ** r for r in range(4)]
    assert np.ptp(ends) < 1e-9
    assert Degrees(4, 2, 8, 2, 1, 16).least(160.0) == 40.0


@pytest.mark.parametrize("model", ["t5-large", "resnet50-100k"])
def test_other_models_are_cut(model: str) -> None:
    asked = Request(model, cluster="2x8-h100:inter=3", batch=256, accumulate=1, recompute="auto")
    found = best_with_stages(prepare(asked))
    assert found is not None and found.plan.pipeline is not None and found.plan.fits


def test_a_model_of_one_node_or_of_a_file_has_none() -> None:
    whole = plan_model(Request("gpt2-xl", cluster="1x8-h100", layers=2)).best
    assert with_stages(Request("gpt2-xl", cluster="1x8-h100", layers=2, accumulate=None), whole) is None
    with pytest.raises(InputError):
        prepare(Request("no-such-model"))
