"""A mask of the inputs picks another number of elements in each batch: every plan runs each, and none splits them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner_core as shardscope
from planner_core.core import CaptureError
from planner_core.runtime.library import applied
from planner_core.verification.processes import run_ranks
from tests.support.saved_plans import TWO, saved_plans

KINDS, WIDTH = 64, 32


class MaskedLoss(nn.Module):
    """Its loss is at labelled tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = (
            nn.Embedding(KINDS, WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.head = nn.Linear(WIDTH, KINDS)

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        h = h + self.down(F.gelu(self.up(h)))
        labelled = y != -100
        return F.cross_entropy(self.head(h[labelled]), y[labelled])


def _batch(seed: int, labelled: float = 0.6) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    ids, y = (torch.randint(0, KINDS, (8, 16), generator=made) for _ in range(2))
    return ids, torch.where(torch.rand(8, 16, generator=made) < labelled, y, torch.tensor(-100))


def _losses(files: list[str]) -> list[list[tuple[int, float, float]]]:
    found = []
    for file in files:
        torch.manual_seed(0)
        alone = MaskedLoss()
        model: Any = shardscope.apply(copy.deepcopy(alone), shardscope.load_plan(file))
        rows = []
        for seed in range(4):
            ids, y = _batch(seed)
            rows.append((int((y != -100).sum()), float(alone(ids, y)), float(model(ids, y, global_batch=True))))
        found.append(rows)
    return found


def test_any_number_of_picked_elements_runs_under_every_plan(tmp_path: Path) -> None:
    report, files = saved_plans(MaskedLoss(), _batch(9, 0.5), tmp_path)
    assert any("the values of each batch say how many elements there are at" in note for note in report.notes)
    for found in run_ranks(_losses, 2, (files,), timeout_s=200):
        for plan, rows in zip(report.plans, found, strict=True):
            assert {n % 2 for n, _, _ in rows} == {0, 1}
            assert [got for _, _, got in rows] == pytest.approx([alone for _, alone, _ in rows], rel=1e-5), plan.name


def test_a_mask_that_picks_none_in_the_example_is_no_mask_of_none() -> None:
    ids, y = _batch(0, 0.0)
    y[0, 0] = 3  # a loss of none is no number
    notes = shardscope.plan(MaskedLoss(), inputs=(ids, y), cluster=TWO).notes
    assert any("the values of each batch say how many elements there are at" in note for note in notes)


class AsManyForEach(MaskedLoss):
    """Needs the same number of labelled tokens in each sample, as masked autoencoders do."""

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)[y != -100].reshape(len(ids), -1, WIDTH)
        return F.cross_entropy(self.head(h).flatten(0, 1), y[y != -100])


def test_a_number_that_the_model_fixes_may_be_split() -> None:
    ids, y = _batch(0, 1.0)
    y[:, ::2] = -100
    report = shardscope.plan(AsManyForEach(), inputs=(ids, y), cluster=TWO)
    assert not any("the values of each batch" in note for note in report.notes)


class ByNumber(MaskedLoss):
    """Does one thing or another, as the number of labelled tokens says."""

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)[y != -100]
        h = h if len(h) % 2 else h.relu()
        return F.cross_entropy(self.head(h), y[y != -100])


def test_a_way_that_depends_on_the_number_is_refused_before_it_is_planned() -> None:
    with pytest.raises(CaptureError, match="does other operations where the values of a batch say another number"):
        shardscope.plan(ByNumber(), inputs=_batch(0), cluster=TWO)


class Asking(MaskedLoss):
    """Runs one layer more if any sample is long. It counts its steps before it asks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        h = self.embed(ids) / self.steps
        if (lengths > 10).any():
            h = h + self.down(F.gelu(self.up(h)))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Trimmed(MaskedLoss):
    """Cuts all samples to the length of the longest."""

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        longest = int(lengths.max())
        return F.cross_entropy(self.head(self.embed(ids[:, :longest])).flatten(0, 1), y[:, :longest].flatten())


def _trimmed(longest: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The longest sample is the last one, so one of the ranks has shorter ones alone."""
    ids, y = _batch(longest, 1.0)
    return ids, torch.tensor([3] * 7 + [longest]), y


