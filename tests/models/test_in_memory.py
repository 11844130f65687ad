"""A module that a user has in Python is copied onto meta with all that it holds, and what cannot be copied is named."""

from __future__ import annotations

import re
import threading
from typing import Any

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


def _captured(module: nn.Module) -> Any:
    made = module_source(module, (X,))
    return capture_module(made.module, made.inputs, args=made.args)


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
