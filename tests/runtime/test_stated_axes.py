"""Stated layouts with context and expert ranks run as predicted: loss, gradients, a step of the optimizer, every collective."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from planner_core.core import Plan, load_cluster
from planner_core.models.loading import capture_graph
from planner_core.planning import plan_model
from planner_core.planning.methods import parse_layout
from planner_core.planning.planner import prepare_planner
from planner_core.planning.pricing import Pricer, Statement
from planner_core.planning.request import Request
from planner_core.verification.fake.group import verify_fake, verify_fake_all
from planner_core.verification.numerics import verify_all
from tests.support.tiny_models import tiny_config

SMALL = (
    ("llama-gqa", "dp=2,cp=2,cp_type=gather,zero=1"),
    ("mixtral", "fsdp=2,ep=2,cp=2"),
)
"""Context ranks that gather and that send in a ring, ZeRO stages 1 and 3, and experts."""
OTHERS = (
    ("llama-gqa", "fsdp=2,cp=2,cp_type=ulysses"),
    ("llama-gqa", "cp=2,tp=2,sp"),
    ("llama-gqa", "fsdp=2,cp=2"),
    ("mixtral", "dp=2,cp=2"),
    ("mixtral", "fsdp=4,ep=2"),
    ("mixtral", "fsdp=2,ep=2,tp=2,sp"),
)
FULL = (
    ("llama-3-8b", "dp=2,cp=8", 4096),
    ("llama-3-8b", "fsdp=2,cp=4,tp=2,sp", 16384),
    ("llama-3-8b", "fsdp=2,cp=4,tp=2,sp,cp_type=ulysses", 16384),
    ("llama-3-8b", "dp=2,fsdp=2,cp=2,tp=2,sp", 4096),
    ("mixtral-8x7b", "dp=16,ep=8,zero=1", 4096),
    ("mixtral-8x7b", "fsdp=8,ep=4,tp=2,sp", 1024),
    ("mixtral-8x7b", "fsdp=2,cp=8", 4096),
)


FOUR_AXES = (("llama-gqa", "dp=2,fsdp=2,cp=2,tp=2,sp"), ("mixtral", "dp=2,fsdp=4,tp=2,ep=2"))
"""Each of two ranks an axis: HSDP, context or expert ranks, and tensor parallelism."""


def small(name: str, text: str, num_gpus: int = 4) -> Plan:
    """A tiny model, a sample for each data-parallel rank."""
    layout = parse_layout(text)
    graph = capture_graph(tiny_config(name), batch=layout.data, seq=16, dtype="float32")
    asked = Request(name, cluster=f"1x8-h100:gpus={num_gpus}", batch=layout.data, seq=16, dtype="float32")
    plan = prepare_planner(asked, graph).of_layout(layout)
    assert plan is not None
    return plan


@pytest.mark.parametrize("cases", [SMALL, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["each kind", "others"])
def test_they_run_as_predicted(cases: Sequence[tuple[str, str]]) -> None:
    """On four real processes. Where experts or the loss take tokens in a row, a rank has those of its piece of its sample."""
    plans = [small(*case) for case in cases]
    for (name, text), found in zip(cases, verify_all(plans), strict=True):
        assert found["ok"], (name, text, found["loss"], found["grad"], found["collectives"])


MATRICES = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

def make():
    return nn.Sequential(*(Layer() for _ in range(3)), nn.Linear(256, 64)), (torch.randn(64, 256),)
"""


@pytest.mark.slow
def test_a_mesh_of_four_axes_is_searched_and_runs_in_order(tmp_path: Path) -> None:
    """Sixteen ranks in one process: every collective of every plan, in its order."""
    (tmp_path / "mine.py").write_text(MATRICES)
    found = plan_model(Request(f"{tmp_path / 'mine.py'}:make", cluster="2x8-h100", mesh="2x2x2x2"))
    assert found.best.optimal and all(p.mesh.axis_sizes == (2, 2, 2, 2) for p in found.plans)
    for plan, told in zip(
        found.plans, verify_fake_all(found.plans, graphs=[found.graph] * len(found.plans)), strict=True
    ):
        assert told["collectives"]["predicted"] == told["collectives"]["measured"] and told["order"]["ok"], plan.name


@pytest.mark.slow
def test_four_degrees_run_as_predicted() -> None:
    """On sixteen real processes."""
    plans = [small(*case, 16) for case in FOUR_AXES]
    assert [p.mesh.axis_names for p in plans] == [("data", "shard", kind, "tensor") for kind in ("context", "expert")]
    for case, found in zip(FOUR_AXES, verify_all(plans), strict=True):
        assert found["ok"], (case, found["loss"], found["grad"], found["collectives"])


@pytest.mark.parametrize("mesh", ["2x2x4", pytest.param("2x2x2x2", marks=pytest.mark.slow)])
def test_weights_that_change_their_sharded_dim_on_the_way_are_issued_early(mesh: str) -> None:
    """On many axes a weight that is split twice along one dim takes an all_to_all before its all_gather."""
    asked = Request("llama-3-8b", cluster="2x8-h100", mesh=mesh, batch=32, seq=1024, layers=2)
    best = (found := plan_model(asked)).best
    assert any(t.kind == "all_to_all" for t in best.cost.traffic)
    assert verify_fake(best, graph=found.graph)["ok"]


@pytest.mark.slow
def test_traffic_and_memory_at_full_size() -> None:
    """Four layers, all sixteen ranks in one process: every collective and byte, memory within 2 %."""
    cluster = load_cluster("2x8-h100")
    plans = [Pricer(m, cluster).plan(Statement(parse_layout(text), seq=seq, layers=4)) for m, text, seq in FULL]
    for (name, text, _), found in zip(FULL, verify_fake_all([p for p in plans if p is not None]), strict=True):
        assert found["ok"], (name, text, found["memory_bytes"], found["collectives"])
