"""Weights that are not trained are sharded, gathered for their own unit, freed after forward and gathered again where backward reads them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import planner_core as shardscope
from planner_core.core import Graph, Plan
from planner_core.cost import unit_starts
from planner_core.models import load_plan_graph
from planner_core.verification import verify
from planner_core.verification.fake.group import verify_fake_all
from tests.support.case_files.frozen_weights import LAYERS, WIDE

FILE = Path(__file__).parents[1] / "support/case_files/frozen_weights.py"


@cache
def priced(name: str, layout: str, **more: Any) -> tuple[Plan, Graph]:
    cluster = "1x8-h100:gpus=2" if layout in ("fsdp=2", "dp=2") else "1x8-h100"
    plan = shardscope.price(f"{FILE}:{name}", cluster=cluster, layout=layout, advise=False, **more).plan
    assert plan is not None
    return plan, load_plan_graph(plan)


def run_on_fake_ranks(plan: Plan, graph: Graph) -> dict[str, Any]:
    (report,) = verify_fake_all([plan], graphs=[graph])
    assert report["ok"], (report["memory_bytes"], report["order"])
    assert report["order"]["ok"]
    return report


def test_a_frozen_backbone_gathers_a_layer_at_a_time() -> None:
    """An eighth of four layers, one layer that runs, and the next one with what this rank sends of it. Not four layers at once."""
    plan, graph = priced("backbone", "fsdp=8")
    report = run_on_fake_ranks(plan, graph)
    layer = 2 * WIDE**2
    assert report["memory_bytes"]["measured"] == pytest.approx(4 * layer / 8 + 2 * layer + layer / 8, rel=0.01)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("fsdp=8", {"recompute": "full"}),
        ("dp=2,fsdp=4", {}),
        pytest.param("fsdp=8", {}, marks=pytest.mark.slow),
        pytest.param("fsdp=8", {"accumulate": 2}, marks=pytest.mark.slow),
    ],
)
def test_frozen_weights_beside_adapters_are_gathered_again_for_backward(layout: str, more: dict[str, Any]) -> None:
    """A run that keeps them gathered from forward to backward holds every frozen weight whole, which the price does not say."""
    plan, graph = priced("adapters", layout, **more)
    backward = run_on_fake_ranks(plan, graph)["collectives"]["measured"]["backward"]["all_gather"]
    # Two weights of 64 x 64 in float32 a layer. Backward does not read the first one, since the model's input needs no gradient.
    assert backward["bytes"] >= more.get("accumulate", 1) * 4 * (2 * LAYERS - 1) * 64 * 64


@pytest.mark.parametrize("layout", ["fsdp=2", pytest.param("dp=2", marks=pytest.mark.slow)])
def test_ranks_compute_what_one_process_does(layout: str) -> None:
    report = verify(priced("adapters", layout)[0])
    assert report["ok"], report


def test_small_parts_are_no_units_of_their_own() -> None:
    million = 10**6
    table, bias, layer = {0: 525 * million}, {1: 1}, {2: 218 * million}
    assert unit_starts([table, {}, layer, bias]) == [0, 2]
    assert unit_starts([table, {3: 25 * million}]) == [0]
    assert unit_starts([table, {}, table]) == [0]