def _steps(made: type[MaskedLoss], files: list[str]) -> list[tuple[list[float], list[float]]]:
    found = []
    for file in files:
        torch.manual_seed(0)
        alone = made()
        model: Any = shardscope.apply(copy.deepcopy(alone), shardscope.load_plan(file))
        batches = [_trimmed(n) for n in (16, 12, 8, 16, 8)]
        losses = []
        for batch in batches:
            losses.append(model(*batch, global_batch=True))
            losses[-1].backward()  # gradients are summed over ranks: all must come
        parallel = applied(model)
        assert parallel.dispatched or len(parallel.programs) == (3 if made is Trimmed else 2)
        found.append(([float(alone(*b)) for b in batches], [float(loss) for loss in losses]))
    return found


@pytest.mark.parametrize("made", [Trimmed, Asking])
def test_what_all_samples_say_is_not_what_a_ranks_own_say(made: type[MaskedLoss], tmp_path: Path) -> None:
    report, files = saved_plans(made(), _trimmed(16), tmp_path)
    assert "data parallel" in [p.name for p in report.plans]
    for found in run_ranks(_steps, 2, (made, files), timeout_s=200):
        for plan, (alone, got) in zip(report.plans, found, strict=True):
            assert got == pytest.approx(alone, rel=1e-5), plan.name


class Counted(MaskedLoss):
    """Computes with numbers of elements that the values of a batch say."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        h = h + self.down(F.gelu(self.up(h)))
        return getattr(self, "_" + self.how)(h, ids, y)

    def _nonzero(self, h: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        labelled = (y != -100).flatten().nonzero().squeeze(1)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten(), reduction="sum") / labelled.numel()

    def _length(self, h: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        picked = h[y != -100]
        return self.head(picked).square().sum() / len(picked)

    def _unique(self, h: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kinds, which = torch.unique(ids, return_inverse=True)
        pooled = h.new_zeros(len(kinds), WIDTH).index_add(0, which.flatten(), h.flatten(0, 1))
        return self.head(pooled).square().mean()

    def _bincount(self, h: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        often = torch.bincount(ids.flatten())
        losses = F.cross_entropy(self.head(h).flatten(0, 1), ids.flatten(), reduction="none")
        return (losses * often[ids.flatten()]).mean() / len(often)

    def _repeated(self, h: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        again = torch.repeat_interleave(torch.arange(len(ids)), (y != -100).sum(1))
        return F.cross_entropy(self.head(h.mean(1)[again]), y[y != -100])

    def _one_hot(self, h: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wanted = F.one_hot(ids).float()
        return F.mse_loss(self.head(h)[..., : wanted.shape[-1]], wanted)


WAYS = ("nonzero", "length", "unique", "bincount", "repeated", "one_hot")


def _counted(files: dict[str, list[str]]) -> list[tuple[str, list[float], list[float]]]:
    found = []
    for how, named in files.items():
        for file in named:
            torch.manual_seed(0)
            alone = Counted(how)
            model: Any = shardscope.apply(copy.deepcopy(alone), shardscope.load_plan(file))
            batches = [_batch(seed) for seed in range(3)]
            losses = [model(*b, global_batch=True) for b in batches]
            losses[-1].backward()
            found.append((how, [float(alone(*b)) for b in batches], [float(loss) for loss in losses]))
    return found


def test_numbers_of_elements_are_those_of_each_batch(tmp_path: Path) -> None:
    files = {how: saved_plans(Counted(how), _batch(9, 0.5), tmp_path, f"{how} ")[1] for how in WAYS}
    for found in run_ranks(_counted, 2, (files,), timeout_s=300):
        assert {how for how, *_ in found} == set(WAYS)
        for how, alone, got in found:
            assert got == pytest.approx(alone, rel=1e-5), how
