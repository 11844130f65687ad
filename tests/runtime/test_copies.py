"""Copies of one weight are compared at the first step of an optimizer, and ever less often after that."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import planner_core as shardscope
from planner_core.runtime import PlanMismatch
from planner_core.verification.processes import run_ranks
from tests.support.saved_plans import saved_plans

SAMPLES, TRUTH = torch.linspace(-1, 1, 8 * 16).view(8, 16), torch.arange(8) % 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.down(self.up(x).relu()), y)


def _net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def _files(folder: Path) -> dict[str, str]:
    report, files = saved_plans(_net(), (SAMPLES, TRUTH), folder)
    return {plan.name: file for plan, file in zip(report.plans, files, strict=True)}


def _own() -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    return SAMPLES.chunk(2)[rank], TRUTH.chunk(2)[rank]


def _steps(
    file: str, change: Callable[[nn.Module, int], torch.Tensor | None], steps: int, made: Callable[[], Net] = _net
) -> list[Any]:
    """What is refused and warned of in so many steps. `change` is called before each, and may add to the loss."""
    model = shardscope.apply(made(), shardscope.load_plan(file))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            for step in range(1, steps + 1):
                more = change(model, step)
                loss = model(*_own())
                (loss if more is None else loss + more).backward()
                optimizer.step()
                optimizer.zero_grad()
        except PlanMismatch as told:
            return [str(told), []]
    return ["", [str(w.message) for w in seen if "same" in str(w.message)]]


def _a_part(model: nn.Module, step: int) -> torch.Tensor:
    return model.up(_own()[0]).square().mean()  # type: ignore[operator, no-any-return]


def _a_weight(model: nn.Module, step: int) -> torch.Tensor:
    return model.up.weight.square().sum()  # type: ignore[union-attr, operator, no-any-return]


class Spare(Net):
    """Weights that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(16, 16)


def _spare() -> Spare:
    torch.manual_seed(0)
    return Spare()


def _idle(file: str) -> str:
    return _steps(file, _a_spare_part, 1, _spare)[0]


def _a_spare_part(model: nn.Module, step: int) -> torch.Tensor:
    return model.spare(_own()[0]).square().mean()  # type: ignore[operator, no-any-return]


def test_a_gradient_of_a_weight_that_the_plan_does_not_train_is_told_as_such(tmp_path: Path) -> None:
    _, files = saved_plans(_spare(), (SAMPLES, TRUTH), tmp_path)
    for said in run_ranks(_idle, 2, (next(f for f in files if f.endswith("data parallel")),)):
        assert said.startswith("the gradient of spare.weight differs between rank 0 and rank 1")
        assert "the planned step sends it no gradient" in said and "call the model" not in said


def _loads(on: int) -> Callable[[nn.Module, int], None]:
    def loads(model: nn.Module, step: int) -> None:
        if step == 1 and dist.get_rank() >= on:
            model.load_state_dict(_net(1).state_dict())

    return loads


@torch.no_grad()
def _writes(model: nn.Module, step: int) -> None:
    if step == 3 and dist.get_rank():
        model.down.weight.mul_(2)  # type: ignore[union-attr, operator]


def _told(files: dict[str, str]) -> dict[str, Any]:
    whole, parts = files["data parallel"], files["FSDP"]
    return {
        "a part": _steps(whole, _a_part, 1),
        "a weight": _steps(whole, _a_weight, 1),
        "loaded on one, whole": _steps(whole, _loads(1), 1),
        "loaded on one, in parts": _steps(parts, _loads(1), 1),
        "loaded on all, whole": _steps(whole, _loads(0), 4),
        "loaded on all, in parts": _steps(parts, _loads(0), 4),
        "written": _steps(whole, _writes, 4),
    }


def test_copies_that_differ_are_refused_at_the_first_step_and_told_of_later(tmp_path: Path) -> None:
    for said in run_ranks(_told, 2, (_files(tmp_path),)):
        assert said["a part"][0].startswith("the gradient of up.weight differs between rank 0 and rank 1")
        for kind in ("whole", "in parts"):
            assert "up.weight is not the same on rank 0 and rank 1, which hold one" in said[f"loaded on one, {kind}"][0]
            assert said[f"loaded on all, {kind}"] == ["", []]
        assert said["a weight"] == ["", []]
        refused, (told,) = said["written"]
        assert not refused and told.startswith("down.weight is not the same on rank 0 and rank 1")


class Contrast(nn.Module):
    """Samples against a table of as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, bank: torch.Tensor) -> torch.Tensor:
        return (self.l(x) @ bank.T).logsumexp(1).mean()


def _fed(file: str) -> dict[str, list[str]]:
    rows, own, found = SAMPLES.flip(0), _own()[0], {}
    for name, bank in {
        "same": rows.chunk(2)[0],
        "own": rows.chunk(2)[dist.get_rank()],
        "ones": torch.ones(4, 16),
    }.items():
        torch.manual_seed(0)
        model = shardscope.apply(Contrast(), shardscope.load_plan(file))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model(own, bank)
        found[name] = [str(w.message) for w in seen if "on all ranks" in str(w.message)]
    return found


def test_a_table_that_was_taken_for_samples_is_told_of(tmp_path: Path) -> None:
    _, files = saved_plans(Contrast(), (SAMPLES, SAMPLES.flip(0)), tmp_path)
    for found in run_ranks(_fed, 2, (next(f for f in files if f.endswith("data parallel")),)):
        assert found["own"] == found["ones"] == []
        assert found["same"] and found["same"][0].startswith("bank is the same on all ranks, which have other samples")
