"""Blocks that run again in backward from what a policy keeps: the same numbers and traffic, and nothing kept is made twice."""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import planner_core as shardscope
from planner_core.core import RECOMPUTE, Plan
from planner_core.models import capture_graph
from planner_core.planning.pipeline import PASSES, plan_model
from planner_core.planning.request import Request
from planner_core.runtime.library import applied
from planner_core.verification.numerics import verify_all
from tests.support import own_model
from tests.support.own_model import OwnGPT
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_config

POLICIES = RECOMPUTE[1:]
TWO = "1x8-h100:gpus=2"


@cache
def megatron(policy: str) -> Plan:
    """The plan of two tensor-parallel ranks."""
    options: dict[str, Any] = {"cluster": TWO, "layout": "tp=2", "recompute": policy, "advise": False}
    plan = shardscope.price(OwnGPT(), inputs=own_model.batch(0), **options).plan
    assert plan is not None
    return plan


EVERY = [
    (policy, name) for policy in POLICIES[1:] for name in ("FSDP", "Megatron-LM", "Megatron-LM + sequence parallel")
]
SOME = [("keep-matmuls", "Megatron-LM"), ("selective", "Megatron-LM + sequence parallel"), ("keep-attention", "FSDP")]
SLOW = [pytest.param(name, EVERY, id=f"{name}-all", marks=pytest.mark.slow) for name in ("llama", "t5", "gpt2")]


@pytest.mark.parametrize(("name", "ways"), [pytest.param("llama", SOME, id="llama"), *SLOW])
def test_numbers_and_traffic_are_as_without(name: str, ways: list[tuple[str, str]]) -> None:
    """Loss, every gradient and a step of AdamW against one process; kinds, counts and bytes of collectives as predicted."""
    graph, chosen = capture_graph(tiny_config(name), batch=8, seq=16, dtype="float32"), []
    baselines = {"baselines": PASSES["baselines"]}
    for policy, layout in ways:
        request = Request(name, cluster=TWO, mesh="2", batch=8, seq=16, dtype="float32", recompute=policy)
        chosen.append(next(p for p in plan_model(request, graph=graph, passes=baselines).plans if p.name == layout))
    for (policy, layout), plan, found in zip(ways, chosen, verify_all(chosen), strict=True):
        assert {b.recompute for label, b in plan.blocks.items() if label} == {policy}
        assert found["ok"], (policy, layout, found["loss"], found["grad"], found["collectives"])


@pytest.mark.slow
def test_what_is_kept_is_not_sent_again() -> None:
    """Megatron's two sums in a block: behind attention and behind the perceptron, where nothing runs again."""
    sums = {p: megatron(p).cost.collectives()["backward"]["all_reduce"]["count"] for p in POLICIES}
    assert sums["keep-matmuls"] == sums["none"]
    assert sums["full"] == sums["keep-attention"] == sums["none"] + 2, "one in each of two blocks"


class Calls(TorchDispatchMode):
    """Counts kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


PRODUCTS = ("mm", "addmm", "bmm")


def _calls(files: dict[str, str]) -> dict[str, Any]:
    """For each plan: how often kernels ran in a step, the code, and how far gradients are from those of the first plan."""
    found: dict[str, Any] = {}
    wanted: dict[str, torch.Tensor] = {}
    for name, file in files.items():
        model = shardscope.apply(OwnGPT(), shardscope.load_plan(file))
        with Calls() as calls:
            model(*own_model.batch(0), global_batch=True).backward()
        grads = {n: _whole(p.grad) for n, p in model.named_parameters()}
        wanted = wanted or grads
        found[name] = {
            "products": sum(calls.count[p] for p in PRODUCTS),
            "attention": sum(n for f, n in calls.count.items() if f.startswith("_scaled_dot") and "backward" not in f),
            "norms": calls.count["native_layer_norm"],
            "error": max(float((g - wanted[n]).abs().max() / wanted[n].abs().max()) for n, g in grads.items()),
            "code": next(iter(applied(model).programs.values())).program.source,
        }
    return found


def _whole(gradient: Any) -> torch.Tensor:
    with contextlib.suppress(AttributeError):
        gradient = gradient.full_tensor()
    return gradient.detach()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, files = tmp_path_factory.mktemp("plans"), {}
    for policy in POLICIES:
        files[policy] = str(folder / policy)
        shardscope.save_plan(megatron(policy), files[policy])
    return dict(run_ranks(_calls, 2, (files,))[0])


def test_kernels_run_again_that_the_policy_says(ran: dict[str, Any]) -> None:
    """A block of OwnGPT has four products (qkv, out, up, down), the last of which saves last, and two norms."""
    rows = {policy: ran[policy] for policy in POLICIES}
    plain, blocks = rows["none"], 2
    more = {p: (r["products"] - plain["products"], r["attention"] - plain["attention"]) for p, r in rows.items()}
    assert more == {
        "none": (0, 0),
        "keep-matmuls": (0, 0),
        "selective": (blocks, 0),
        "keep-attention": (3 * blocks, 0),
        "full": (3 * blocks, blocks),
    }
    assert all(r["norms"] - plain["norms"] == (0 if p == "none" else 2 * blocks) for p, r in rows.items())
    assert all(r["error"] < 1e-5 for r in rows.values()), {p: r["error"] for p, r in rows.items()}


def test_the_code_says_what_is_kept(ran: dict[str, Any]) -> None:
    lines = [line.strip() for line in ran["keep-matmuls"]["code"].splitlines()]
    after = [lines[k + 1] for k, line in enumerate(lines) if line.startswith("with keep(")]
    assert len(after) == 4 and "F.scaled_dot_product_attention(" in after[1], after
    assert "all_reduce_back_same(F.linear(" in after[2], "the sum over ranks is kept, not its terms"


def _refusals(file: str) -> list[str]:
    """What is said of a compiled function, and of a second backward pass."""
    said = []
    plan = shardscope.load_plan(file)
    try:
        shardscope.apply(OwnGPT(), plan, compile=True)(*own_model.batch(0), global_batch=True)
    except shardscope.PlanMismatch as error:
        said.append(str(error))
    loss = shardscope.apply(OwnGPT(), plan)(*own_model.batch(0), global_batch=True)
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except RuntimeError as error:
        said.append(str(error))
    return said


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    """What is kept is given to the first backward pass, so that its memory is free at once."""
    shardscope.save_plan(megatron("selective"), tmp_path / "plan")
    compiled, twice = run_ranks(_refusals, 2, (str(tmp_path / "plan"),))[0]
    assert 'plan with recompute="none" or recompute="full"' in compiled
    assert "without retain_graph" in twice
