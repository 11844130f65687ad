"""Arguments that a recording would keep as they were at the first call are refused where the model is planned."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import SequenceKey

from planner_core.core import InputError
from planner_core.models.sources import (
    argument_name,
    argument_state,
    explain_unsupported,
    is_unknown_input,
    lacks_samples,
    module_source,
)
from planner_core.models.sources.arguments import list_inputs_by_samples

BATCHES: list[int] = []


def _doubled(t: torch.Tensor) -> torch.Tensor:
    return torch.add(t, t)


class Scaled(nn.Module):
    def __init__(self, by: float | list[float]) -> None:
        super().__init__()
        self.by = by


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


class Taking(nn.Module):
    def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:
        return x.sum()


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    "other",
    [
        np.zeros(3),
        {1, 2},
        iter([X]),
        (X for _ in range(2)),
        SimpleNamespace(w=1.0),
        Batch(X),
        object(),
        lambda t: BATCHES,
        slice(2),
        Scaled([2.0]),
    ],
)
def test_what_torch_does_not_look_into_is_refused(other: Any) -> None:
    with pytest.raises(
        InputError, match=f"argument 2 is of type {type(other).__name__}, into which a plan does not look"
    ):
        module_source(Taking(), (X, other))


def test_a_module_with_weights_is_refused_as_an_argument() -> None:
    with pytest.raises(InputError, match="other is of type Linear, a module with weights"):
        module_source(Taking(), {"x": X, "other": nn.Linear(2, 2)})


@pytest.mark.parametrize(
    "other",
    [
        None,
        1.5,
        np.int64(3),
        "word",
        nn.ReLU(),
        torch.relu,
        {"a": [X, 2]},
        torch.float32,
        range(2),
        nn.functional.relu,
        _doubled,
        nn.CrossEntropyLoss(torch.ones(3)),
        Scaled(2.0),
    ],
)
def test_tensors_numbers_words_and_functions_are_taken(other: Any) -> None:
    assert explain_unsupported((X, other), {}) == ""
    module_source(Taking(), (X, other))


def test_arguments_that_are_equal_but_not_the_same_are_told_apart() -> None:
    loss = Scaled(1)
    seen = [argument_state(x) for x in (1, True, 1.0, 0.0, -0.0, loss)]
    loss.by = 2.0
    assert len({*seen, argument_state(loss)}) == 7


def test_inputs_without_samples_are_known_by_their_places() -> None:
    found = list_inputs_by_samples(Taking(), (X, [torch.ones(5), torch.ones(1, 3)]), {})
    assert found == {"inputs_without_samples": ["other[0]"], "inputs_with_samples": ["x", "other[1]"]}
    assert [lacks_samples(n, found) for n in ("other[0]", "other[1]", "other[2]", "x")] == [True, False, False, False]
    found = list_inputs_by_samples(Taking(), (X, {"a": torch.ones(5)}), {})
    assert lacks_samples("other['b']", found) and not lacks_samples("x", found)
    assert (
        is_unknown_input("argument 2", found)
        and not is_unknown_input("other['b']", found)
        and not is_unknown_input("x", found)
    )
    assert list_inputs_by_samples(Taking(), (X, X), {}) == {} and not is_unknown_input("argument 2", {})


def test_a_place_is_spelled_as_in_the_call() -> None:
    assert argument_name((SequenceKey(0), SequenceKey(1), SequenceKey(0))) == "argument 2[0]"
