"""A gradient that is rounding alone is not judged, and is named; all others are."""

from __future__ import annotations

from pathlib import Path

from planner_core.planning import Request
from planner_core.verification import format_report
from planner_core.verification.numerics import _find_unsteady, run_in_float64
from tests.support.plans import planned

MODULE = '''
import torch
from torch import nn

class Odd(nn.Module):
    """The gradient of `odd` turns with the last digits of a sum."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(ODD + 5))
        self.odd = nn.ParameterList(nn.Parameter(torch.randn(16)) for _ in range(ODD))

    def forward(self, x):
        loss = 0.0
        for weight in self.odd:
            loss = loss + (1e-12 * torch.sin(1e12 * (x @ weight))).sum()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return loss + x.square().mean()

def make():
    torch.manual_seed(0)
    return Odd(), {"x": torch.randn(8, 16)}
'''


def _unsteady_of(tmp_path: Path, odd: int) -> frozenset[str]:
    (tmp_path / f"odd{odd}.py").write_text(MODULE.replace("ODD", str(odd)))
    plan = planned(Request(f"{tmp_path}/odd{odd}.py:make", cluster="1x8-h100:gpus=2")).best
    unsteady = run_in_float64(lambda: _find_unsteady(plan))
    assert unsteady is not None
    return unsteady


def test_gradients_that_turn_with_the_last_digits_are_told_from_others(tmp_path: Path) -> None:
    assert _unsteady_of(tmp_path, 1) == {"odd.0"}


def test_if_many_are_so_all_are_judged(tmp_path: Path) -> None:
    assert not _unsteady_of(tmp_path, 8)


def test_a_report_names_what_is_not_judged() -> None:
    none = {"count": 0, "bytes": 0}
    told = {
        "ok": True,
        "ranks": 2,
        "backend": "gloo",
        "unsteady": ["odd.0", "odd.1"],
        "collectives": {"predicted": {}, "measured": {"forward": {"all_gather": none}}},
    }
    assert "not judged, since it decides their gradients even in float64: odd.0 and 1 more" in format_report(told)
