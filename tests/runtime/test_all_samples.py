"""What depends on all samples of a batch, or comes from outside of it, is never that of a rank's own samples."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner_core as shardscope
from tests.support.plans_train_alike import check_plans_train_alike, refusal_of, whole
from tests.support.ranks import run_ranks
from tests.support.saved_plans import saved_plans

WIDTH, NUM_CLASSES = 16, 8


class Mixed(nn.Module):
    """A loss against what `how` makes of the labels of several samples."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.head = how, nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, y: Tensor, partner: Tensor) -> Any:
        scores = self.head(F.relu(self.up(x)))
        return getattr(self, "_" + self.how)(scores, x, y, partner)

    def _flip(self, scores: Tensor, x: Tensor, y: Tensor, partner: Tensor) -> Tensor:
        return F.cross_entropy(scores, y) + F.cross_entropy(scores, y.flip(0))

    def _roll(self, scores: Tensor, x: Tensor, y: Tensor, partner: Tensor) -> Tensor:
        return F.cross_entropy(scores, y.roll(1))

    def _cumsum(self, scores: Tensor, x: Tensor, y: Tensor, partner: Tensor) -> Tensor:
        return F.cross_entropy(scores, y.cumsum(0) % NUM_CLASSES)

    def _sort(self, scores: Tensor, x: Tensor, y: Tensor, partner: Tensor) -> Tensor:
        return F.cross_entropy(scores, y.sort().values)

    def _tril(self, scores: Tensor, x: Tensor, y: Tensor, partner: Tensor) -> Tensor:
        return (scores * torch.ones(len(y), NUM_CLASSES).tril()).sum(1).mean()

    def _halves(self, scores: Tensor, x: Tensor, y: Tensor, partner: Tensor) -> Tensor:
        half = len(y) // 2
        return F.cross_entropy(scores, torch.cat([y[half:], y[:half]]))

    def _partner(self, scores: Tensor, x: Tensor, y: Tensor, partner: Tensor) -> Tensor:
        return F.cross_entropy(scores, y[partner])

    def _inner(self, scores: Tensor, x: Tensor, y: Tensor, partner: Tensor) -> Tensor:
        return F.cross_entropy(torch.stack([scores, 2 * scores]).flatten(0, 1), torch.stack([y, 7 - y]).flatten())

    def _patches(self, scores: Tensor, x: Tensor, y: Tensor, partner: Tensor) -> Tensor:
        hidden = torch.arange(4) != (y % 4)[:, None]  # all but one of each sample, another one in each batch
        wanted = x.view(len(x), 4, 4)[hidden].reshape(len(x), -1, 4)
        return F.mse_loss(scores.view(len(x), 4, 2)[hidden].reshape(len(x), -1, 2), wanted[..., :2])

    def _unchanged(self, scores: Tensor, x: Tensor, y: Tensor, partner: Tensor) -> Any:
        return F.cross_entropy(scores, y), x, [y]


HOW = (
    "flip",
    "roll",
    "cumsum",
    "sort",
    "tril",
    "halves",
    "partner",
    "inner",
    "patches",
    "unchanged",
)


def _batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return (
        torch.randn(8, WIDTH, generator=made),
        torch.randint(0, NUM_CLASSES, (8,), generator=made),
        torch.randperm(8, generator=made),
    )


def _made(how: str) -> Mixed:
    torch.manual_seed(0)
    return Mixed(how)


def _sees_all_samples(report: shardscope.Result, plan: shardscope.Plan) -> bool:
    """The best plan, in which each rank has all of them, and those that split them."""
    return plan is report.best or plan.data_axes == (0,)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.slow(only=("flip", "cumsum", "sort", "halves"))
def test_every_plan_sees_all_samples(how: str) -> None:
    batches = [_batch(seed) for seed in range(3)]
    report = check_plans_train_alike(partial(_made, how), batches, chosen=_sees_all_samples)
    assert sum(_sees_all_samples(report, plan) for plan in report.plans) >= 3


def _returned(file: str) -> bool:
    model: Any = shardscope.apply(_made("unchanged"), shardscope.load_plan(file))
    x, y, partner = _batch(1)
    out = model(x, y, partner, global_batch=True)
    return torch.equal(out[1], x) and torch.equal(out[2][0], y)


def test_what_forward_returns_unchanged_is_what_it_was_given(tmp_path: Path) -> None:
    _, files = saved_plans(_made("unchanged"), _batch(9), tmp_path)
    assert run_ranks(_returned, 2, (files[0],)) == [True, True]


def _needs_gradient(file: str) -> str:
    model: Any = shardscope.apply(_made("flip"), shardscope.load_plan(file))
    x, y, partner = _batch(0)
    return refusal_of(lambda: model(x.requires_grad_(), y, partner, global_batch=True))


def test_an_input_that_needs_a_gradient_is_refused(tmp_path: Path) -> None:
    _, files = saved_plans(Mixed("flip"), _batch(9), tmp_path)
    for said in run_ranks(_needs_gradient, 2, (files[0],), timeout_s=60):
        assert "an input needs a gradient" in said


class Heads(nn.Module):
    """Two losses, each with a head of its own. The plan is for both, as neither is the only one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(WIDTH, 32), nn.Linear(32, NUM_CLASSES), nn.Linear(32, 1)
        self.register_buffer("mean", torch.ones(32))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        self.mean.mul_(0.9).add_(self.body.bias.detach(), alpha=0.1)  # type: ignore[operator]
        h = F.relu(self.body(x)) + self.mean
        loss = F.cross_entropy(self.first(h), y)
        if (y == 3).any():
            loss = loss + 1.0
        return {"ce": loss, "mse": F.mse_loss(self.second(h).squeeze(-1), y.float()), "samples": len(y)}


def _heads(files: list[str]) -> list[tuple[list[float], list[float], int, float]]:
    found = []
    for file in files:
        torch.manual_seed(0)
        own = Heads()
        torch.manual_seed(0)
        model: Any = shardscope.apply(Heads(), shardscope.load_plan(file))
        batches = [(x, y) for x, y, _ in map(_batch, (0, 1))] + [(_batch(2)[0], torch.arange(8) % 3)]
        wanted, outs = [own(*b) for b in batches], [model(*b, global_batch=True) for b in batches]
        for first in (wanted[0], outs[0]):
            first["ce"].backward(retain_graph=True)
            first["mse"].backward()
        pairs = zip(own.parameters(), model.parameters(), strict=True)
        apart = max(float((whole(b.grad) - a.grad).abs().max()) for a, b in pairs)
        losses = ([float(o["ce"].detach()) for o in made] for made in (wanted, outs))
        found.append((*losses, outs[0]["samples"], apart))
    return found


def test_buffers_branches_and_second_losses(tmp_path: Path) -> None:
    _, files = saved_plans(Heads(), _batch(9)[:2], tmp_path)
    for found in run_ranks(_heads, 2, (files,), timeout_s=200):
        for alone, got, samples, apart in found:
            assert got == pytest.approx(alone, rel=1e-5) and samples == 8
            assert apart < 1e-6
