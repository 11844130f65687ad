"""A plan's bound holds for the whole request: no layout that can be stated is better than it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner_core.core import NoPlanFits, divisors, load_cluster
from planner_core.planning import Request
from planner_core.planning.fitting.baselines import plan_baselines
from planner_core.planning.fitting.micro_batch_numbers import other_numbers
from planner_core.planning.fitting.micro_batches import choose_micro_batches
from planner_core.planning.methods import Layout
from planner_core.planning.pricing import Pricer, Statement
from planner_core.planning.session import candidate_meshes, prepare_planner
from planner_core.search import TIE

CLUSTERS = ("1x8-h100:gpus=4", "1x8-h100:gpus=6", "1x4-a100-pcie")
AMPLE_GB = 1000.0
POLICIES = ("none", "keep-matmuls", "selective", "keep-attention", "full")


@cache
def pricer(model: str, cluster: str, memory_gb: float) -> Pricer:
    return Pricer(model, load_cluster(cluster), memory_gb)


@st.composite
def requests(draw: st.DrawFn) -> tuple[Request, Statement]:
    """A small request, and a layout on one or two axes that the request admits."""
    cluster = draw(st.sampled_from(CLUSTERS))
    gpus = load_cluster(cluster).num_gpus
    batch = draw(st.sampled_from([6, 12, 18, 24, 30]))
    memory = draw(st.sampled_from([1.5, 2.0, 3.0, 6.0]))
    tensor = draw(st.sampled_from(divisors(gpus)))
    ranks = gpus // tensor
    layout = Layout(fsdp=ranks, tp=tensor) if draw(st.booleans()) else Layout(dp=ranks, tp=tensor)
    accumulate = draw(st.sampled_from(divisors(batch // ranks if batch % ranks == 0 else 1)))
    micro = batch // ranks // accumulate if batch % ranks == 0 else 0
    request = Request(
        "gpt2-xl",
        cluster=cluster,
        batch=batch,
        seq=256,
        layers=2,
        recompute="auto",
        accumulate=None,
        memory_gb=memory,
        zero=None,
    )
    stated = Statement(layout, micro, accumulate, seq=256, layers=2, recompute=draw(st.sampled_from(POLICIES)))
    return request, stated


@cache
def bound(request: Request) -> float | None:
    try:
        plan = choose_micro_batches(request, None, lambda text: None)[1]
    except NoPlanFits:
        return None
    return plan.bound if plan.fits else None


def check_bound(asked: tuple[Request, Statement]) -> None:
    request, stated = asked
    least = bound(request)
    if least is None or not stated.micro_batch:
        return
    assert isinstance(request.cluster, str) and request.memory_gb is not None
    plan = pricer(request.model, request.cluster, request.memory_gb).plan(stated)
    if plan is not None and plan.fits:
        assert plan.cost.step_time_s >= least * (1 - TIE)


@pytest.mark.parametrize("examples", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_no_stated_layout_is_better_than_the_bound(examples: int) -> None:
    settings(max_examples=examples)(given(requests())(check_bound))()


def check_refusal(asked: tuple[Request, Statement]) -> None:
    request, stated = asked
    assert isinstance(request.cluster, str)
    plan = pricer(request.model, request.cluster, AMPLE_GB).plan(stated) if stated.micro_batch else None
    if plan is not None:
        enough = math.ceil(plan.cost.memory_bytes["peak"] / 1e6) / 1e3
        found = choose_micro_batches(replace(request, memory_gb=enough), None, lambda text: None)[1]
        assert found.fits


@pytest.mark.parametrize("examples", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_nothing_fits_is_said_only_where_no_stated_layout_fits(examples: int) -> None:
    """In the memory that a stated layout takes, some plan fits."""
    settings(max_examples=examples)(given(requests())(check_refusal))()


def test_a_usual_layout_that_fits_nowhere_is_shown_at_its_least_memory() -> None:
    """No number of micro-batches, degree of tensor parallelism or recomputation of Megatron-LM takes less than its row says."""
    model, cluster, batch = "llama-3-8b", "1x8-h100:gpus=4", 8
    request = Request(model, cluster=cluster, batch=batch, seq=512, layers=2, recompute="none", memory_gb=5.0)
    planner = prepare_planner(replace(request, accumulate=1))
    larger = other_numbers(planner, None, lambda text: None, larger=True)
    rows = {p.method: p for p in plan_baselines(planner, candidate_meshes(request, planner.cluster), "auto", larger)}
    ample = pricer(model, cluster, AMPLE_GB)
    stated = [
        Statement(
            Layout(dp=4 // tp, tp=tp, zero=1), samples, batch * tp // 4 // samples, seq=512, layers=2, recompute=by
        )
        for tp in (2, 4)
        for samples in divisors(batch * tp // 4)
        for by in POLICIES
    ]
    peaks = [plan.cost.memory_bytes["peak"] for one in stated if (plan := ample.plan(one))]
    row = rows["megatron"]
    assert len(peaks) == len(stated)
    assert not row.fits and row.bound is None and not row.optimal
    assert row.cost.memory_bytes["peak"] <= min(peaks) * 1.01 < max(peaks)


@pytest.mark.slow
def test_a_number_between_the_steps_is_not_passed_over() -> None:
    """240 samples on 48 GPUs: five micro-batches deal 48 samples out at once, and 1, 2, 4, 8, 16, 48 and 240 do not."""
    cluster = "1x8-h200:nodes=6,inter=400"
    request = Request("llama-3-70b", cluster=cluster, batch=240, seq=4096, recompute="auto", accumulate=None)
    plan = choose_micro_batches(request, None, lambda text: None)[1]
    stated = (Statement(Layout(fsdp=48), 1, 5, seq=4096, recompute=policy) for policy in POLICIES)
    priced = [
        found for one in stated if (found := Pricer("llama-3-70b", load_cluster(cluster)).plan(one)) and found.fits
    ]
    assert priced and plan.bound is not None
    assert plan.bound <= plan.cost.step_time_s <= min(p.cost.step_time_s for p in priced) * (1 + TIE)
