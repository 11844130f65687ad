"""Values count in whatever a model keeps them, changed by a loop between two steps or by forward itself in each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner_core as shardscope
from planner_core.core import CaptureError
from planner_core.verification.processes import run_ranks
from tests.support.saved_plans import saved_plans

WIDTH, KINDS = 16, 8


class Slots:
    """Holds a number without a `__dict__`."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 1


@dataclass(frozen=True, slots=True)
class Fixed:
    """A setting that cannot be set again."""

    number: int


def _closure() -> tuple[Callable[[], int], Callable[[], None]]:
    number = 1

    def read() -> int:
        return number

    def grow() -> None:
        nonlocal number
        number += 1

    return read, grow


def _same(h: torch.Tensor, times: int) -> torch.Tensor:
    return h * times


class Kept(nn.Module):
    """`kind` says in what a number is kept. If it `counts`, forward adds one to it in each pass."""

    def __init__(self, kind: str, *, counts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.counts, self.head = kind, counts, nn.Linear(WIDTH, KINDS)
        self.queue, self.kinds, self.array, self.slots = deque([1], maxlen=40), {1}, np.ones(3, dtype=np.int64), Slots()
        self.fixed, self.constant = Fixed(2), np.ones(2)
        self.constant.flags.writeable = False
        self.bytes, self.partial, self.tensors = bytearray(b"1"), partial(_same, times=1), [torch.ones(1)]
        self.read, self.add = _closure()

    def grow(self) -> None:
        """Add one to the number."""
        if self.kind == "queue":
            self.queue.append(1)
        elif self.kind == "set":
            self.kinds.add(len(self.kinds) + 1)
        elif self.kind == "array":
            self.array[0] += 1
        elif self.kind == "slots":
            self.slots.number += 1
        elif self.kind == "bytes":
            self.bytes.append(1)
        elif self.kind == "partial":
            self.partial = partial(_same, times=self.partial.keywords["times"] + 1)
        elif self.kind == "closure":
            self.add()
        else:
            self.tensors[0] += 1

    def times(self) -> Any:
        """The number."""
        return {
            "queue": len(self.queue), "set": len(self.kinds), "array": int(self.array[0]), "slots": self.slots.number,
            "bytes": len(self.bytes), "closure": self.read(), "partial": 1, "tensor": self.tensors[0],
        }[self.kind]  # fmt: skip

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.grow()
        return F.cross_entropy(self.partial(self.head(x)) * self.times(), y)


ALL = ("queue", "set", "array", "slots", "bytes", "partial", "closure", "tensor")
CASES = [(kind, counts) for kind in ALL for counts in (False, True)]


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)), torch.arange(8)


def _losses(model: Any, **options: Any) -> list[float]:
    found = []
    for _ in range(3):
        found.append(float(model(*_inputs(), **options).detach()))
        if not model.counts:
            model.grow()
    return found


def _run(files: list[str]) -> list[tuple[str, list[float], list[float]]]:
    found = []
    for (kind, counts), file in zip(CASES, files, strict=True):
        model = shardscope.apply(Kept(kind, counts=counts), shardscope.load_plan(file))
        found.append((file, _losses(Kept(kind, counts=counts)), _losses(model, global_batch=True)))
    return found


def test_numbers_count_in_whatever_they_are_kept(tmp_path: Path) -> None:
    files = []
    for kind, counts in CASES:
        _, named = saved_plans(Kept(kind, counts=counts), _inputs(), tmp_path, f"{kind} {counts} ")
        files.append(next(f for f in named if f.endswith("data parallel")))
    for file, wanted, got in run_ranks(_run, 2, (files,))[0]:
        assert len(set(wanted)) == 3, file
        assert got == pytest.approx(wanted, rel=1e-5), file


class Perceptual(nn.Module):
    """Hooks that its constructor makes give it what its layers compute: one sees the model, one a list, one a number around it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH), nn.ReLU())
        self.head, self.seen = nn.Linear(WIDTH, KINDS), list[torch.Tensor]()
        kept, scale = list[torch.Tensor](), 0.5
        self.kept = kept
        self.body[1].register_forward_hook(lambda module, given, out: self.seen.append(out))
        self.body[3].register_forward_hook(lambda module, given, out: kept.append(scale * out))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        self.kept.clear()
        loss = F.cross_entropy(self.head(self.body(x)), y)
        for h in (*self.seen, *self.kept):
            loss = loss + h.square().mean()
        return loss


def _hooked(files: list[str]) -> list[tuple[float, float]]:
    alone = float(Perceptual()(*_inputs()).detach())
    found = []
    for file in files:
        model = shardscope.apply(Perceptual(), shardscope.load_plan(file))
        found.append((alone, float(model(*_inputs(), global_batch=True).detach())))
    return found


def test_hooks_of_a_constructor_are_those_of_the_copy_that_is_planned(tmp_path: Path) -> None:
    _, files = saved_plans(Perceptual(), _inputs(), tmp_path)
    for wanted, got in run_ranks(_hooked, 2, (files,))[0]:
        assert got == pytest.approx(wanted, rel=1e-5)


class Stateful(nn.Module):
    """An LSTM that goes on where the last batch ended."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.body, self.kind, self.state = nn.LSTM(WIDTH, WIDTH, batch_first=True), kind, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, state = self.body(x, self.state and tuple(self.state))
        self.state = self.kind(s.detach() for s in state)
        return (h - 1).square().mean()


@pytest.mark.parametrize("kind", [tuple, list, deque, frozenset])
def test_a_state_of_several_tensors_that_goes_on_is_refused_before_it_is_planned(kind: type) -> None:
    with pytest.raises(CaptureError, match=r"reads in each step what the step before has left in state"):
        shardscope.plan(Stateful(kind), inputs=(torch.randn(8, 4, WIDTH),), cluster="1x2-h100")


SEEN: dict[str, torch.Tensor] = {}


class Outward(nn.Module):
    """Keeps what it has computed in a dict of its file, and reads it in the next step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, KINDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.head(x)
        loss = F.cross_entropy(h, y)
        if "h" in SEEN:
            loss = loss + F.mse_loss(h, SEEN["h"])
        SEEN["h"] = h.detach()
        return loss


def _told(file: str) -> str:
    SEEN.clear()
    model = shardscope.apply(Outward(), shardscope.load_plan(file))
    model(*_inputs(), global_batch=True)
    try:
        model(*_inputs(), global_batch=True)
    except shardscope.PlanMismatch as error:
        return str(error)
    return ""


def test_a_state_that_stands_outside_of_the_model_is_not_ignored(tmp_path: Path) -> None:
    _, files = saved_plans(Outward(), _inputs(), tmp_path)
    SEEN.clear()
    assert "is not in the plan" in run_ranks(_told, 2, (files[0],))[0]
