"""Baselines whose program recomputes all blocks or none have rows that it runs, and none of its uniform settings is faster; and for which
baselines and meshes networks are built."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from planner_core.core import Block, DeviceMesh, Plan, load_cluster, parse_mesh
from planner_core.cost import micro_batch
from planner_core.planning import Request, plan_model
from planner_core.planning.fitting.baselines import find_faster_baseline, plan_baselines
from planner_core.planning.fitting.baselines.search import MAX_SHOWN_MEMORY_RATIO, MAX_SHOWN_PEAK_RATIO
from planner_core.planning.fitting.micro_batch_numbers import MicroBatchNumbers
from planner_core.planning.methods import BASELINES, Layout, parse_layout, restrictions
from planner_core.planning.pipeline import FIRST_PASSES
from planner_core.planning.planner import Planner, candidate_meshes, prepare_planner
from planner_core.planning.pricing import Pricer, Statement
from planner_core.search.network import SampleDims

ONE_SWITCH = ("megatron", "megatron-sp")
CLUSTER, MEMORY_GB, LAYERS = "1x8-h100:gpu=a100-40gb-sxm", 14.0, 6


def rows(memory_gb: float = MEMORY_GB, **changes: object) -> dict[str, Plan]:
    asked = Request("llama-3-8b", cluster=CLUSTER, memory_gb=memory_gb, layers=LAYERS, recompute="auto", **changes)  # type: ignore[arg-type]
    return {p.method: p for p in plan_model(asked, passes={"baselines": FIRST_PASSES["baselines"]}).plans}


@pytest.mark.slow
def test_megatrons_rows_run_under_its_switch_and_none_is_faster() -> None:
    """The rows once mixed recomputation by block. Without mixtures more micro-batches may do what recomputation did."""
    seq, found = 4096, rows(batch=64, seq=4096, accumulate=None)
    pricer = Pricer("llama-3-8b", load_cluster(CLUSTER), MEMORY_GB)
    for method in ONE_SWITCH:
        row = found[method]
        policies = {b.recompute for label, b in row.blocks.items() if label}
        assert row.fits and policies <= {"none", "full"} and len(policies) == 1
        for tensor, micro, recompute in product((2, 4, 8), (1, 2, 4), ("none", "full")):
            ranks = 8 // tensor
            layout = Layout(dp=ranks, tp=tensor, sp=method == "megatron-sp", zero=1 if ranks > 1 else 0)
            number = 64 // (ranks * micro)
            stated = Statement(layout, micro, number, seq=seq, layers=LAYERS, recompute=recompute)
            plan = pricer.plan(stated)
            assert plan is not None
            assert not plan.fits or plan.cost.step_time_s >= row.cost.step_time_s * (1 - 1e-6), stated


@pytest.mark.slow  # test_doubt.py shows a row of FSDP that mixes, and one of Megatron-LM that does not
def test_rows_of_other_baselines_may_mix() -> None:
    """The exported script runs any mixture, so FSDP has one where that fits and is faster."""
    found = rows(batch=64, seq=4096, accumulate=8)
    assert len({b.recompute for label, b in found["fsdp"].blocks.items() if label}) > 1
    assert all(found[method].workload.recompute in ("none", "full") for method in ONE_SWITCH)


def test_a_switch_that_cannot_win_has_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the fastest mesh fits as it is, recomputation could only be slower; no network of it was needed to see that."""
    built, costs = [], Planner.cost_model

    def spy(planner: Planner, *args: Any, **named: Any) -> Any:
        # Costs of runs as tools start them are those of a network that is built next.
        if named.get("usual") and planner.workload.recompute in ("none", "full"):
            built.append(planner.workload.recompute)
        return costs(planner, *args, **named)

    monkeypatch.setattr(Planner, "cost_model", spy)
    asked = Request("llama-3-8b", CLUSTER, batch=64, seq=4096, layers=LAYERS, memory_gb=40, accumulate=8)
    planner = prepare_planner(asked)
    meshes, switched = candidate_meshes(asked, planner.cluster), {method: BASELINES[method] for method in ONE_SWITCH}
    found = plan_baselines(planner, meshes, "auto", baselines=switched)
    assert [p.workload.recompute for p in found] == ["none"] * len(ONE_SWITCH)
    assert "none" in built and "full" not in built


def test_a_mesh_whose_data_ranks_lack_samples_has_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four samples cannot be dealt out to eight data ranks; half of the networks of small requests were built to see that."""
    built, build = [], Planner.problem

    def spy(planner: Planner, mesh: Any, *args: Any, **named: Any) -> Any:
        built.append(build(planner, mesh, *args, **named))
        return built[-1]

    planner = prepare_planner(Request("llama-3-8b", "1x8-h100", batch=4, layers=2))
    monkeypatch.setattr(Planner, "problem", spy)
    plans = plan_baselines(planner, candidate_meshes(planner.request, planner.cluster))
    assert {p.method for p in plans} >= set(ONE_SWITCH)
    assert built and not any(problem.is_infeasible for problem in built)


def test_baselines_on_one_mesh_share_where_samples_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layout and baseline sought the dims of the samples anew, which depend on the mesh alone."""
    sought, find = [], restrictions.find_sample_dims

    def spy(block: Block, *args: Any) -> SampleDims:
        sought.append(block.name)
        return find(block, *args)

    planner = prepare_planner(Request("llama-3-8b", "1x8-h100", batch=8, layers=2))
    monkeypatch.setattr(restrictions, "find_sample_dims", spy)
    plans = plan_baselines(planner, [parse_mesh("4x2", 8)])
    assert len(plans) > len(ONE_SWITCH)  # of two ZeRO stages
    assert sorted(sought) == sorted({block.name for block in planner.graph.all_blocks})


