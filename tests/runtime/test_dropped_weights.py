"""Dropout of a weight itself, as in AWD-LSTM: ranks draw one mask, and without masks they compute what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner_core as shardscope
from tests.support.ranks import run_ranks


class Dropped(nn.Module):
    """A weight and a shift that are dropped, and a layer whose weight is set in each forward."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.shift, self.weight = nn.Parameter(torch.randn(1, 16)), nn.Parameter(torch.randn(16, 16))
        self.layer = nn.Linear(16, 16)
        self.raw = nn.Parameter(self.layer.weight.detach())
        del self.layer._parameters["weight"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.weight = F.dropout(self.raw, p=self.p, training=self.training)  # type: ignore[assignment]
        x = F.linear(x + F.dropout(self.shift, self.p, self.training), F.dropout(self.weight, self.p, self.training))
        return self.layer(x).square().mean()  # type: ignore[no-any-return]


def _made(p: float) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Dropped(p), torch.randn(8, 16)


def _losses(model: Any, x: torch.Tensor, **options: Any) -> list[float]:
    """Two steps of training, then one in eval mode."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(2):
        loss = model(x, **options)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.eval()
    return [*losses, float(model(x, **options).detach())]


def _planned(p: float, files: list[str]) -> list[list[float]]:
    found = []
    for file in files:
        module, x = _made(p)
        found.append(_losses(shardscope.apply(module, shardscope.load_plan(file)), x, global_batch=True))
    return found


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_dropped_weight_is_alike_on_all_ranks(p: float, tmp_path: Path) -> None:
    module, x = _made(p)
    plans = shardscope.plan(module, inputs=(x,), cluster="1x8-h100:gpus=2", accumulate=1).plans
    names = ("data parallel", "FSDP", "Megatron-LM")
    for plan in plans:
        shardscope.save_plan(plan, tmp_path / plan.name)
    ranks = run_ranks(_planned, 2, (p, [str(tmp_path / n) for n in names]), timeout_s=300)
    assert ranks[0] == ranks[1]
    data_parallel, fsdp, tensor_parallel = ranks[0]
    assert fsdp == pytest.approx(data_parallel, rel=1e-5)
    if p == 0.0:
        assert data_parallel == pytest.approx(_losses(*_made(p)), rel=1e-5)
        assert tensor_parallel == pytest.approx(data_parallel, rel=1e-5)
    else:
        module, x = _made(0.0)
        assert data_parallel[0] != pytest.approx(float(module(x).detach()), rel=1e-3)


def test_eval_mode_has_no_masks(tmp_path: Path) -> None:
    module, x = _made(0.5)
    wanted = float(module.eval()(x).detach())
    module, x = _made(0.5)  # in eval mode, forward has made another weight a parameter
    plans = shardscope.plan(module, inputs=(x,), cluster="1x8-h100:gpus=2", accumulate=1).plans
    shardscope.save_plan(plans[0], tmp_path / "plan")
    for found in run_ranks(_evaluated, 2, (str(tmp_path / "plan"),), timeout_s=300):
        assert found == pytest.approx(wanted, rel=1e-5)


def _evaluated(file: str) -> float:
    module, x = _made(0.5)
    model: Any = shardscope.apply(module, shardscope.load_plan(file))
    return float(model.eval()(x, global_batch=True).detach())
