"""Casts under a plan, and those without effect."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import planner_core as shardscope
from tests.support.ranks import run_ranks
from tests.support.saved_plans import saved_plans


class Casts(nn.Module):
    """The weight of `first` is computed by a hook."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.utils.weight_norm(nn.Linear(16, 16))  # type: ignore[no-untyped-call]
        self.register_buffer("shift", torch.ones(16).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).type(torch.float64).type_as(x)
        h = h.to(h.dtype) + self.shift.to(h.dtype)
        return h.double().square().mean().float()


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def _losses(files: list[str]) -> list[float]:
    models = [shardscope.apply(Casts(), shardscope.load_plan(file)) for file in files]
    return [float(m(X, global_batch=True).detach()) for m in models]


def test_casts_with_and_without_effect(tmp_path: Path) -> None:
    _, files = saved_plans(Casts(), (X,), tmp_path)
    h = Casts().first(X) + 1
    assert run_ranks(_losses, 2, (files,))[0] == pytest.approx([float(h.square().mean())] * len(files))
