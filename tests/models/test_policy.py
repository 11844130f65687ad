"""What a forward pass may leave behind (docs/SUPPORT.md): buffers and scratch, and no state."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from planner_core.core import CaptureError
from planner_core.models.capture.module import capture_module
from planner_core.models.hooks.module_state import MAX_VALUES

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


class Slots:
    """An object without a dict."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Counter(SimpleNamespace):
    """An object of a user's module whose name begins as that of Python's `logging`, for which it was taken."""

    __module__ = "logging_of_my_lab"


class Deep(Model):
    """Has containers in containers, large ones, and other objects."""

    calls_of_all = 0

    def __init__(self, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(run)
        self.options: dict[str, dict[str, int]] = {"loss": {"calls": 0}}
        self.table, self.seen = dict.fromkeys(range(100), 0), list(range(70))
        self.history, self.objects, self.pair = [list[int]()], [SimpleNamespace(calls=0)], ([0], "name")
        self.config = SimpleNamespace(**{f"field_{i}": i for i in range(80)})
        self.slots, self.members, self.array = Slots(), {0}, np.zeros(3)
        self.counter = Counter(calls=0)


def _set_nested(m: Any) -> None:
    m.options["loss"]["calls"] += 1


def _set_in_table(m: Any) -> None:
    m.table[99] += 1


def _set_in_config(m: Any) -> None:
    m.config.field_79 += 1


def _set_in_object(m: Any) -> None:
    m.objects[0].calls += 1


def _set_in_slots(m: Any) -> None:
    m.slots.calls += 1


def _set_in_tuple(m: Any) -> None:
    m.pair[0][0] += 1


def _set_in_class(m: Any) -> None:
    type(m).calls_of_all += 1


def _set_in_counter(m: Any) -> None:
    m.counter.calls += 1


def _write_array(m: Any) -> None:
    m.array[2] += 1


DEEP: list[tuple[Callable[[Any], Any], str]] = [
    (_set_nested, r"options\.loss\.calls"),
    (_set_in_table, r"table\.99"),
    (lambda m: m.history[0].append(1), r"history\.0\.0"),
    (lambda m: m.seen.append(1), r"seen\.70"),
    (_set_in_config, r"config\.field_79"),
    (_set_in_object, r"objects\.0\.calls"),
    (_set_in_slots, r"slots\.calls"),
    (_set_in_tuple, r"pair\.0\.0"),
    (lambda m: m.members.add(len(m.members)), r"members\.1"),
    (_set_in_class, r"Deep\.calls_of_all"),
    (_write_array, "array"),
    (_set_in_counter, r"counter\.calls"),
]


@pytest.mark.parametrize(("change", "name"), DEEP, ids=[name for _, name in DEEP])
def test_a_state_is_noticed_at_any_depth_and_size(change: Callable[[Any], Any], name: str) -> None:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        change(m)
        return h

    with pytest.raises(CaptureError, match=f"forward sets {name}, so a step depends"):
        capture_module(Deep(run), {"x": torch.zeros(4, 8)})


@pytest.mark.parametrize("values", [list(range(MAX_VALUES + 1)), np.zeros(MAX_VALUES + 1)], ids=["list", "array"])
def test_more_values_than_can_be_compared_are_refused(values: Any) -> None:
    model = Model(lambda m, h: h)
    model.log = values
    with pytest.raises(CaptureError, match=r"hold more than 1,000,000 values .* keep numbers in a buffer"):
        capture_module(model, {"x": torch.zeros(4, 8)})


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
