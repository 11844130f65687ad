"""A model whose code computes with the number of samples: a plan is for the samples of all ranks, also where a rank sees its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import planner_core as shardscope
from tests.support.ranks import run_ranks

SAMPLES, RANKS = 8, 2


class Counts(nn.Module):
    """Means by hand, of every spelling."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.last(torch.relu(self.first(x)))
        squares = ((h - y) ** 2).sum() / x.size(0)
        absolute = h.abs().sum() * (1.0 / len(y))
        return squares + absolute + 0.5 * h.sum() / h.numel() + h.mean() * y.shape[0] ** -0.5


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(SAMPLES, 16), torch.randn(SAMPLES, 16)


def _whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _runs(files: dict[str, str]) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    found = {}
    for name, file in files.items():
        for whole in (False, True):
            model = shardscope.apply(Counts(), shardscope.load_plan(file))
            split = name in ("data parallel", "FSDP") and not whole
            part = slice(rank * SAMPLES // RANKS, (rank + 1) * SAMPLES // RANKS) if split else slice(None)
            x, y = (t[part] for t in batch())
            loss = model(x, y) if split else model(x, y, global_batch=True)
            loss.backward()
            grads = [_whole(p.grad).tolist() for p in model.parameters()]
            found[f"{name}, {'own' if split else 'global'}"] = loss.item(), grads
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = shardscope.plan(Counts(), inputs=batch(), cluster="1x8-h100:gpus=2")
    folder, files = tmp_path_factory.mktemp("plans"), {}
    for plan in result.plans:
        if plan.name in ("data parallel", "FSDP", "Megatron-LM"):
            files[plan.name] = str(Path(folder) / plan.name.replace(" ", "-"))
            shardscope.save_plan(plan, files[plan.name])
    assert len(files) >= 2
    return dict(run_ranks(_runs, RANKS, (files,))[0])


def test_loss_and_gradients_are_those_of_one_process(ran: dict[str, Any]) -> None:
    model = Counts()
    wanted = model(*batch())
    wanted.backward()
    assert len(ran) == 2 + 2 + 1  # tensor parallelism takes the global batch alone
    for name, (loss, grads) in ran.items():
        assert loss == pytest.approx(float(wanted), rel=1e-5), name
        for mine, parameter in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(mine), parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
