"""What a forward pass may leave behind (docs/SUPPORT.md): buffers and scratch, and no state."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from planner_core.core import CaptureError
from planner_core.models.capture.module import capture_module

SHARED = {"calls": 0}
"""What a file's code counts."""


class Model(nn.Module):
    """A layer, and something that `run(model, h)` does with its result."""

    def __init__(self, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.run, self.lin = run, nn.Linear(8, 8)
        self.calls, self.log, self.named, self.kept = 0, list[Any](), dict[str, Any](), None
        self.chance, self.items = random.Random(1), iter([1.0, 0.5, 0.25, 0.125])
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, self.lin(x)).square().mean()


def counts(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    return h


def logs(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.log.append(1)
    return h


def notes(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.named["rows"] = m.named.get("rows", 0) + len(h)
    return h


def counts_in_its_file(m: Any, h: torch.Tensor) -> torch.Tensor:
    SHARED["calls"] += 1
    return h * SHARED["calls"]


def reads_the_step_before(m: Any, h: torch.Tensor) -> torch.Tensor:
    before = m.named.get("h", torch.zeros(8))
    m.named["h"] = h.detach().mean(0)
    return h + before


def adds_to_a_new_list(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.log = [*m.log, 1]
    return h


def grows(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.kept = torch.ones(1) if m.kept is None else m.kept + 1
    return h * m.kept


def draws_from_its_own(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h * m.chance.random()


def takes_the_next(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h * next(m.items)


STATES: list[tuple[Callable[..., Any], str]] = [
    (counts, r"forward sets calls at .*test_policy\.py:\d+ .*register_buffer"),
    (logs, r"forward sets log\.\d+"),
    (adds_to_a_new_list, r"forward sets log"),
    (notes, r"forward sets named\.rows"),
    (counts_in_its_file, "does something else at its next call"),
    (reads_the_step_before, r"reads what the step before has left in named\.h"),
    (grows, r"forward sets kept at|does something else at its next call"),
    (draws_from_its_own, r"forward sets chance|does something else at its next call"),
    (takes_the_next, "does something else at its next call"),
]


@pytest.mark.parametrize(("run", "says"), STATES, ids=lambda c: getattr(c, "__name__", ""))
def test_a_state_outside_of_buffers_is_refused(run: Any, says: str) -> None:
    SHARED["calls"] = 0
    with pytest.raises(CaptureError, match=says) as error:
        capture_module(Model(run), {"x": torch.zeros(4, 8)})
    assert "; " in str(error.value)  # what would help


def writes_a_buffer(m: Any, h: torch.Tensor) -> torch.Tensor:
    shifted = h - m.mean
    m.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return shifted


def keeps_for_this_pass(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.kept = h.relu()
    return h + m.kept


def fills_a_table(m: Any, h: torch.Tensor) -> torch.Tensor:
    if m.kept is None:
        m.kept = torch.arange(8.0)
    return h * m.kept


def makes_scratch_anew(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.named, m.log = {"h": h}, [h.shape[0], ["relu"]]
    found = m.named["h"].relu() * m.log[0]
    m.named = {}
    return found


SCRATCH = [writes_a_buffer, keeps_for_this_pass, fills_a_table, makes_scratch_anew]


@pytest.mark.parametrize("run", SCRATCH, ids=lambda c: c.__name__)
def test_buffers_scratch_and_tables_are_no_state(run: Any) -> None:
    graph = capture_module(Model(run), {"x": torch.zeros(4, 8)}, flat=True)
    said = any("keeps a computed tensor in kept" in note for note in graph.assumptions)
    assert graph.top.ops and said == (run is keeps_for_this_pass)


class Patches(nn.Module):
    """Guesses the patches that `hidden` [samples, patches] hides from it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        seen = self.lin(x[~hidden].reshape(len(x), -1, 8))
        return (self.lin(x)[hidden, :].view(len(x), -1, 8) - seen.mean(1, keepdim=True)).square().mean()


def test_a_mask_that_picks_as_many_of_each_sample_is_planned() -> None:
    hidden = torch.tensor([[True, False, True, False], [False, True, True, False]])
    graph = capture_module(Patches(), {"x": torch.zeros(2, 4, 8), "hidden": hidden})
    assert any("picks 2 of 4 elements of each sample" in note for note in graph.assumptions)
    picks = [op for op in graph.top.ops if op.fn == "take_along_dim"]
    assert [graph.top.values[op.outputs[0]].meta.shape for op in picks] == [(2, 2, 8)]


def test_a_mask_that_picks_more_of_one_sample_is_refused() -> None:
    hidden = torch.tensor([[True, False, True, False], [True, True, True, False]])
    with pytest.raises(CaptureError, match="picks as many elements as the values of its inputs say"):
        capture_module(Patches(), {"x": torch.zeros(2, 4, 8), "hidden": hidden})


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).relu()


class Exchanging(nn.Module):
    """Puts a new part in place of its own at its first call, as BigBird does for short sequences; `keeps` its weights."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.part, self.keeps, self.is_new = Part(), keeps, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_new:
            other = Part()
            other.lin = self.part.lin if self.keeps else other.lin
            self.part, self.is_new = other, True
        return self.part(x).square().mean()


def test_a_part_that_the_first_pass_makes_has_the_old_weights_or_is_refused() -> None:
    graph = capture_module(Exchanging(True), {"x": torch.zeros(4, 8)}, flat=True)
    assert [op.name for op in graph.top.ops][:2] == ["part.lin/linear", "part/relu"]
    assert sorted(v.name for v in graph.top.values if v.kind == "parameter") == ["part.lin.bias", "part.lin.weight"]
    with pytest.raises(CaptureError, match="needs a gradient and is no parameter of the model"):
        capture_module(Exchanging(False), {"x": torch.zeros(4, 8)}, flat=True)
