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


def _staged(file: str, layers: int) -> Any:
    torch.set_num_threads(1)
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
    return found, sorted(n for n, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("layout", "ranks", "layers"),
    [
        ("dp=2,pp=2,zero=1", 4, 3),
        pytest.param("dp=2,pp=2,order=tp-pp-dp,zero=1", 4, 3, marks=pytest.mark.slow),
        pytest.param("pp=2,vp=2,schedule=interleaved", 2, 5, marks=pytest.mark.slow),
    ],
    ids=["tied, ZeRO-1 inside", "tied, ZeRO-1 outside", "interleaved, uneven"],
)
def test_a_loop_under_stages_is_that_of_one_process(layout: str, ranks: int, layers: int, tmp_path: Path) -> None:
    file = saved(tmp_path, layout, ranks, layers)
    wanted = alone(layers)
    every = run_ranks(_staged, ranks, (file, layers), timeout_s=240)
    names = [set(names) for _, names in every]
    assert set.union(*names) == {n for n, _ in OwnGPT(layers).named_parameters()}
    assert names[0] & names[-1] == {"tokens.weight"}  # the tied one alone is on both
    for rank, (found, _) in enumerate(every):
        last = rank % 2 == 1 if "order" in layout else rank >= ranks // 2
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in wanted], rel=1e-4)
        assert [loss for loss, _ in found] == (
            [pytest.approx(loss, rel=1e-5) for loss, _ in wanted] if last else [None] * 3
        )


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


def _saves(file: str, layers: int, folder: str) -> None:
    model: Any = shardscope.apply(OwnGPT(layers), shardscope.load_plan(file))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        model.step(*samples(step), global_batch=True)
        shardscope.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    shardscope.save(model, optimizer, folder, extra={"step": 2})


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


@pytest.mark.parametrize("others", [{"fsdp=2": 2}, pytest.param({"tp=2,pp=2": 4}, marks=pytest.mark.slow)], ids=str)
def test_a_run_goes_on_under_other_stages_or_none(others: dict[str, int], tmp_path: Path) -> None:
    folder, layers = str(tmp_path / "saved"), 3
    run_ranks(_saves, 4, (saved(tmp_path, "dp=2,pp=2,zero=1", 4, layers), layers, folder), timeout_s=240)
    loss, norm = alone(layers)[2]
    for layout, ranks in others.items():
        every = run_ranks(_resumes, ranks, (saved(tmp_path, layout, ranks, layers), layers, folder), timeout_s=240)
        assert [found for _, found in every] == pytest.approx([norm] * ranks, rel=1e-4), (layout, every, loss, norm)
        assert every[-1][0] == pytest.approx(loss, rel=1e-5)
