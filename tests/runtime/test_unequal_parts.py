"""Weights that are gathered for use, over a number of ranks that no dim is a multiple of: the last part is shorter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import planner_core as shardscope
from planner_core.core import Shard, largest_local_shape, needs_uneven_split
from planner_core.models import load_plan_graph
from planner_core.runtime.program.collectives import split_unevenly
from planner_core.verification.fake.group import verify_fake
from planner_core.verification.numerics import verify_all
from planner_core.verification.static import check_rules
from tests.runtime.test_stated_axes import small
from tests.support import own_model
from tests.support.own_model import OwnGPT
from tests.support.plans import own_planned
from tests.support.ranks import run_ranks

SAMPLE = (("gpt2", "fsdp=3"), ("llama-gqa", "dp=3,zero=2"))
"""GPT-2 has a fused q, k, v of 96 rows: each third has 32, so its columns are cut."""
OTHERS = (("llama-gqa", "fsdp=3"), ("bert", "dp=3,zero=1"), ("mixtral", "fsdp=3"))


@pytest.mark.parametrize("extent", range(1, 30))
@pytest.mark.parametrize("size", [2, 3, 4, 6, 12])
def test_parts_are_those_of_torch(extent: int, size: int) -> None:
    parts, own = torch.arange(extent).chunk(size), split_unevenly(torch.arange(extent), 0, size)
    assert [part.tolist() for part in own] == [p.tolist() for p in parts] + [[]] * (size - len(parts))
    assert largest_local_shape((extent,), (Shard(0),), (size,)) == (len(parts[0]),)
    assert needs_uneven_split((extent,), {}, 0, size) == (extent > size and extent % size > 0)


def test_a_dim_with_equal_parts_is_preferred() -> None:
    assert not needs_uneven_split((10, 9), {}, 0, 3)
    assert needs_uneven_split((10, 9), {1: (4, 5)}, 0, 3)  # neither fused part of 4 and 5 columns has thirds


@pytest.mark.parametrize("cases", [SAMPLE, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["sample", "others"])
def test_they_run_as_predicted(cases: Sequence[tuple[str, str]]) -> None:
    """On three real processes: loss, every gradient, a step of AdamW, traffic and its order."""
    plans = [small(name, text, num_gpus=3) for name, text in cases]
    for plan, found in zip(plans, verify_all(plans), strict=True):
        assert found["ok"], (plan.name, found["grad"], found["collectives"])


@pytest.mark.parametrize("text", ["fsdp=6", "dp=2,fsdp=3", "fsdp=3,tp=2,sp", "fsdp=12"])
@pytest.mark.slow(but=("fsdp=3,tp=2,sp", "fsdp=12"))
def test_traffic_and_memory_are_exact(text: str) -> None:
    plan = small("llama-gqa", text, num_gpus=12 if text == "fsdp=12" else 6)
    assert not check_rules(plan, load_plan_graph(plan))
    weights = [w for bp in plan.blocks.values() for w in bp.params.values()]
    assert any(len(sizes) == 1 for w in weights for sizes in w.segments.values()), "some weight has a shorter part"
    found = verify_fake(plan)
    assert found["ok"], found["collectives"]
    assert abs(found["memory_bytes"]["rel_error"]) < 0.02, found["memory_bytes"]


def _losses(plan_file: str, folder: str, resumed: bool) -> list[float]:
    """Losses of an own loop that leaves a checkpoint, or of one that goes on from it."""
    model = shardscope.apply(OwnGPT(), shardscope.load_plan(plan_file))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    if resumed:
        shardscope.load(model, optimizer, folder)
    losses = []
    for step in range(3):
        loss = model(*own_model.batch(step), global_batch=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if not resumed:
        shardscope.save(model, optimizer, folder)
    return losses


def test_an_own_loop_and_a_checkpoint(tmp_path: Path) -> None:
    """Trained on three ranks; the checkpoint goes on on three and on two."""
    for gpus in (2, 3):
        result = own_planned(gpus, mesh=str(gpus))
        least = min(result.plans, key=lambda plan: plan.cost.memory_bytes["params"])
        shardscope.save_plan(least, tmp_path / f"{gpus}.json")
    folder = str(tmp_path / "checkpoint")
    alone = _alone(6)
    for gpus, resumed in ((3, False), (3, True), (2, True)):
        losses = run_ranks(_losses, gpus, (str(tmp_path / f"{gpus}.json"), folder, resumed))[0]
        assert losses == pytest.approx(alone[3:] if resumed else alone[:3], rel=1e-5), gpus


def _alone(steps: int) -> list[float]:
    model = OwnGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    losses = []
    for step in range(steps):
        loss = model(*own_model.batch(step % 3))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
