"""Each fault that was planted in planner and runtime is found by a check that docs/DESIGN.md names; some of these checks are here."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import planner_core as shardscope
import planner_core.runtime.program.setup as setup
from planner_core.core import Block, Graph, Op, Plan
from planner_core.cost import cost_model_of
from planner_core.cost.memory import walk
from planner_core.models import load_plan_graph
from planner_core.planning.request import Request
from planner_core.verification import numerics
from planner_core.verification.fake import group as fake_group
from tests.support.plans import planned
from tests.support.ranks import run_ranks

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "DESIGN.md"
FOUND_BY = dict(re.findall(r"^\| (.+) \| `(\S+\.py::\w+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))


def test_every_fault_has_a_check_that_exists() -> None:
    assert len(FOUND_BY) >= 15
    for fault, check in FOUND_BY.items():
        file, _, name = check.partition("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (fault, check)


@cache
def plan_of(model: str, which: str, layers: int) -> Plan:
    found = planned(Request(model, cluster="1x8-h100", mesh="8", layers=layers))
    return next(p for p in found.plans if p.name == which)


@cache
def measured() -> tuple[Plan, Graph, dict[str, Any]]:
    plan = plan_of("llama-3-8b", "Megatron-LM + sequence parallel", 2)
    (found,) = run_ranks(fake_group.run_fake_step, 1, (plan,), backend=None)
    return plan, load_plan_graph(plan), found


def test_what_is_not_planted_is_as_predicted() -> None:
    plan, graph, found = measured()
    report = fake_group._compare_with_plan(plan, found, graph)
    assert report["ok"] and report["order"]["events"] > 20, report


def test_bytes_that_the_price_gets_wrong_are_found() -> None:
    plan, graph, found = measured()
    first, *others = plan.cost.traffic
    wrong = replace(plan, cost=replace(plan.cost, traffic=(replace(first, wire_bytes=2 * first.wire_bytes), *others)))
    report = fake_group._compare_with_plan(wrong, found, graph)
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
    report = fake_group._compare_with_plan(replace(plan, cost=replace(plan.cost, memory_bytes=less)), found)
    assert report["collectives_ok"] and not report["ok"]
    assert report["memory_bytes"]["rel_error"] > 0.02


def _dealt_right_and_as_one(plan: Plan) -> list[dict[str, Any]]:
    """The second run deals fused weights as if q, k and v were one: what each rank stores is another part of them."""
    right = numerics.compare_step(plan, "float32")
    share = setup.local_shard
    setup.local_shard = lambda x, dim, size, rank, segments=None: share(x, dim, size, rank)  # type: ignore[assignment]
    try:
        return [right, numerics.compare_step(plan, "float32")]
    finally:
        setup.local_shard = share


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
    right, wrong = run_ranks(_dealt_right_and_as_one, 2, (small,))[0]
    assert numerics.is_within_tolerance(right), right["grad"]
    assert not numerics.is_within_tolerance(wrong), wrong["grad"]
