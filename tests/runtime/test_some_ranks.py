"""Calls in which all ranks take part: if only some ranks make one, they are told which ranks are missing, within the group's time."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import planner_core as shardscope
from planner_core.runtime.library import applied
from tests.support import own_model
from tests.support.own_model import OwnGPT
from tests.support.plans_train_alike import refusal_of
from tests.support.ranks import run_ranks
from tests.support.saved_plans import saved_plans

SHORT_S = 2


def _alone(file: str, folder: str, what: str) -> str:
    """What rank 0 is told if it makes a call alone."""
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]
    usual, options._timeout = options._timeout, datetime.timedelta(seconds=SHORT_S)
    model = shardscope.apply(OwnGPT(), shardscope.load_plan(file))
    assert applied(model).agreement.timeout_s == pytest.approx(0.8 * SHORT_S)
    # On a busy machine one rank comes to the first steps much later than the other.
    options._timeout, applied(model).agreement.timeout_s = usual, usual.total_seconds()
    optimizer = torch.optim.AdamW(model.parameters())
    model(*own_model.batch(0), global_batch=True).backward()
    shardscope.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(*own_model.batch(0), global_batch=True)

    calls: dict[str, Callable[[], object]] = {
        "save": lambda: shardscope.save(model, optimizer, folder),
        "load": lambda: shardscope.load(model, optimizer, folder),
        "state_dict": model.state_dict,
        "clip": lambda: shardscope.clip_grad_norm_(model.parameters(), 1.0),
        "evaluate": evaluate,
    }
    applied(model).agreement.timeout_s = 0.8 * SHORT_S
    return refusal_of(calls[what]) if dist.get_rank() == 0 else ""


@pytest.mark.parametrize(
    ("what", "called"),
    [
        ("save", "shardscope.save"),
        pytest.param("load", "shardscope.load", marks=pytest.mark.slow),
        pytest.param("state_dict", "state_dict of the model", marks=pytest.mark.slow),
        pytest.param("clip", "clip_grad_norm_", marks=pytest.mark.slow),
        pytest.param("evaluate", "the model for evaluation", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_comes_alone_is_told_who_is_missing(what: str, called: str, tmp_path: Path) -> None:
    _, files = saved_plans(OwnGPT(), own_model.batch(0), tmp_path)
    file = next(f for f in files if f.endswith("Megatron-LM"))
    first, second = run_ranks(_alone, 2, (file, str(tmp_path / "checkpoint"), what))
    assert second == ""
    assert first.startswith(f"rank 1 did not call {called} within 1.6 s, and this rank did: each rank holds a part")


def _together(file: str, folder: str) -> bool:
    model = shardscope.apply(OwnGPT(), shardscope.load_plan(file))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        model(*own_model.batch(0), global_batch=True).backward()
        shardscope.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    shardscope.save(model, optimizer, folder)
    shardscope.load(model, optimizer, folder)
    return applied(model).agreement.num_meetings["clip_grad_norm_"] == 5


def test_all_ranks_together_wait_for_nobody(tmp_path: Path) -> None:
    _, files = saved_plans(OwnGPT(), own_model.batch(0), tmp_path)
    file = next(f for f in files if f.endswith("Megatron-LM"))
    assert all(run_ranks(_together, 2, (file, str(tmp_path / "checkpoint"))))
