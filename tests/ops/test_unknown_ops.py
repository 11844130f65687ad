"""Ops without a rule: run whole, named, counted over all repeats, and told on the command line and on the page."""

from __future__ import annotations

import json

import pytest
import torch
from playwright.sync_api import expect
from torch import nn

from explorer.graph.overlay import nodes_without_rule
from explorer.graph.scene import build_scene
from explorer.jobs.upload import store_model
from planner_core.core.placement import R
from planner_core.models.capture.module import capture_module
from planner_core.planning.analysis.reporting import plan_report, text, unknown_ops
from planner_core.planning.pipeline import plan_model
from planner_core.planning.request import Request
from tests.support.visiting import Visit

LONGFORMER = {
    "model_type": "longformer",
    "architectures": ["LongformerForMaskedLM"],
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 128,
    "attention_window": [16, 16, 16],
    "max_position_embeddings": 130,
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.renorm(self.down(torch.relu(self.up(x))), 2, 0, 1.0)


def test_named_counted_and_whole() -> None:
    net = nn.Sequential(nn.Linear(8, 8), Layer(), Layer(), Layer())
    graph = capture_module(net, {"input": torch.zeros(16, 8)}, batch=16, seq=1)
    result = plan_model(Request(model="mine", cluster="1x8-h100", mesh="8", batch=16, seq=1), graph)
    assert [(block, op.name) for block, op in result.unknown_ops] == [("Layer", "/renorm")]
    assert plan_report(result)["unknown_ops"] == ["Layer:/renorm"]
    said = unknown_ops(result)
    assert (
        said.startswith("3 ops have no rule and run whole on every GPU")
        and "renorm ×3 (first at /renorm of Layer)" in said
    )
    assert said in text(result)
    drawn = build_scene(result.coarse)
    (node,) = nodes_without_rule(drawn, result.unknown_ops)
    assert node.startswith("Layer:") and "renorm" in [op.fn for op in drawn.node(node).ops]  # type: ignore[union-attr]
    block = result.best.blocks["Layer"]
    assert {forward for edge in block.sites["/renorm"].inputs for forward in edge.dst.forward} == {R}


def test_nothing_is_said_where_all_have_rules() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    graph = capture_module(net, {"input": torch.zeros(16, 8)}, batch=16, seq=1)
    result = plan_model(Request(model="mine", cluster="1x8-h100", mesh="8", batch=16, seq=1), graph)
    assert result.unknown_ops == () and unknown_ops(result) == ""


@pytest.mark.slow
def test_the_graph_marks_it(visit: Visit) -> None:
    model = store_model(json.dumps(LONGFORMER).encode())
    visit.open(f"/?open=run:0&model={model}&batch=16&seq=64&dtype=float32&cluster=1x8-h100")
    page = visit.page
    marked = page.locator("g.node").filter(has=page.locator(".bare"))
    # The plan decides which node stands for the operator: a weight of this plan, an operator of others.
    marked.and_(page.locator(":not(.block)")).first.hover(force=True)
    expect(page.locator(".card")).to_contain_text("for as_strided: runs whole on every GPU")
    expect(page.locator(".legend")).to_contain_text("no rule: runs whole on every GPU")
    page.locator("g.node [data-toggle]").first.click()
    expect(marked).to_have_count(1)
    expect(marked.locator(".times")).to_have_text("× 3")


@pytest.mark.slow
def test_the_page_tells_it() -> None:
    from tests.pages.test_app import open_page, words

    at = open_page(
        "overview",
        model=store_model(json.dumps(LONGFORMER).encode()),
        batch="16",
        seq="64",
        dtype="float32",
        cluster="1x8-h100",
    )
    assert not at.exception and not at.error
    (warning,) = [w.value for w in at.warning if "no rule" in w.value]
    assert "6 ops have no rule and run whole on every GPU" in warning and "as_strided ×6" in warning
    assert warning in words(at)
