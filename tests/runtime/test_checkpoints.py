"""Saved on some ranks under one plan, resumed on others under another; read by torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import planner_core as shardscope
from tests.support import own_model
from tests.support.own_model import OwnGPT
from tests.support.plans import own_planned
from tests.support.ranks import run_ranks


def _train(plan_file: str, folder: str, first: int, last: int, save: bool) -> list[Any]:
    """Steps `first` to `last` of a loop; resumed where `first` is not 0."""
    model = shardscope.apply(OwnGPT(), shardscope.load_plan(plan_file))
    # So that rounding does not decide the step of a key's bias.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    found: list[Any] = []
    if first:
        found.append(shardscope.load(model, optimizer, folder, extra={"step": -1}))
    for step in range(first, last):
        loss = model(*own_model.batch(step % 2), global_batch=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    if save:
        future = shardscope.save(model, optimizer, folder, extra={"step": last}, wait=False)
        assert future is not None
        future.result()
    return found


def alone() -> tuple[list[float], OwnGPT]:
    model, halfway = OwnGPT(), OwnGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    losses = []
    for step in range(6):
        if step == 3:
            halfway.load_state_dict(model.state_dict())
        loss = model(*own_model.batch(step % 2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, halfway


def plan_file(folder: Path, gpus: int, name: str) -> str:
    shardscope.save_plan(next(p for p in own_planned(gpus).plans if p.name == name), folder / f"{name}{gpus}")
    return str(folder / f"{name}{gpus}")


def test_saved_under_one_plan_and_resumed_under_another(tmp_path: Path) -> None:
    """A fused q, k, v weight is split by Megatron; on the disk it lies as in the model."""
    losses, halfway = alone()
    folder = str(tmp_path / "checkpoint")
    megatron = plan_file(tmp_path, 2, "Megatron-LM")
    first = run_ranks(_train, 2, (megatron, folder, 0, 3, True))[0]
    assert first == pytest.approx(losses[:3], rel=1e-5)
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    whole = torch.load(tmp_path / "one.pt", weights_only=False)
    for name, value in halfway.state_dict().items():
        torch.testing.assert_close(whole["model"][name], value, rtol=1e-4, atol=1e-6)
    assert set(whole["optimizer"]["state"]["blocks.0.qkv.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    extra, *then = run_ranks(_train, 4, (plan_file(tmp_path, 4, "FSDP"), folder, 3, 6, False))[0]
    assert extra == {"step": 3}
    assert then == pytest.approx(losses[3:], rel=1e-4)


def _refused(plan: str, folder: str) -> str:
    model = shardscope.apply(OwnGPT(), shardscope.load_plan(plan))
    try:
        shardscope.load(model, None, folder)
    except shardscope.InputError as error:
        return str(error)
    return ""


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    said = run_ranks(_refused, 2, (plan_file(tmp_path, 2, "FSDP"), str(tmp_path)))[0]
    assert said == f"{tmp_path} holds no checkpoint: it has no file .metadata"
    with pytest.raises(shardscope.InputError, match="does not run under a plan"):
        shardscope.save(OwnGPT(), None, tmp_path)
