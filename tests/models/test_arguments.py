"""Arguments that a recording would keep as they were at the first call are refused where the model is planned."""

from __future__ import annotations

import dataclasses
from functools import partial
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
        slice(2),
    ],
)
def test_what_torch_does_not_look_into_is_refused(other: Any) -> None:
    with pytest.raises(
        InputError, match=f"argument 2 is of type {type(other).__name__}, into which a plan does not look"
    ):
        module_source(Taking(), (X, other))


@pytest.mark.parametrize(
    "other",
    [
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
        torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged),
    ],
)
def test_a_tensor_that_is_not_dense_is_refused(other: torch.Tensor) -> None:
    """A sparse one as well: no operator of a graph could take it, so that it was refused later, or lay unread."""
    with pytest.raises(InputError, match=r"other is a tensor of kind .*; give it dense"):
        module_source(Taking(), {"x": X, "other": other})


@pytest.mark.parametrize("other", [nn.Linear(2, 2), nn.ReLU(), partial(torch.add, X), lambda t: t, nn.functional.relu])
def test_code_is_refused_as_an_argument(other: Any) -> None:
    with pytest.raises(InputError, match=f"other is of type {type(other).__name__}, code that .* a part of the model"):
        module_source(Taking(), {"x": X, "other": other})


@pytest.mark.parametrize(
    "other",
    [
        None,
        1.5,
        np.int64(3),
        "word",
        torch.relu,
        {"a": [X, 2]},
        torch.float32,
        range(2),
    ],
)
def test_tensors_numbers_and_words_are_taken(other: Any) -> None:
    assert explain_unsupported((X, other), {}) == ""
    module_source(Taking(), (X, other))


def test_arguments_that_are_equal_but_not_the_same_are_told_apart() -> None:
    assert len({argument_state(x) for x in (1, True, 1.0, 0.0, -0.0)}) == 5


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
