"""A listener of a recorder gets every call of a pass once, with the numbers and the names of call sites that the graph has."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner_core.models.capture import CallKind, FunctionCall, PassListener, Record, Recorder, Scope, ValueTable


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        weight = 2.0 if keep.all() else 1.0
        positions = torch.arange(8)
        positions += 1
        hidden = F.dropout(self.up(x), 0.5)
        return (hidden * weight + positions.to(hidden.dtype)).sum()


class Events(PassListener):
    """Writes down what it is told."""

    def __init__(self, values: ValueTable, draws_masks: bool) -> None:
        self.values, self.draws_masks = values, draws_masks
        self.found: list[tuple[Any, ...]] = []

    def before_call(self, kind: CallKind, call: FunctionCall, scope: Scope) -> None:
        self.found.append(("before", kind, call.name, scope.path, [self.values.find(t) for t in call.operands]))

    def after_constant(self, call: FunctionCall, out: Any) -> None:
        self.found.append(("constant", call.name))

    def after_operator(self, call: FunctionCall, record: Record, out: Any) -> None:
        self.found.append(("operator", record.site, record.outputs == (self.values.number(out),)))

    def after_dropout(self, call: FunctionCall, number: int) -> None:
        self.found.append(("dropout", call.name, self.values.recording.values[number].kind))

    def after_question(self, call: FunctionCall, scope: Scope, answer: Any) -> None:
        self.found.append(("question", call.name, answer))


def _events(draws_masks: bool) -> list[tuple[Any, ...]]:
    recorder = Recorder(Net().to("meta"))
    recorder.listener = listener = Events(recorder.values, draws_masks)
    recorder.run({"x": torch.randn(2, 8, device="meta"), "keep": torch.ones(2, dtype=torch.bool)})
    return listener.found


def test_each_call_is_reported_before_and_after_it_runs() -> None:
    found = _events(draws_masks=True)
    assert [e[1:] for e in found if e[0] == "question"] == [("__bool__", True)]
    assert [e[1:3] for e in found if e[0] == "before"] == [
        ("constant", "all"),
        ("constant", "arange"),
        ("constant", "add_"),
        ("op", "linear"),
        ("dropout", "dropout"),
        ("op", "mul"),
        ("constant", "to"),
        ("op", "add"),
        ("op", "sum"),
    ]
    # No call comes between a call's two events, and the module call is that of the operator.
    ends = [e for e in found if e[0] != "question"]
    assert [e[0] for e in ends[::2]] == ["before"] * 9
    assert [e[0] for e in ends[1::2]] == [
        {"op": "operator", "constant": "constant", "dropout": "dropout"}[e[1]] for e in ends[::2]
    ]
    assert next(e for e in found if e[0] == "before" and e[2] == "linear")[3] == "up"
    assert [e[1:] for e in found if e[0] == "operator"] == [
        (site, True) for site in ("up/linear", "/mul", "/add", "/sum")
    ]
    assert ("dropout", "dropout", "activation") in found


def test_without_masks_dropout_is_an_operator_that_draws_nothing() -> None:
    found = _events(draws_masks=False)
    assert ("before", "op", "dropout", "") in [e[:4] for e in found]
    assert "dropout" not in [e[0] for e in found]


def test_a_listener_may_say_that_a_constant_had_no_value_when_the_model_was_planned() -> None:
    recorder = Recorder(Net().to("meta"))
    constant = torch.arange(3)
    assert recorder._has_known_values(constant)
    recorder.listener = listener = PassListener()
    listener.has_planned_value = lambda constant: False  # type: ignore[method-assign]
    assert not recorder._has_known_values(constant)
