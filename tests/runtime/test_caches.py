"""Caches that the first call fills and later ones read: planned and run as generated code, or refused with what helps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner_core as shardscope
from planner_core.core import CaptureError
from tests.support.plans_train_alike import check_plans_train_alike, refusal_of
from tests.support.ranks import run_ranks
from tests.support.saved_plans import TWO, saved_plans

WIDTH, LENGTH = 32, 16


class Rotary(nn.Module):
    """Adds positions, which `table` makes at the first call and keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 8)

    def table(self) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(x + self.table()).mean(1), y)


class OfBuffer(Rotary):
    def __init__(self) -> None:
        super().__init__()
        self.kept = None
        self.register_buffer("frequencies", torch.arange(WIDTH) / WIDTH)

    def table(self) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.arange(LENGTH)[:, None] * self.frequencies
        return self.kept.cos()


class AsBuffer(Rotary):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", None, persistent=False)

    def table(self) -> torch.Tensor:
        if self.kept is None:
            self.register_buffer("kept", torch.arange(LENGTH)[:, None] * torch.ones(WIDTH) / LENGTH, persistent=False)
        return self.kept


class Written(Rotary):
    """As rotary-embedding-torch: a frozen weight's product is written into a buffer, and a number says how much of it is."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies, self.length = nn.Parameter(torch.arange(WIDTH) / WIDTH, requires_grad=False), 0
        self.register_buffer("kept", torch.zeros(64, WIDTH), persistent=False)

    def table(self) -> torch.Tensor:
        if self.length >= LENGTH:
            return self.kept[:LENGTH].detach()
        found = torch.arange(LENGTH)[:, None] * self.frequencies
        self.kept[:LENGTH] = found.detach()
        self.length = LENGTH
        return found


class Moving(OfBuffer):
    """A table that is another in each step is a state."""

    def table(self) -> torch.Tensor:
        self.kept = self.frequencies * 1 if self.kept is None else self.kept * 0.5
        return self.kept


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, LENGTH, WIDTH), torch.randint(8, (8,))


def _warm(kind: type[Rotary]) -> Rotary:
    torch.manual_seed(0)
    model = kind()
    if kind is Written:
        model(*_inputs())
    return model


@pytest.mark.parametrize("kind", [OfBuffer, AsBuffer, Written])
def test_a_cache_runs_as_generated_code(kind: type[Rotary]) -> None:
    check_plans_train_alike(partial(_warm, kind), [_inputs()] * 3)


def test_a_first_call_with_other_operations_is_refused_with_what_helps() -> None:
    with pytest.raises(CaptureError, match=r"since forward sets length at .*call the model once before it is planned"):
        shardscope.plan(Written(), inputs=_inputs(), cluster=TWO)


def test_a_table_that_moves_is_a_state() -> None:
    with pytest.raises(CaptureError, match=r"forward sets kept at .*buffer"):
        shardscope.plan(Moving(), inputs=_inputs(), cluster=TWO)


class Grown(nn.Module):
    """Has a table for the longest length so far, whose values depend on that length."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kept = nn.Linear(WIDTH, 8), None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.kept is None or len(self.kept) < x.shape[1]:
            self.kept = torch.linspace(0, 1, x.shape[1])[:, None]
        return F.cross_entropy(self.body((x + self.kept[: x.shape[1]]).tanh()).mean(1), y)


def _lengths(file: str) -> list[str]:
    """What a shorter and a longer input say after the first."""
    torch.manual_seed(0)
    model: Any = shardscope.apply(Grown(), shardscope.load_plan(file))
    inputs = [(torch.randn(8, length, WIDTH), torch.arange(8)) for length in (LENGTH, LENGTH // 2, 2 * LENGTH)]
    return [refusal_of(partial(model, *batch, global_batch=True)) for batch in inputs]


def test_a_table_that_grows_is_refused_and_not_taken_as_it_was(tmp_path: Path) -> None:
    """One process would read the table for the longest length from then on, and what was recorded before would not."""
    _, files = saved_plans(Grown(), _inputs(), tmp_path)
    first, shorter, longer = run_ranks(_lengths, 2, (files[0],))[0]
    assert first == shorter == "" and "call the model with its longest inputs before apply" in longer
