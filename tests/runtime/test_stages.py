"""A person's own loop under a plan with stages is the loop of one process: tied weights, clipping, uneven and interleaved stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import planner_core as shardscope
from planner_core.core import InputError
from planner_core.runtime import PlanMismatch
from tests.support.own_model import OwnGPT, batch
from tests.support.ranks import run_ranks

MICRO_BATCHES = 4


def saved(folder: Path, layout: str, gpus: int, layers: int) -> str:
    """The file of the plan of a layout, for micro-batches of the size of `batch`."""
    plan = shardscope.price(
        OwnGPT(layers),
        inputs=batch(0),
        layout=layout,
        cluster=f"1x8-h100:gpus={gpus}",
        accumulate=MICRO_BATCHES,
        dtype="float32",
    ).plan
    assert plan is not None
    shardscope.save_plan(plan, folder / "plan.json")
    return str(folder / "plan.json")


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of all micro-batches of a step."""
    every = [batch(MICRO_BATCHES * step + k) for k in range(MICRO_BATCHES)]
    return torch.cat([x for x, _ in every]), torch.cat([y for _, y in every])


def alone(layers: int) -> list[tuple[float, float]]:
    """Losses and norms of three steps in one process."""
    model, found = OwnGPT(layers), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        total = 0.0
        for x, y in zip(*(t.chunk(MICRO_BATCHES) for t in samples(step)), strict=True):
            loss = model(x, y) / MICRO_BATCHES
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, float(norm)))
    return found


def _staged(file: str, layers: int, folder: str) -> Any:
    """Losses and norms of three steps, with a checkpoint after the second, and the names of a rank's weights."""
    model: Any = shardscope.apply(OwnGPT(layers), shardscope.load_plan(file))
    found = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(PlanMismatch, match=r"call model.step"):
        model(*samples(0))
    with pytest.raises(PlanMismatch, match="cannot be dealt to the 4 micro-batches"):
        model.step(*(x[:3] for x in samples(0)), global_batch=True)
    with torch.no_grad():
        before = model.step(*samples(0), global_batch=True)
    for step in range(3):
        loss = model.step(*samples(step), global_batch=True)
        if step == 0 and loss is not None:
            assert before is not None and float(before) == pytest.approx(float(loss))
        norm = shardscope.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append((None if loss is None else float(loss), float(norm)))
        if step == 1:
            shardscope.save(model, optimizer, folder, extra={"step": 2})
    return found, sorted(n for n, _ in model.named_parameters())


def _resumes(file: str, layers: int, folder: str) -> Any:
    """The loss and norm of the third step."""
    plan = shardscope.load_plan(file)
    model: Any = shardscope.apply(OwnGPT(layers), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = shardscope.load(model, optimizer, folder, extra={"step": 0})["step"]
    assert optimizer.param_groups[0]["lr"] == 1e-2
    if plan.pipeline:
        loss = model.step(*samples(step), global_batch=True)
    else:
        loss = torch.zeros(())
        for x, y in zip(*(t.chunk(MICRO_BATCHES) for t in samples(step)), strict=True):
            part = model(x, y, global_batch=True) / MICRO_BATCHES
            part.backward()
            loss += part.detach()
    norm = shardscope.clip_grad_norm_(model.parameters(), 0.5)
    return None if loss is None else float(loss), float(norm)


@pytest.mark.parametrize(
    ("layout", "ranks", "layers", "other", "fewer"),
    [
        ("dp=2,pp=2,zero=1", 4, 3, "fsdp=2", 2),
        pytest.param("dp=2,pp=2,order=tp-pp-dp,zero=1", 4, 3, "tp=2,pp=2", 4, marks=pytest.mark.slow),
        pytest.param("pp=2,vp=2,schedule=interleaved", 2, 5, "fsdp=2", 2, marks=pytest.mark.slow),
    ],
    ids=["tied, ZeRO-1 inside", "tied, ZeRO-1 outside", "interleaved, uneven"],
)
def test_a_loop_under_stages_is_that_of_one_process_and_goes_on_under_others_or_none(
    layout: str, ranks: int, layers: int, other: str, fewer: int, tmp_path: Path
) -> None:
    """`other`: the layout on `fewer` ranks under which the third step is made again, from a checkpoint of the second."""
    file, folder = saved(tmp_path, layout, ranks, layers), str(tmp_path / "saved")
    wanted = alone(layers)
    every = run_ranks(_staged, ranks, (file, layers, folder), timeout_s=240)
    names = [set(names) for _, names in every]
    assert set.union(*names) == {n for n, _ in OwnGPT(layers).named_parameters()}
    assert names[0] & names[-1] == {"tokens.weight"}  # the tied one alone is on both
    for rank, (found, _) in enumerate(every):
        last = rank % 2 == 1 if "order" in layout else rank >= ranks // 2
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in wanted], rel=1e-4)
        assert [loss for loss, _ in found] == (
            [pytest.approx(loss, rel=1e-5) for loss, _ in wanted] if last else [None] * 3
        )
    resumed = run_ranks(_resumes, fewer, (saved(tmp_path, other, fewer, layers), layers, folder), timeout_s=240)
    assert [norm for _, norm in resumed] == pytest.approx([wanted[2][1]] * fewer, rel=1e-4)
    assert resumed[-1][0] == pytest.approx(wanted[2][0], rel=1e-5)


@pytest.mark.parametrize("layout", ["pp=2,schedule=zb", "pp=2,vp=2,schedule=zbv"])
def test_stages_that_do_not_run_say_so(layout: str, tmp_path: Path) -> None:
    """Before a process group is asked for, and before anything is written."""
    plan = shardscope.load_plan(saved(tmp_path, layout, 2, 4))
    for refused in (
        lambda: shardscope.apply(OwnGPT(4), plan),
        lambda: shardscope.export(plan, "torchrun", tmp_path / "x"),
    ):
        with pytest.raises(InputError, match=r"takes the gradients of weights apart.*schedule=") as error:
            refused()
        assert str(error.value).count(". ") == 0
    assert not (tmp_path / "x").exists()
