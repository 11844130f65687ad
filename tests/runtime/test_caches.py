"""Caches that the first call fills and later ones read: planned and run as generated code, or refused with what helps."""

from __future__ import annotations

import copy
import warnings
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


def _three_steps(model: Any, **options: Any) -> list[float]:
    found = []
    for _ in range(3):
        loss = model(*_inputs(), **options)
        found.append(float(loss.detach()))
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
    return found


def _run(kind: type[Rotary], files: list[str]) -> list[tuple[list[float], list[float], list[str]]]:
    wanted, found = _three_steps(copy.deepcopy(_warm(kind))), []
    for file in files:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            got = _three_steps(shardscope.apply(_warm(kind), shardscope.load_plan(file)), global_batch=True)
        found.append((wanted, got, [str(w.message) for w in seen if "operator by operator" in str(w.message)]))
    return found


@pytest.mark.parametrize("kind", [OfBuffer, AsBuffer, Written])
def test_a_cache_runs_as_generated_code(kind: type[Rotary], tmp_path: Path) -> None:
    _, files = saved_plans(_warm(kind), _inputs(), tmp_path)
    for wanted, got, slow in run_ranks(_run, 2, (kind, files))[0]:
        assert got == pytest.approx(wanted, rel=1e-5) and not slow


def test_a_first_call_with_other_operations_is_refused_with_what_helps() -> None:
    with pytest.raises(CaptureError, match=r"since forward sets length, .* call the model once before it is planned"):
        shardscope.plan(Written(), inputs=_inputs(), cluster=TWO)


def test_a_table_that_moves_is_a_state() -> None:
    with pytest.raises(CaptureError, match=r"what the step before has left in kept"):
        shardscope.plan(Moving(), inputs=_inputs(), cluster=TWO)


class Grown(nn.Module):
    """Has a table for the longest length so far, whose values depend on that length. Each kind keeps it elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kept = nn.Linear(WIDTH, 8), None

    def table(self, length: int) -> torch.Tensor:
        if self.kept is None or len(self.kept) < length:
            self.kept = torch.linspace(0, 1, length)[:, None]
        return self.kept[:length]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body((x + self.table(x.shape[1])).tanh()).mean(1), y)


class GrownBuffer(Grown):
    def __init__(self) -> None:
        super().__init__()
        del self.kept
        self.register_buffer("kept", None, persistent=False)


class GrownInDict(Grown):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {}

    def table(self, length: int) -> torch.Tensor:
        if len(self.kept.get("table", ())) < length:
            self.kept["table"] = torch.linspace(0, 1, length)[:, None]
        return self.kept["table"][:length]


class GrownInTuple(Grown):
    def table(self, length: int) -> torch.Tensor:
        if self.kept is None or len(self.kept[0]) < length:
            table = torch.zeros(length, 1)
            table[:, 0] = torch.linspace(0, 1, length)
            self.kept = table, table * 2
        return self.kept[0][:length] + self.kept[1][:length]


class GrownOfClass(Grown):
    longest: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        GrownOfClass.longest = None

    def table(self, length: int) -> torch.Tensor:
        if self.longest is None or len(self.longest) < length:
            GrownOfClass.longest = torch.linspace(0, 1, length)[:, None]
        return self.longest[:length]


class OfLast(Grown):
    """Its table is for the length of the call before, if that was not too short by one."""

    def table(self, length: int) -> torch.Tensor:
        if self.kept is None or not length <= len(self.kept) < length + 3:
            self.kept = torch.linspace(0, 1, length)[:, None]
        return self.kept[:length]


class Sinusoids(Grown):
    """Its values do not depend on the length."""

    def table(self, length: int) -> torch.Tensor:
        if self.kept is None or len(self.kept) < length:
            self.kept = (torch.arange(length)[:, None] * torch.arange(1, WIDTH + 1) / WIDTH).sin()
        return self.kept[:length]


class Anew(Sinusoids):
    """It keeps what it makes in each call, and never reads it."""

    def table(self, length: int) -> torch.Tensor:
        self.kept = torch.linspace(0, 1, length)[:, None]
        return self.kept


LENGTHS = (8, 12, 6, 8, 12, 5, 8, 12, 6, 5)


def _batch(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(k)
    return torch.randn(8, LENGTHS[k], WIDTH, generator=draw), torch.randint(8, (8,), generator=draw)


def _grow(kind: type[nn.Module], reset: bool = False, plan: Any = None) -> tuple[list[float], int]:
    """The losses of steps with batches of several lengths, with an evaluation between, and how many recordings were written as code."""
    torch.manual_seed(0)
    made = kind()
    model = shardscope.apply(made, plan) if plan else made
    options, found = {"global_batch": True} if plan else {}, []
    for k in range(len(LENGTHS)):
        loss = model(*_batch(k), **options)
        found.append(float(loss.detach()))
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        if k == 2:
            with torch.no_grad():
                found += [float(model.eval()(torch.ones(8, n, WIDTH), _batch(0)[1], **options)) for n in (14, 3)]
            model.train()
        if k == 4 and reset:
            model.kept = None
    return found, len({id(r.bound) for r in applied(model).programs.values()}) if plan else 0


def _grow_on_ranks(
    kind: type[nn.Module], files: list[str], reset: bool
) -> list[tuple[list[float], list[float], int, list[str]]]:
    found = []
    for file in files:
        wanted = _grow(kind, reset)[0]
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            got, programs = _grow(kind, reset, shardscope.load_plan(file))
        found.append(
            (wanted, got, programs, [str(w.message) for w in seen if "operator by operator" in str(w.message)])
        )
    return found


class Counted(Grown):
    """A buffer that forward gives to another tensor in each step, and no cache."""

    def __init__(self) -> None:
        super().__init__()
        del self.kept
        self.register_buffer("kept", torch.zeros(()))

    def table(self, length: int) -> torch.Tensor:
        self.kept = self.kept + 1
        return self.kept * torch.ones(length, 1)


GROWN = [Grown, GrownBuffer, GrownInDict, GrownInTuple, GrownOfClass, OfLast]


@pytest.mark.parametrize("kind", [*GROWN, Sinusoids, Anew])
def test_a_table_for_the_longest_length_so_far_is_kept_as_one_process_keeps_it(
    kind: type[Grown], tmp_path: Path
) -> None:
    _, (best, *_, last) = saved_plans(kind(), _batch(0), tmp_path)
    for wanted, got, programs, slow in run_ranks(_grow_on_ranks, 2, (kind, [best, last], False))[0]:
        assert got == pytest.approx(wanted, rel=1e-5) and not slow
        assert programs == 6 or kind in GROWN, (
            "a table whose values do not depend on the length is recorded once a length"
        )


def test_a_cache_that_the_user_empties_is_filled_again(tmp_path: Path) -> None:
    _, files = saved_plans(Grown(), _batch(0), tmp_path)
    for wanted, got, _, slow in run_ranks(_grow_on_ranks, 2, (Grown, files[:1], True))[0]:
        assert got == pytest.approx(wanted, rel=1e-5) and not slow


def test_a_buffer_that_is_another_tensor_after_each_step_runs_the_models_own_code(tmp_path: Path) -> None:
    _, files = saved_plans(Counted(), _batch(0), tmp_path)
    for wanted, got, _, slow in run_ranks(_grow_on_ranks, 2, (Counted, files[:1], False))[0]:
        assert got == pytest.approx(wanted, rel=1e-5) and "sets kept" in slow[0]
