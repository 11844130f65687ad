"""What a loop does with gradients between micro-batches inside `no_sync()`: it forgets them in any way, adds to them, or reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import planner_core as shardscope
from planner_core.runtime import PlanMismatch
from planner_core.runtime.library import applied
from tests.runtime.test_own_state import Watched
from tests.support.ranks import run_ranks
from tests.support.saved_plans import TWO, saved_plans

Doing = Callable[[Any, torch.optim.Optimizer], None]
SAMPLES = torch.linspace(-1, 1, 8 * 16).reshape(8, 16)


def _set(value: Callable[[torch.Tensor], torch.Tensor | None]) -> Doing:
    def do(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for p in model.parameters():
            p.grad = value(p)

    return do


def _zeroed(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad.detach_().zero_()


def _penalized(model: Any, optimizer: torch.optim.Optimizer) -> None:
    sum(p.square().sum() for p in model.parameters()).backward()


DOINGS: dict[str, Doing] = {
    "nothing": lambda model, optimizer: None,
    "zero_grad of the optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "zero_grad of the model, in place": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "None": _set(lambda p: None),
    "zeros": _set(torch.zeros_like),
    "zero_": _zeroed,
    "a penalty": _penalized,
}


def _weights(model: Any, do: Doing, **options: bool) -> list[torch.Tensor]:
    """Two steps of three micro-batches, after the first of which the loop does something."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with applied(model).no_sync() if options else torch.enable_grad():
            (10 * model(SAMPLES, **options)).backward()
            do(model, optimizer)
            model(SAMPLES + 1, **options).backward()
        model(SAMPLES * 0.5, **options).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]


def _apart(files: list[str]) -> list[tuple[str, str, float]]:
    wanted = {what: _weights(Watched(), do) for what, do in DOINGS.items()}
    found = []
    for file in files:
        model = shardscope.apply(Watched(), shardscope.load_plan(file))
        start = [p.detach().clone() for p in model.parameters()]
        for what, do in DOINGS.items():
            with torch.no_grad():
                for p, old in zip(model.parameters(), start, strict=True):
                    p.copy_(old)
            found.append((what, file, _distance(_weights(model, do, global_batch=True), wanted[what])))
    return found


def _distance(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))


def _files(folder: Path) -> list[str]:
    report, files = saved_plans(Watched(), (SAMPLES,), folder)
    files = [f for f, plan in zip(files, report.plans, strict=True) if not plan.name.startswith("trade-off")]
    for layout in ("dp=2,zero=1", "dp=2,zero=2"):
        plan = shardscope.price(Watched(), inputs=(SAMPLES,), cluster=TWO, layout=layout, advise=False).plan
        assert plan is not None
        files.append(str(folder / layout))
        shardscope.save_plan(plan, files[-1])
    return files


def test_what_a_loop_does_between_micro_batches_counts_as_on_one_process(tmp_path: Path) -> None:
    files = _files(tmp_path)
    rows = run_ranks(_apart, 2, (files,))[0]
    assert len(rows) == len(DOINGS) * len(files)
    assert [row for row in rows if row[-1] > 1e-5] == []


def _read(file: str) -> str:
    model = shardscope.apply(Watched(), shardscope.load_plan(file))
    with applied(model).no_sync():
        model(SAMPLES, global_batch=True).backward()
    with pytest.raises(PlanMismatch) as told:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return str(told.value)


def test_a_gradient_that_is_read_before_it_is_summed_is_refused(tmp_path: Path) -> None:
    _, files = saved_plans(Watched(), (SAMPLES,), tmp_path)
    said = run_ranks(_read, 2, (next(f for f in files if f.endswith("data parallel")),))[0]
    assert "the gradient of up.weight was used, but its backward passes ran inside no_sync()" in said