def test_the_fastest_baseline_is_the_fastest_row_that_fits() -> None:
    asked = Request("llama-3-8b", "1x8-h100", batch=8, layers=2)
    planner = prepare_planner(asked)
    meshes = candidate_meshes(asked, planner.cluster)
    row = min(plan_baselines(planner, meshes), key=lambda p: p.cost.step_time_s)
    step_s = row.cost.step_time_s
    assert row.fits
    faster = find_faster_baseline(planner, meshes, BASELINES, step_s * 1.01)
    assert faster is not None and (faster.method, faster.cost) == (row.method, row.cost)
    assert find_faster_baseline(planner, meshes, BASELINES, step_s) is None
    # the same rows in memory that none of them fits
    small = prepare_planner(Request("llama-3-8b", "1x8-h100", batch=8, layers=2, memory_gb=1))
    assert plan_baselines(small, meshes) and find_faster_baseline(small, meshes, BASELINES, step_s * 100) is None


@pytest.mark.parametrize(("method", "layout"), [("megatron", "tp=4"), ("megatron-sp", "tp=4,sp")])
def test_a_row_that_does_not_fit_is_shown_near_its_least_memory(method: str, layout: str) -> None:
    """Its weights and states alone do not fit, and it was shown with the micro-batches of the chosen plan: up to twice its least memory."""
    asked = Request("llama-3-8b", "1x4-h100", batch=16, seq=4096, layers=2, recompute="none", memory_gb=6, accumulate=1)
    planner = prepare_planner(asked)
    numbers = MicroBatchNumbers(planner, None, lambda text: None, several=True)
    meshes = candidate_meshes(asked, planner.cluster)
    (row,) = plan_baselines(planner, meshes, "auto", numbers, baselines={method: BASELINES[method]})
    stated = Statement(parse_layout(layout), 1, 16, seq=4096, layers=2, recompute="full")
    least = Pricer("llama-3-8b", planner.cluster, 6).plan(stated)
    assert least is not None and not row.fits
    assert row.cost.memory_bytes["peak"] <= MAX_SHOWN_MEMORY_RATIO * least.cost.memory_bytes["peak"]


@pytest.mark.parametrize(("model", "memory_gb"), [("llama-3-8b", 3), ("llama-3-8b", 5), ("gpt2-xl", 1)])
@pytest.mark.parametrize(("method", "layout"), [("data-parallel", "dp=8"), ("fsdp", "fsdp=8")])
def test_a_row_of_more_data_ranks_than_samples_at_once_is_shown_near_its_least_memory(
    model: str, memory_gb: float, method: str, layout: str
) -> None:
    """The chosen plan computes 4 samples at once, which 8 ranks cannot share. Only one micro-batch was looked at: FSDP of Qwen2-7B in 20 GB
    was shown at 79 GiB, where 8 micro-batches take 23.5."""
    asked = Request(model, "1x8-h100", batch=64, seq=1024, layers=2, recompute="auto", memory_gb=memory_gb)
    planner = prepare_planner(replace(asked, accumulate=16))
    numbers = MicroBatchNumbers(planner, None, lambda text: None, several=True)
    meshes = candidate_meshes(asked, planner.cluster)
    (row,) = plan_baselines(planner, meshes, "auto", numbers, baselines={method: BASELINES[method]})
    stated = Statement(parse_layout(layout), 1, 8, seq=1024, layers=2, recompute="full")
    least = Pricer(model, planner.cluster, memory_gb).plan(stated)
    assert least is not None and least.fits == row.fits
    assert row.fits or row.cost.memory_bytes["peak"] <= MAX_SHOWN_PEAK_RATIO * least.cost.memory_bytes["peak"]


@pytest.mark.parametrize(("method", "tokens", "size", "number"), [("megatron", "", 1, 8), ("megatron-sp", ",sp", 8, 1)])
def test_a_row_that_does_not_fit_is_the_run_that_it_is_named_after(
    method: str, tokens: str, size: int, number: int
) -> None:
    """Megatron-LM with sequence parallelism takes 39 GiB for Llama-3-70B in one micro-batch, whose gradients are not accumulated. Where the
    chosen plan had eight, 65 were shown. And the row of ZeRO-1 kept the optimizer states of k_proj and v_proj whole."""
    layers = 32
    asked = Request("llama-3-70b", "8x8-h100", batch=64, seq=4096, layers=layers, memory_gb=5, accumulate=8)
    planner = prepare_planner(asked)
    numbers = MicroBatchNumbers(planner, None, lambda text: None, several=True)
    mesh = DeviceMesh(("outer", "inner"), (8, 8))
    (row,) = plan_baselines(planner, [mesh], "full", numbers, baselines={method: BASELINES[method]})
    stated = Statement(
        parse_layout(f"dp=8,tp=8{tokens},zero=1"), size, number, seq=4096, layers=layers, recompute="full"
    )
    run = Pricer("llama-3-70b", planner.cluster, 5).plan(stated)
    assert run is not None and not row.fits
    assert (micro_batch(row), row.workload.accumulate) == (size, number)
    assert row.cost.memory_bytes["peak"] == pytest.approx(run.cost.memory_bytes["peak"], rel=1e-3)
    assert row.cost.step_time_s == pytest.approx(run.cost.step_time_s, rel=0.01)
