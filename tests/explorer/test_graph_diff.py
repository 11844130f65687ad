"""Two graphs beside each other: what differs is found, named and marked; which copies of a block are shown."""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from pathlib import Path

import pytest
from playwright.sync_api import expect

from explorer.address import settings
from explorer.graph import diff as graph_diff
from explorer.graph import overlay
from explorer.graph.scene import Scene, scene
from explorer.text.words import mesh_words
from planner_core.core.placement import R
from planner_core.planning import edit
from planner_core.planning.pipeline import Result
from planner_core.planning.request import Request
from planner_core.planning.session import prepare
from tests.pages.test_app import open_page, words
from tests.support.plans import planned, searched
from tests.support.visiting import Visit


@lru_cache
def drawn(model: str, **asked: object) -> tuple[Result, Scene]:
    result = planned(Request(model, **asked))  # type: ignore[arg-type]
    return result, scene(result.coarse)


def test_a_plan_does_not_differ_from_itself_and_one_edit_is_one_weight() -> None:
    result, drawing = drawn("llama-3-8b", memory_gb=73.6)
    assert graph_diff.of_plans(drawing, result.best, result.best).differences == ()
    up = ("LlamaDecoderLayer", "mlp.up_proj.weight")
    changed = edit.pin(prepare(result.request, result.graph), result.best, {up: (R,)}, keep=True)
    found = graph_diff.of_plans(drawing, result.best, changed)
    weights = [d for d in found.differences if d.here.startswith("weight")]
    assert [(d.left, d.here, d.there) for d in weights] == [
        ("LlamaDecoderLayer:mlp.up_proj/linear", "weight S(0) on shard", "weight whole")
    ]
    marks = found.marks()
    assert marks[0].keys() == marks[1].keys() and marks[0]["LlamaDecoderLayer:mlp.up_proj/linear"] == "weight whole"


def test_two_models_differ_in_what_only_one_has() -> None:
    here, there = drawn("llama-3-8b")[1], drawn("mixtral-8x7b")[1]
    found = graph_diff.of_models(here, there)
    assert found.right["LlamaDecoderLayer:self_attn.q_proj/linear"] == "MixtralDecoderLayer:self_attn.q_proj/linear"
    assert {b: a for a, b in found.right.items()} == found.left
    only = {d.left or d.right for d in found.differences if graph_diff.ABSENT in (d.here, d.there)}
    assert "LlamaDecoderLayer:mlp.up_proj/linear" in only and "MixtralDecoderLayer:mlp.experts/moe_experts" in only
    assert "LlamaDecoderLayer:self_attn.q_proj/linear" not in only
    assert graph_diff.of_models(here, here).differences == ()
    nodes = set(found.right) | {d.left for d in found.differences if d.left}
    assert nodes == set(here.node_ids()), "every node is matched or listed"


def test_copies_that_run_in_several_ways_are_told_and_can_be_chosen() -> None:
    result, drawing = drawn("llama-3-8b", memory_gb=48.0, zero=0, precision="pure")
    found = overlay.ways(result.best, "LlamaDecoderLayer")
    assert len(found) > 1
    told = [overlay.copies(bp.prefixes, drawing, "LlamaDecoderLayer") for bp in found.values()]
    assert sum(int(t.partition(" ")[0]) for t in told) == 32 and all("of 32 copies" in t for t in told)
    most = overlay.variant(result.best, drawing, "LlamaDecoderLayer")
    assert most is not None and len(most[1].prefixes) == max(len(b.prefixes) for b in found.values())
    shown = [overlay.placements(result.best, drawing, label) for label in found]
    assert shown[0] != shown[1], "the ways differ in some node's placement"
    assert overlay.variant(result.best, drawing, "LlamaDecoderLayer", "no-such") == most


def test_the_page_offers_the_ways_and_the_second_graph() -> None:
    at = open_page("fold", memory="48", zero="0", precision="pure", accumulate="1", recompute="none")
    assert not at.exception
    assert any(s.label == "Copies that the overlays show" for s in at.selectbox)
    at = open_page("fold", beside="megatron-lm")
    assert not at.exception and not at.warning
    assert any("nodes differ" in e.label for e in at.expander)
    at = open_page("fold", beside="best@method:tap")
    assert not at.exception and not at.warning and "TAP’s plan" in words(at)
    at = open_page("fold", beside="no-such")
    assert not at.exception and "no plan “no\\-such”" in at.warning[0].value
    assert settings.read({"beside": "model:no-such"})[1]


def test_why_blocks_are_not_one_is_told() -> None:
    assert "is not folded with" in words(open_page("fold", model="t5-large"))


def test_a_click_in_one_graph_selects_in_the_other(visit: Visit) -> None:
    page = visit.page
    visit.open("/?beside=model:mixtral-8x7b")
    page.locator("svg.canvas").nth(1).locator("g.node").first.wait_for()
    assert page.locator("g.node.differs .badge text").first.text_content() == "≠"
    page.locator('g.node[data-id="MixtralDecoderLayer:self_attn.q_proj/linear"]').click()
    page.locator('g.node.picked[data-id="LlamaDecoderLayer:self_attn.q_proj/linear"]').wait_for()
    page.wait_for_function("location.search.includes('LlamaDecoderLayer')")
    visit.settle()
    expect(page.locator("g.node.picked")).to_have_count(2)
    page.locator("select").first.select_option("placement")
    page.wait_for_function("location.search.includes('show=placement')")
    visit.settle()
    page.locator(".legend").nth(1).get_by_text("R: whole on every device").wait_for()
    page.get_by_role("radio", name="One graph").click()
    page.wait_for_function("!location.search.includes('beside')")
    visit.settle()
    expect(page.locator("svg.canvas")).to_have_count(1)


@pytest.mark.slow
def test_taps_plan_stands_beside_the_exact_one_at_one_click(visit: Visit) -> None:
    page = visit.page
    visit.open("/fold")
    visit.click(page.get_by_role("radio", name="TAP’s plan"))
    expect(page.locator("svg.canvas")).to_have_count(2)
    taps = searched(settings.request(settings.read({})[0] | {"method": "tap"}))
    expect(page.get_by_text(f"TAP’s plan, {mesh_words(taps.mesh)}")).to_be_visible()
    expect(page.locator(".legend").nth(1)).to_contain_text("≠ otherwise in Exact plan")
    visit.click(page.get_by_role("radio", name="Another model"))
    visit.asks(lambda query: "mixtral-8x7b" in query)
    expect(page.get_by_role("combobox", name="Which")).to_be_visible()


def test_the_png_can_be_kept(visit: Visit, tmp_path: Path) -> None:
    visit.open("/fold")
    visit.page.locator("g.node").first.wait_for()
    with visit.page.expect_download() as waiting:
        visit.page.get_by_role("button", name="PNG").click()
    waiting.value.save_as(tmp_path / "graph.png")
    data = (tmp_path / "graph.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and re.search(r"\.png$", waiting.value.suggested_filename)
    width, height = struct.unpack(">II", data[16:24])
    assert width > 600 and height > 1000 and len(data) > 20_000
