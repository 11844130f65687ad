"""A collective of the model's own code, once a group exists: under a plan its tensors are whole, so it is refused by its line."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as dist_nn
from torch import nn

import planner_core as shardscope
from planner_core.runtime.record.source_names import RefuseCollectives
from tests.support.plans_train_alike import refusal_of
from tests.support.ranks import run_ranks

HOW = ("in place", "with gradient", "of the data", "gathered", "as an operator", "of a constant")


class Averaged(nn.Module):
    """Averages over ranks where there are some, as the codebooks of vector-quantize-pytorch do."""

    seen: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(16, 16), nn.Linear(16, 8)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).relu()
        m, world = h.mean(0), cast(Any, dist.group.WORLD)
        if dist.is_initialized() and self.how == "in place":
            dist.all_reduce(m)
        elif dist.is_initialized() and self.how == "with gradient":
            m = dist_nn.all_reduce(m)  # type: ignore[no-untyped-call]
        elif dist.is_initialized() and self.how == "of the data":
            dist.all_reduce(m.data)
        elif dist.is_initialized() and self.how == "as an operator":
            m = functional.all_reduce(m, "avg", world)
        elif dist.is_initialized() and self.how == "of a constant":
            self.seen.copy_(functional.all_gather_tensor(x.mean(0), 0, world)[:16])
        elif dist.is_initialized():
            parts = [torch.empty_like(m) for _ in range(2)]
            dist.all_gather(parts, m)
        return self.b(h - m).square().mean()  # type: ignore[no-any-return]


def _refusals(file: str) -> list[str]:
    models = [shardscope.apply(Averaged(how), shardscope.load_plan(file)) for how in HOW]
    return [refusal_of(partial(model, torch.ones(8, 16), global_batch=True)) for model in models]


def test_a_collective_of_the_models_own_is_refused_by_its_line(tmp_path: Path) -> None:
    report = shardscope.plan(Averaged("in place"), inputs=(torch.ones(8, 16),), cluster="1x8-h100:gpus=2", accumulate=1)
    shardscope.save_plan(report.plans[0], tmp_path / "plan")
    for how, said in zip(HOW, run_ranks(_refusals, 2, (str(tmp_path / "plan"),), timeout_s=200)[0], strict=True):
        assert "calls a collective of torch.distributed (all" in said, (how, said)
        assert "at test_own_collectives.py:" in said, said


def _other_thread() -> list[float]:
    """A sum over ranks in another thread, as of a checkpoint that is written while a model is recorded."""
    total = torch.ones(2)
    with RefuseCollectives():
        thread = threading.Thread(target=dist.all_reduce, args=(total,))
        thread.start()
        thread.join()
    return total.tolist()


def test_a_collective_of_another_thread_goes_on() -> None:
    assert run_ranks(_other_thread, 2, (), timeout_s=60) == [[2.0, 2.0], [2.0, 2.0]]
