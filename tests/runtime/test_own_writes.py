"""What forward writes in place outlives a step, and recordings leave no trace in it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner_core as shardscope
from tests.support.plans_train_alike import check_plans_train_alike
from tests.support.ranks import run_ranks
from tests.support.saved_plans import saved_plans

WIDTH, NUM_CLASSES = 16, 8


class WritesWhatItIsGiven(nn.Module):
    """Writes in place into an input, into a view of it, and into buffers and parts of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        for name, shape in (("steps", (1,)), ("offset", (WIDTH,)), ("rows", (2, WIDTH)), ("held", (2, WIDTH))):
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.offset[3:].add_(0.5)
        self.rows[0].add_(0.25)  # a row is written, then all are read
        self.held[1].lerp_(x.mean(0), 0.3)
        x.sub_(1.0)
        h = x.view(-1, WIDTH)
        h += self.offset + self.rows.sum(0) + self.held.sum(0)
        seen.logical_not_()
        return (self.head(F.relu_(h)).square().sum(1) * seen).mean() * self.steps.sum()


def _given(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(8, WIDTH, generator=made), torch.rand(8, generator=made) > 0.5


class Codebook(nn.Module):
    """As a VQ-VAE: means that are written without their gradient, and read after it and before it."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.register_buffer("codes", torch.randn(NUM_CLASSES, 6, generator=drawn))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("counts", torch.ones(6))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        nearest = torch.cdist(z, self.codes.t()).argmin(1)
        hot = F.one_hot(nearest, 6).to(z.dtype)
        found = hot @ self.codes.t()
        self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        self.sums.lerp_(z.detach().t() @ hot, 0.1)
        self.codes.copy_(self.sums / self.counts.clamp_min(0.1))
        return (z - found.detach()).square().mean()


class Anneals(nn.Module):
    """Uses a number, and then makes it smaller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.register_buffer("shift", torch.ones(NUM_CLASSES))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        loss = (self.head(x) + self.shift).square().mean()
        self.shift.mul_(0.5)
        return loss


class AssignsByOperators(nn.Module):
    """Writes results in place by the operators of Python whose methods have no such name in torch: `&=` is `bitwise_and_`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.codes = nn.Embedding(NUM_CLASSES, NUM_CLASSES)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        h = self.head(x)
        kept = h > -1.0
        kept &= h < 1.0
        kept ^= h > 0.5
        kept |= h > 2.0
        code = h.argmax(1)
        code <<= 2
        code >>= 1
        code //= 2
        code %= NUM_CLASSES
        return ((h * kept).square().sum(1) * seen + self.codes(code).sum(1)).mean()


@pytest.mark.parametrize("kind", [Codebook, Anneals, WritesWhatItIsGiven, AssignsByOperators])
def test_a_buffer_has_the_values_that_it_had_when_it_was_read(kind: type[nn.Module]) -> None:
    check_plans_train_alike(kind, [_given(seed) for seed in range(3)])


class Doubles(nn.Module):
    """Writes into its input, as a cheap normalisation does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.mul_(2)).square().mean()


def _halves(files: list[str]) -> list[tuple[str, bool, bool]]:
    """For each plan: whether the caller's tensor was written as on one process, and whether a warning spoke of that."""
    found = []
    for file in files:
        model, x = shardscope.apply(Doubles(), shardscope.load_plan(file)), _given(0)[0]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model(x, global_batch=True)
        written = torch.allclose(x, 2 * _given(0)[0])
        found.append((file, written, any("writes into an input" in str(w.message) for w in told)))
    return found


def test_a_caller_is_told_if_its_tensor_is_written_in_part(tmp_path: Path) -> None:
    _, files = saved_plans(Doubles(), _given(0)[:1], tmp_path)
    rows = run_ranks(_halves, 2, (files,))[0]
    assert all(told != written for _, written, told in rows), rows
    assert any(told for *_, told in rows)


def test_a_plan_is_made_without_a_trace_in_inputs_and_buffers(tmp_path: Path) -> None:
    given, model = _given(0), WritesWhatItIsGiven()
    saved_plans(model, given, tmp_path)
    assert all(map(torch.equal, given, _given(0)))
    assert not model.steps.any() and not model.offset.any()
