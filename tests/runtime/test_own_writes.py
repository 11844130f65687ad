"""What forward writes in place outlives a step, and recordings leave no trace in it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner_core as shardscope
from tests.support.ranks import run_ranks
from tests.support.saved_plans import saved_plans

WIDTH, KINDS = 16, 8


class WritesWhatItIsGiven(nn.Module):
    """Writes in place into an input, into a view of it, and into buffers and parts of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, KINDS)
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


def _writes(files: list[str]) -> list[tuple[str, list[float], list[float], bool]]:
    found = []
    for file in files:
        alone, model = WritesWhatItIsGiven(), shardscope.apply(WritesWhatItIsGiven(), shardscope.load_plan(file))
        batches = [_given(seed) for seed in range(3)]
        wanted = [float(alone(*(t.clone() for t in batch)).detach()) for batch in batches]
        got = [float(model(*batch, global_batch=True).detach()) for batch in batches]
        found.append((file, wanted, got, bool(torch.equal(model.steps, alone.steps))))
    return found


def _given(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(8, WIDTH, generator=made), torch.rand(8, generator=made) > 0.5


class Codebook(nn.Module):
    """As the VQ-VAE of the public repositories: means that are written through `.data`, also with what has a gradient, and read after it
    and before it. A rate is used, and then made smaller."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, KINDS)
        self.register_buffer("codes", torch.randn(KINDS, 6, generator=drawn))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("rate", torch.ones(1))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        nearest = torch.cdist(z, self.codes.t()).argmin(1)
        hot = F.one_hot(nearest, 6).to(z.dtype)
        found = hot @ self.codes.t()
        self.counts.data.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        self.sums.data.lerp_(z.t() @ hot, 0.1)
        self.codes.data.copy_(self.sums / self.counts.clamp_min(0.1))
        loss = (z - found.detach()).square().mean() + (z * self.rate).mean()
        self.rate.data.mul_(0.5)
        return loss


class Anneals(nn.Module):
    """Uses a number, and then makes it smaller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, KINDS)
        self.register_buffer("shift", torch.ones(KINDS))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        loss = (self.head(x) + self.shift).square().mean()
        self.shift.mul_(0.5)
        return loss


def _trains(kind: type[nn.Module], files: list[str]) -> list[tuple[str, list[float], list[float], list[str]]]:
    """For each plan: the losses of one process and under the plan, and the buffers that differ at the end."""
    found = []
    for file in files:
        alone, model = kind(), shardscope.apply(kind(), shardscope.load_plan(file))
        wanted, got = (
            [_step(m, _given(seed), **how) for seed in range(3)]
            for m, how in ((alone, {}), (model, {"global_batch": True}))
        )
        off = [n for n, b in alone.named_buffers() if not torch.allclose(b, model.state_dict()[n], atol=1e-5)]
        found.append((file, wanted, got, off))
    return found


def _step(model: nn.Module, batch: tuple[torch.Tensor, ...], **how: bool) -> float:
    loss = model(*batch, **how)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("kind", [Codebook, Anneals])
def test_a_buffer_has_the_values_that_it_had_when_it_was_read(kind: type[nn.Module], tmp_path: Path) -> None:
    _, files = saved_plans(kind(), _given(0), tmp_path)
    for file, wanted, got, off in run_ranks(_trains, 2, (kind, files))[0]:
        assert got == pytest.approx(wanted, rel=1e-5), file
        assert not off, file


class Doubles(nn.Module):
    """Writes into its input, as a cheap normalisation does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, KINDS)

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


def test_what_forward_writes_in_place_is_written_once_in_each_step(tmp_path: Path) -> None:
    given, model = _given(0), WritesWhatItIsGiven()
    _, files = saved_plans(model, given, tmp_path)
    assert all(map(torch.equal, given, _given(0)))
    assert not model.steps.any() and not model.offset.any()
    for file, wanted, got, counted in run_ranks(_writes, 2, (files,))[0]:
        assert got == pytest.approx(wanted, rel=1e-5), file
        assert counted, file
