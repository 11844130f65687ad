"""Models that ask whether their numbers are finite: the answer is taken for granted, told, and costs nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner_core.core import CaptureError, Graph
from planner_core.models.capture import capture_module
from planner_core.models.loading import capture_file
from planner_core.planning import Request, plan_model
from tests.support.corpus import cluster, run


class Guarded(nn.Module):
    """Clamps as DETR's layers do, stops as trainers do, and masks what is not a number."""

    def __init__(self, how: str = "clamps") -> None:
        super().__init__()
        self.how, self.layers, self.head = how, nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            if self.how == "clamps" and not torch.isfinite(x).all():
                x = torch.clamp(x, -1e4, 1e4)
            if self.how == "stops" and (torch.isnan(x).any().item() or torch.all(x.isinf())):
                raise ValueError("not a number")
            if self.how == "masks":
                bad = torch.isnan(x)
                x = x.masked_fill(bad, 0.0) + bad
            if self.how == "clamps by value":
                x = torch.where(torch.isinf(x).any(), x.clamp(-1e4, 1e4), x)
            if self.how == "decides" and (x > 0).all():
                x = -x
        return self.head(x).mean()  # type: ignore[no-any-return]


def graph_of(how: str) -> Graph:
    return capture_module(Guarded(how), {"x": torch.randn(8, 16)})


def ops_of(graph: Graph) -> list[str]:
    return [op.fn for block in (graph.top, *graph.blocks.values()) for op in block.ops]


@pytest.mark.parametrize("how", ["clamps", "stops"])
def test_a_question_leaves_no_operators_and_is_told(how: str) -> None:
    graph = graph_of(how)
    assert ops_of(graph) == ops_of(graph_of("nothing"))
    (told,) = (a for a in graph.assumptions if "finite" in a)
    assert "test_finite.py" in told and ("isfinite" if how == "clamps" else "isnan") in told
    assert not any("finite" in a for a in graph_of("nothing").assumptions)


@pytest.mark.parametrize(("how", "fn"), [("masks", "isnan"), ("clamps by value", "isinf")])
def test_a_mask_is_computed_as_before(how: str, fn: str) -> None:
    graph = graph_of(how)
    assert ops_of(graph).count(fn) == 3 and not any("finite" in a for a in graph.assumptions)


def test_other_questions_are_refused_as_before() -> None:
    with pytest.raises(CaptureError, match="decides"):
        graph_of("decides")


def clamps() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Guarded(), (torch.randn(8, 16),)


def test_the_plan_runs_as_predicted() -> None:
    source = f"{__file__}:clamps"
    plans = plan_model(Request(source, cluster=cluster(2), mesh="2"), capture_file(source)).plans
    (plan,) = (p for p in plans if p.name == "FSDP")
    for row in run({"clamps": (plan,)}, 2, timeout_s=300)["clamps"]:
        assert row["ok"], row["error"]
