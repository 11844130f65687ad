"""A module that a user has in Python is copied onto meta with all that it holds, and what cannot be copied is named."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from planner_core.core import CaptureError
from planner_core.models.capture.module import capture_module
from planner_core.models.sources import module_source

X = torch.zeros(4, 8)


def _normed() -> nn.Module:
    return torch.nn.utils.weight_norm(nn.Linear(8, 8))  # type: ignore[no-untyped-call,no-any-return]


def _spectral() -> nn.Module:
    return torch.nn.utils.spectral_norm(nn.Linear(8, 8))


class Keeps(nn.Module):
    """Holds tensors that were computed from its weights when it was made."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.lin, self.reads = nn.Linear(8, 8), reads
        self.last = {"rows": [self.lin.weight * 2]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * (self.last["rows"][0].sum() if self.reads else 1)


class Reaches(nn.Module):
    """Reads a tensor of another layer, which it reaches by a way that a copy does not have."""

    table: ClassVar[list[nn.Module]] = []

    def __init__(self, other: nn.Module, read: Callable[[nn.Module], torch.Tensor], weakly: bool) -> None:
        super().__init__()
        self.lin, self.read = nn.Linear(8, 8), read
        self.other: Callable[[], nn.Module] = weakref.ref(other) if weakly else self._listed
        Reaches.table[:] = [other]

    @staticmethod
    def _listed() -> nn.Module:
        return Reaches.table[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.read(self.other())


def _captured(module: nn.Module) -> Any:
    made = module_source(module, (X,))
    return capture_module(made.module, made.inputs, args=made.args, originals=made.originals)


@pytest.mark.parametrize("made", [_normed, _spectral])
def test_weights_that_a_hook_computes_are_planned(made: Any) -> None:
    module = made()
    before = module.weight
    names = {v.name for v in _captured(module).top.values if v.kind == "parameter"}
    assert names == {n for n, _ in module.named_parameters()}
    assert module.weight is before and not before.is_meta


def test_a_computed_tensor_is_copied_but_not_read() -> None:
    assert _captured(Keeps(reads=False)).top.ops
    with pytest.raises(CaptureError, match="made from parameters out of sight"):
        _captured(Keeps(reads=True))


def test_what_cannot_be_copied_is_named() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    module[1].lock = threading.Lock()
    with pytest.raises(
        CaptureError, match=re.escape("Sequential cannot be copied: 1.lock is a lock (TypeError: cannot")
    ):
        module_source(module, (X,))


READS: list[tuple[Callable[[Any], torch.Tensor], str]] = [
    (lambda other: other.weight, "0.weight"),
    (lambda other: other.weight.data, "0.weight"),
    (lambda other: other.running_mean, "0.running_mean"),
    (lambda other: other(X), "0.num_batches_tracked"),
]


@pytest.mark.parametrize("weakly", [True, False])
@pytest.mark.parametrize(("read", "name"), READS)
def test_a_way_that_a_copy_does_not_have_is_refused(
    read: Callable[[Any], torch.Tensor], name: str, weakly: bool
) -> None:
    norm = nn.BatchNorm1d(8)
    module = nn.Sequential(norm, Reaches(norm, read, weakly))
    says = f"1 reaches {name} by a way that a copy of the model does not have"
    with pytest.raises(CaptureError, match=re.escape(says)) as error:
        _captured(module)
    assert "give path.py:function" in str(error.value)


class Looks(nn.Module):
    """Has a number in a table by its identity, which a copy does not have."""

    table: ClassVar[dict[int, float]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        Looks.table[id(self)] = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.table[id(self)]


def test_an_error_of_a_copy_says_that_it_is_one() -> None:
    with pytest.raises(CaptureError, match=r"test_in_memory.py:\d+ \(.*\): KeyError") as error:
        _captured(Looks())
    assert "planning runs a copy of the module" in str(error.value) and "path.py:function" in str(error.value)
    with pytest.raises(CaptureError, match="KeyError") as error:  # as a file builds it
        module = Looks()
        Looks.table.clear()
        capture_module(module, {"x": X})
    assert "a copy" not in str(error.value)
