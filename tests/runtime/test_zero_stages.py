"""Data parallel training at ZeRO stages 0 to 3, and HSDP: the same numbers, and the traffic that each stage says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import planner_core as shardscope
from planner_core.runtime import CountCollectives, rows_to_json
from planner_core.runtime.library import applied
from tests.runtime.test_own_loop import mixed_alone
from tests.support import own_model
from tests.support.own_model import OwnGPT
from tests.support.plans import own_planned
from tests.support.ranks import run_ranks

LAYOUTS = ("dp=2,zero=0", "dp=2,zero=1", "dp=2,zero=2", "fsdp=2")
"""Data parallel over both ranks of one axis, by ZeRO stage."""


def save_layout(layout: str, file: Path, **options: Any) -> str:
    """The file of the plan of a stated layout."""
    result = own_planned(4 if "tp" in layout else 2, layout=layout, **options)
    shardscope.save_plan(next(p for p in result.plans if p.name == "our current setup"), file)
    return str(file)


def _steps(plan_file: str) -> list[Any]:
    """Losses of an own loop; then the bytes by phase and kind of a step of two micro-batches, the first unsummed."""
    plan = shardscope.load_plan(plan_file)
    model = shardscope.apply(OwnGPT(), plan)
    losses = own_model.losses(model, slice(None))
    model = shardscope.apply(OwnGPT(), plan)
    parallel, optimizer = applied(model), torch.optim.AdamW(model.parameters())
    sent: list[Any] = []
    for _ in range(2):
        counted = CountCollectives(parallel.mesh, parallel.engine.packed)
        with counted:
            for micro in range(2):
                counted.phase = "forward"
                loss = model(*own_model.batch(micro), global_batch=True) / 2
                counted.phase = "backward"
                if micro == 0:
                    with model.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            counted.phase = "optimizer"
            optimizer.step()
            optimizer.zero_grad()
        sent = rows_to_json(counted.rows)
    return [
        losses,
        sent,
        sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters()),
    ]


def traffic(rows: list[Any]) -> dict[tuple[str, str, Any], tuple[int, int]]:
    """(phase, kind, axis, or axes of one group) -> tensors and bytes, without what the loss sends."""
    return {
        (phase, kind, axis if isinstance(axis, int) else tuple(axis)): (count, size)
        for phase, kind, axis, count, size, _ in rows
        if not (kind == "all_reduce" and size <= 32)
    }


SIZES = {name: 4 * p.numel() for name, p in OwnGPT().named_parameters()}
MATRICES = [size for name, size in SIZES.items() if OwnGPT().get_parameter(name).dim() > 1]
VECTORS = [size for name, size in SIZES.items() if OwnGPT().get_parameter(name).dim() == 1]
WEIGHTS, BYTES = len(MATRICES), sum(MATRICES)
SMALL = (len(VECTORS), sum(VECTORS))
"""Number and bytes of biases and norms, which these layouts keep whole."""
TIED = SIZES["tokens.weight"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.slow(but=("1", "2"))
def test_stages_of_zero_on_one_axis(stage: int, tmp_path: Path) -> None:
    """Two micro-batches a step. Stage 1 and 2 gather every matrix once, 3 in every micro-batch, forward and backward; stage 1
    scatters its gradient once, 2 and 3 in every micro-batch. Biases and norms stay whole, and are summed once. The tied weight is used twice: it is gathered for each use, and at
    stages 2 and 3 its gradient is scattered for each."""
    losses, rows, held = run_ranks(_steps, 2, (save_layout(LAYOUTS[stage], tmp_path / "plan"),))[0]
    assert losses == pytest.approx(own_model.losses(OwnGPT()), rel=1e-5)
    found = traffic(rows)
    once, uses = (WEIGHTS, BYTES), (2 * WEIGHTS + 2, 2 * (BYTES + TIED))
    if stage == 0:
        assert found == {("backward", "all_reduce", 0): (len(SIZES), sum(SIZES.values()))}
        assert held == sum(SIZES.values()) // 4
        return
    assert found.pop(("backward", "all_reduce", 0)) == SMALL
    assert held == BYTES // 8 + SMALL[1] // 4
    if stage == 1:
        assert found == {("forward", "all_gather", 0): once, ("backward", "reduce_scatter", 0): once}
    elif stage == 2:
        assert found == {("forward", "all_gather", 0): once, ("backward", "reduce_scatter", 0): uses}
    else:
        assert found[("forward", "all_gather", 0)] == uses == found[("backward", "reduce_scatter", 0)]
        assert 0 < found[("backward", "all_gather", 0)][1] < uses[1], "embeddings and biases are not needed again"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2,tp=2,zero=1", "fsdp=2,tp=2"])
def test_weights_are_sharded_over_one_axis_beside_megatron_over_the_other(layout: str, tmp_path: Path) -> None:
    losses, rows, _ = run_ranks(_steps, 4, (save_layout(layout, tmp_path / "plan"),))[0]
    assert losses == pytest.approx(own_model.losses(OwnGPT()), rel=1e-5)
    found = traffic(rows)
    assert ("backward", "reduce_scatter", 0) in found and ("forward", "all_gather", 0) in found
    assert ("backward", "all_reduce", 1) in found, "Megatron's f"


def test_master_weights_are_gathered_in_the_type_that_computes(tmp_path: Path) -> None:
    """ZeRO-1 and -2 under bfloat16: masters and gradients in float32 shards, working copies gathered in bfloat16."""
    single = mixed_alone()
    for stage in (1, 2):
        file = save_layout(LAYOUTS[stage], tmp_path / "plan", dtype="bfloat16", optimizer="adamw-fp32")
        losses, rows = run_ranks(_mixed_steps, 2, (file,))[0]
        assert losses == pytest.approx(single, rel=0.02)
        found = traffic(rows)
        assert found[("forward", "all_gather", 0)] == (WEIGHTS, BYTES // 2)
        uses = (WEIGHTS, BYTES) if stage == 1 else (WEIGHTS + 1, BYTES + TIED)
        assert found[("backward", "reduce_scatter", 0)] == uses


def _mixed_steps(plan_file: str) -> list[Any]:
    model = shardscope.apply(OwnGPT(), shardscope.load_plan(plan_file))
    parallel, optimizer = applied(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, sent = [], []
    for _ in range(6):
        with CountCollectives(parallel.mesh, parallel.engine.packed) as counted:
            loss = model(*own_model.batch(0), global_batch=True)
            counted.phase = "backward"
            loss.backward()
            counted.phase = "optimizer"
            optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        sent = rows_to_json(counted.rows)
    return [losses, sent]
