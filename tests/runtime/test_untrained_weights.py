"""Weights that are not trained, since they are frozen or the loss does not depend on them, are kept once, in the plan's dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner_core as shardscope
from planner_core.core.plan_json import plan_from_json, plan_to_json
from planner_core.planning.request import Request
from planner_core.verification.api import verify
from planner_core.verification.fake.group import verify_fake_all
from tests.support.plans import planned
from tests.support.ranks import run_ranks
from tests.support.saved_plans import saved_plans

MODEL = """
import torch
from torch import nn

class Adapted(nn.Module):  # a frozen body, an adapter that is trained, and scores that only choose positions
    def __init__(self):
        super().__init__()
        self.up, self.down, self.scores = nn.Linear(512, 2048), nn.Linear(2048, 512), nn.Linear(512, 64)
        self.adapter = nn.Linear(512, 512)
        for weight in (*self.up.parameters(), *self.down.parameters()):
            weight.requires_grad_(False)

    def forward(self, x):
        best = self.scores(x).topk(4).indices
        hidden = torch.relu(self.up(x))
        return self.adapter(x + self.down(hidden) + hidden.gather(-1, best).sum(-1, keepdim=True)).square().mean()

def adapted():
    return Adapted().bfloat16(), (torch.randn(64, 512, dtype=torch.bfloat16),)
"""


def test_weights_that_are_not_trained_have_no_master_copy(tmp_path: Path) -> None:
    """A step takes the memory that the plan says. With master copies in float32 it took three times as much."""
    (tmp_path / "model.py").write_text(MODEL)
    found = planned(Request(f"{tmp_path}/model.py:adapted", cluster="1x8-h100"))
    chosen = [p for p in found.plans if p.method in ("exact", "data-parallel", "fsdp")]
    for plan, report in zip(chosen, verify_fake_all(chosen, graphs=[found.graph] * len(chosen)), strict=True):
        trained = {n.partition(".")[0]: p.trained for n, p in plan.blocks[""].params.items()}
        assert trained == {"up": False, "down": False, "scores": False, "adapter": True}
        assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan
        assert report["ok"] and report["memory_bytes"]["rel_error"] < 0.02, report


LAYERS = """
import torch
from torch import nn

class Chosen(nn.Module):  # scores choose what the layer sees; no gradient comes to them
    def __init__(self):
        super().__init__()
        self.scores, self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        seen = self.scores(x).topk(32).indices
        mask = torch.zeros_like(x).scatter(-1, seen, 1.0)
        kept, rest = self.down(torch.relu(self.up(x * mask))).split([64, 0], -1)
        return x + kept

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Chosen() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def model():
    return Model(), (torch.randn(8, 16, 64),)
"""


def test_what_runs_again_in_backward_has_all_its_weights(tmp_path: Path) -> None:
    """Also those that get no gradient: a layer that is computed again computes its choice again. An empty part is not a part of a
    fused weight, whose plan would be invalid."""
    (tmp_path / "model.py").write_text(LAYERS)
    found = planned(Request(f"{tmp_path}/model.py:model", cluster="1x2-h100", recompute="full"))
    plan = next(p for p in found.plans if p.method == "fsdp")
    assert {b.recompute for label, b in plan.blocks.items() if label} == {"full"}
    gathered = [n for b in plan.blocks.values() for n, p in b.params.items() if p.gathered and "scores" in n]
    assert gathered, "the weights of the choice are gathered at use"
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan
    assert verify(plan)["ok"]
    assert verify(plan, ranks=2)["ok"]


class Stops(torch.autograd.Function):
    """Its backward has a gradient for the scale alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, (grad * ctx.saved_tensors[0]).sum(0)


class Gated(nn.Module):
    """Two scales, before which no weight gets a gradient. With `own` it runs its own code."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kept = iter([1]) if own else None
        self.gate, self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.one, self.two, self.head = nn.Parameter(torch.ones(32)), nn.Parameter(torch.ones(32)), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.relu(self.up(x)))
        gate = Stops.apply(torch.sigmoid(self.gate(hidden)), self.one)  # type: ignore[no-untyped-call]
        hidden = gate * Stops.apply(torch.tanh(hidden), self.two)  # type: ignore[no-untyped-call]
        return self.head(hidden).square().mean()  # type: ignore[no-any-return]


def _decayed(model: nn.Module, x: torch.Tensor, **how: bool) -> dict[str, torch.Tensor]:
    """The weights after two steps that make what has a gradient smaller, too."""
    # The update is continuous in the gradient: by the usual eps the rounding of a small one would decide its direction.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model(x, **how).backward()
        optimizer.step()
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in model.state_dict().items()}


def _apart(own: bool, x: torch.Tensor, files: list[str]) -> list[list[str]]:
    """By plan: the weights that are not those of one process."""
    wanted, found = _decayed(Gated(own), x), []
    for file in files:
        got = _decayed(shardscope.apply(Gated(own), shardscope.load_plan(file)), x, global_batch=True)
        found.append([name for name, value in wanted.items() if not torch.allclose(got[name], value, atol=1e-4)])
    return found


@pytest.mark.parametrize("own", [False, True], ids=["generated", "own code"])
def test_what_gets_none_from_a_backward_is_not_decayed(own: bool, tmp_path: Path) -> None:
    """A gradient of zeros would let an optimizer move the weights, which one process leaves as they are."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    report, files = saved_plans(Gated(own), (x,), tmp_path)
    (untrained,) = report.graph.assumptions
    assert untrained.startswith("6 parameters (5,248 elements, first up.weight) are used, but the loss does not depend")
    assert len(files) > 3
    assert run_ranks(_apart, 2, (own, x, files)) == [[[]] * len(files)] * 2
