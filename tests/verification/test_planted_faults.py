"""Each fault that an audit planted in planner and runtime is found by a check that is named here.

A plan file, its prediction and its run share conventions; a fault in what they share is found only by a check that shares
nothing with it. So the table says which check that is, and a test that the check exists.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import planner_core as shardscope
import planner_core.runtime.program.setup as setup
from planner_core.core import Block, Graph, Op, Plan, plan_to_json
from planner_core.cost import cost_model_of
from planner_core.cost.memory import walk
from planner_core.models import graph_of
from planner_core.planning.request import Request
from planner_core.verification import fake_group, numerics
from planner_core.verification.processes import run_ranks
from tests.support.plans import planned

TESTS = Path(__file__).resolve().parents[1]
FOUND_BY = {
    "wire bytes of a collective that no ring sends": "cost/test_collectives.py::test_wire_bytes_are_what_a_ring_really_sends",
    "wire bytes that the price gets wrong": "verification/test_planted_faults.py::test_bytes_that_the_price_gets_wrong_are_found",
    "wrong seconds of a collective": "cost/test_measured.py::test_collectives_of_one_node_take_what_was_measured",
    "wrong seconds of a product": "cost/test_measured.py::test_products_take_what_was_measured",
    "no gradient sum, in plan and run alike": "verification/test_verify.py::test_planted_faults_are_found",
    "a saved tensor left out of the walk": "verification/test_planted_faults.py::test_a_saved_tensor_left_out_of_the_walk_is_found",
    "a rule that splits what softmax sums over": "ops/test_catalog.py::test_every_row_on_one_axis",
    "a fused weight dealt in the wrong order": "verification/test_planted_faults.py::test_a_fused_weight_dealt_in_the_wrong_order_is_found",
    "backward FLOPs halved": "ops/test_work.py::test_flops_are_those_that_torch_counts",
    "causal attention counted as a quarter": "ops/test_work.py::test_causal_attention_counts_half",
    "traffic that hides behind nothing": "cost/test_step.py::test_what_shows_adds_up_and_grows_with_contention",
    "a step faster than any published one": "cost/test_published.py::test_a_published_step_is_met",
    "collectives in another order": "verification/test_schedule.py::test_a_run_that_departs_from_the_schedule_is_caught",
}


@pytest.mark.parametrize("fault", FOUND_BY)
def test_the_check_that_finds_a_fault_exists(fault: str) -> None:
    file, _, name = FOUND_BY[fault].partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, FOUND_BY[fault]


@cache
def plan_of(model: str, which: str, layers: int) -> Plan:
    found = planned(Request(model, cluster="1x8-h100", mesh="8", layers=layers))
    return next(p for p in found.plans if p.name == which)


@cache
def measured() -> tuple[Plan, Graph, dict[str, Any]]:
    plan = plan_of("llama-3-8b", "Megatron-LM + sequence parallel", 2)
    (found,) = run_ranks(fake_group.fake_step, 1, (plan_to_json(plan),), backend=None)
    return plan, graph_of(plan), found


def test_what_is_not_planted_is_as_predicted() -> None:
    plan, graph, found = measured()
    report = fake_group._report(plan, found, graph)
    assert report["ok"] and report["order"]["events"] > 20, report


def test_bytes_that_the_price_gets_wrong_are_found() -> None:
    plan, graph, found = measured()
    first, *others = plan.cost.traffic
    wrong = replace(plan, cost=replace(plan.cost, traffic=(replace(first, wire_bytes=2 * first.wire_bytes), *others)))
    report = fake_group._report(wrong, found, graph)
    assert not report["ok"] and not report["collectives_ok"]


def without_saved(graph: Graph, fn: str) -> Graph:
    """The graph as the walk would see it if it forgot what one kind of operation keeps."""

    def block(b: Block) -> Block:
        return replace(b, items=tuple(replace(i, saved=()) if isinstance(i, Op) and i.fn == fn else i for i in b.items))

    return replace(graph, top=block(graph.top), blocks={n: block(b) for n, b in graph.blocks.items()})


def test_a_saved_tensor_left_out_of_the_walk_is_found() -> None:
    plan, graph, found = measured()
    model = cost_model_of(plan)
    assert walk(plan.blocks, graph, model).memory_bytes() == dict(plan.cost.memory_bytes)
    less = walk(plan.blocks, without_saved(graph, "mul"), model).memory_bytes()
    report = fake_group._report(replace(plan, cost=replace(plan.cost, memory_bytes=less)), found)
    assert report["collectives_ok"] and not report["ok"]
    assert report["memory_bytes"]["rel_error"] > 0.02


def _dealt_whole(plan: dict[str, Any]) -> dict[str, Any]:
    """Fused weights dealt as if q, k and v were one: what each rank stores is another part of them."""
    share = setup.own_share
    setup.own_share = lambda x, dim, size, rank, segments=None: share(x, dim, size, rank)  # type: ignore[assignment]
    return numerics.compare(plan, 0, "float32")


def test_a_fused_weight_dealt_in_the_wrong_order_is_found() -> None:
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "vocab_size": 256,
    }
    planned_here = shardscope.plan(config, cluster="1x8-h100:gpus=2", mesh="2", batch=8, seq=16, dtype="float32")
    small = next(p for p in planned_here.plans if p.name == "Megatron-LM")
    assert any(len(s) > 1 for b in small.blocks.values() for p in b.params.values() for s in p.segments.values())
    found = run_ranks(_dealt_whole, 2, (plan_to_json(small),))[0]
    assert not numerics.within(found), found["grad"]
