"""Weights that are not trained, since they are frozen or the loss does not depend on them, are kept once, in the plan's dtype."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner_core.core.plan_json import plan_from_json, plan_to_json
from planner_core.planning.request import Request
from planner_core.verification.api import verify
from planner_core.verification.fake.group import verify_fake_all
from tests.support.plans import planned
from tests.support.plans_train_alike import check_plans_train_alike

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
    """Two scales, before which no weight gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.one, self.two, self.head = nn.Parameter(torch.ones(32)), nn.Parameter(torch.ones(32)), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.relu(self.up(x)))
        gate = Stops.apply(torch.sigmoid(self.gate(hidden)), self.one)  # type: ignore[no-untyped-call]
        hidden = gate * Stops.apply(torch.tanh(hidden), self.two)  # type: ignore[no-untyped-call]
        return self.head(hidden).square().mean()  # type: ignore[no-any-return]


def test_what_gets_none_from_a_backward_is_not_decayed() -> None:
    """A gradient of zeros would let an optimizer move the weights, which one process leaves as they are."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    # The update is continuous in the gradient: by the usual eps the rounding of a small one would decide its direction.
    adamw = partial(torch.optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.5)
    report = check_plans_train_alike(Gated, [(x,)] * 2, make_optimizer=adamw)
    (untrained,) = report.graph.assumptions
    assert untrained.startswith("6 parameters (5,248 elements, first up.weight) are used, but the loss does not depend")
    assert len(report.plans) > 3
