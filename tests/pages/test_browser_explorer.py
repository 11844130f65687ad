"""A person's way through the explorer in a real browser: open, click, compare, export; reload, back, a shared link."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from playwright.sync_api import expect

from tests.support.visiting import Visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Q_PROJ = "LlamaDecoderLayer:self_attn.q_proj/linear"


def test_the_journey(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    visit.open("/?cluster=1x8-h100&layers=2")
    page.get_by_text("Why this one").wait_for()
    expect(page.locator(".figure")).to_have_count(5)
    visit.turn("Fold")
    page.locator("g.node").first.wait_for()
    expect(page.locator("g.node.block")).to_have_count(1)

    page.locator(f'g.node[data-id="{Q_PROJ}"]').click()
    page.get_by_text("self_attn.q_proj.weight").first.wait_for()
    page.wait_for_function("location.search.includes('q_proj')")

    visit.turn("Plans")
    page.locator(".js-plotly-plot").first.wait_for()
    page.wait_for_timeout(800)
    diamonds = page.locator(".js-plotly-plot").first.locator(".scatterlayer .trace").nth(1).locator(".points path")
    box = diamonds.first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_timeout(200)
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_function("location.search.includes('plan=')")
    visit.settle()
    visit.asks(lambda query: "q_proj" in query)  # the selected node is kept from page to page

    visit.turn("Compare")
    page.get_by_text(re.compile("less time than|tie in time")).first.wait_for()
    page.locator(".js-plotly-plot").nth(3).wait_for()

    visit.turn("Topology")
    page.locator(".svg svg").wait_for()

    visit.turn("Export")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download plan JSON").click()
    target = tmp_path / "plan.json"
    waiting.value.save_as(target)
    assert json.loads(target.read_text(encoding="utf-8"))["schema"] == "shardscope.plan/3"


def test_a_shared_link_opens_the_same_view(visit: Visit) -> None:
    visit.open("/?model=gpt2-xl&cluster=1x8-h100&batch=16&node=transformer.wte/embedding&show=placement")
    expect(visit.page.locator("g.node.picked")).to_have_attribute("data-id", "transformer.wte/embedding")
    expect(visit.page.locator("select")).to_have_value("placement")
    expect(visit.page.locator(".legend")).to_have_text(re.compile("^R: whole"))
    before = visit.query
    visit.page.reload()
    visit.settle()
    visit.asks(lambda query: query == before)
    expect(visit.page.locator("g.node.picked")).to_have_attribute("data-id", "transformer.wte/embedding")


def test_back_and_forward(visit: Visit) -> None:
    visit.open("/fold")
    visit.page.locator(f'g.node[data-id="{Q_PROJ}"]').click()
    visit.page.wait_for_function("location.search.includes('q_proj')")
    visit.settle()
    visit.turn("Plans")
    visit.page.go_back()
    visit.page.locator("g.node.picked").wait_for()
    expect(visit.page.locator("g.node.picked")).to_have_attribute("data-id", Q_PROJ)
    visit.page.go_forward()
    visit.page.locator(".js-plotly-plot").first.wait_for()
    visit.asks(lambda query: "q_proj" in query)
    visit.page.go_back()
    visit.page.locator("g.node.picked").wait_for()
    visit.page.go_back()
    visit.page.locator("g.node.picked").wait_for(state="detached")
    visit.asks(lambda query: not query)


def test_who_types_fold_finds_it(visit: Visit) -> None:
    visit.open("/fold?model=gpt2-xl&show=placement")
    visit.page.locator("g.node").first.wait_for()
    expect(visit.page.get_by_text("Page not found")).to_have_count(0)
    expect(visit.page.locator("select")).to_have_value("placement")
    visit.turn("Plans")
    visit.asks(lambda query: "model=gpt2-xl" in query)
    visit.page.go_back()
    visit.page.wait_for_url(re.compile("/fold"))
    visit.page.locator("g.node").first.wait_for()


def test_nonsense_in_the_address(visit: Visit) -> None:
    visit.open("/?model=no-such&cluster=%3Cscript%3Ealert(1)%3C/script%3E&batch=x&mesh=99&node=%22%3E&show=7&depth=-1")
    told = visit.page.locator("[data-testid=stAlert]").all_inner_texts()
    assert any("no-such" in t for t in told)
    assert any("alert(1)" in t for t in told)
    assert any("16 GPUs" in t for t in told)


def test_blocks_open_and_close_in_the_browser(visit: Visit) -> None:
    page = visit.page
    visit.open("/fold?model=t5-large&open=")
    page.locator("g.node").first.wait_for()
    closed = page.locator("g.node").count()
    page.get_by_role("button", name="Expand").click()
    page.locator("g.node").nth(closed + 30).wait_for(state="attached")
    page.get_by_role("button", name="Collapse").click()
    expect(page.locator("g.node")).to_have_count(closed)
    page.locator('g.toggle[data-toggle="run:0"]').click()
    page.wait_for_function("location.search.includes('open=run')")
    visit.settle()
    expect(page.locator("g.node.opened")).to_have_count(1)


@pytest.mark.slow
def test_one_kind_of_block_opens_and_closes_at_once(visit: Visit) -> None:
    page = visit.page
    visit.open("/?model=t5-large&open=&least=25")
    toggle = page.locator('g.toggle[data-toggle="run:0"]')
    toggle.click(modifiers=["Shift"])
    expect(page.locator("g.node.opened")).to_have_count(24)
    page.wait_for_function("location.search.includes('run%3A23') && !location.search.includes('run%3A24')")
    toggle.click(modifiers=["Shift"])
    expect(page.locator("g.node.opened")).to_have_count(0)


def test_search_counts_walks_and_says_no_match(visit: Visit) -> None:
    page = visit.page
    visit.open("/fold")
    field = page.get_by_placeholder(re.compile("Search"))
    field.fill("proj")
    expect(page.locator(".matches")).to_have_text("7 found")
    field.press("Enter")
    expect(page.locator(".matches")).to_have_text("1 of 7")
    page.get_by_role("button", name="Next match").click()
    expect(page.locator(".matches")).to_have_text("2 of 7")
    visit.settle()
    field.fill("zebra")
    expect(page.locator(".matches")).to_have_text("no match")


def test_the_graph_by_keyboard(visit: Visit) -> None:
    page = visit.page
    visit.open("/fold")
    page.locator("svg.canvas").focus()
    page.keyboard.press("ArrowDown")
    page.locator("g.node.picked").wait_for()
    expect(page.locator("g.node.picked")).to_have_attribute("data-id", "model.embed_tokens/embedding")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("g.node.opened")).to_have_count(0)
    page.keyboard.press("Escape")
    visit.settle()
    expect(page.locator("g.node.picked")).to_have_count(0)
    visit.asks(lambda query: "node=" not in query)


def test_a_new_cluster_plans_again_and_keeps_the_rest(visit: Visit) -> None:
    page = visit.page
    visit.open("/?model=gpt2-xl&layers=2&batch=32")
    page.get_by_role("button", name="2 nodes × 8 H100").click()
    page.get_by_role("combobox", name="Cluster").click()
    page.get_by_role("option", name=re.compile("1x8-h100")).click()
    page.wait_for_function("location.search.includes('cluster=1x8-h100')")
    visit.settle()
    visit.asks(lambda query: "batch=32" in query)
    page.get_by_role("button", name="1 node × 8 H100").wait_for()


def test_the_svg_can_be_kept(visit: Visit, tmp_path: Path) -> None:
    visit.open("/?show=memory&plan=megatron-lm")
    visit.page.locator("g.node").first.wait_for()
    said = {}
    for show in ("memory", "placement", "forward", "graph"):
        visit.page.locator("select[data-do=overlay]").select_option(show)
        with visit.page.expect_download() as waiting:
            visit.page.get_by_role("button", name="SVG").click()
        waiting.value.save_as(tmp_path / "graph.svg")
        said[show] = (tmp_path / "graph.svg").read_text(encoding="utf-8")
        assert said[show].startswith("<svg") and "q_proj" in said[show]
        assert "var(--" not in said[show].split("<g", 1)[1]
    lines = {
        show: " ".join(re.findall("<text[^>]*>([^<]*)", text.partition('class="key"')[2]))
        for show, text in said.items()
    }
    assert "GiB" in lines["memory"] and "on one GPU under Megatron-LM" in lines["memory"]
    assert "R: whole on every device" in lines["placement"] and "8 data × 2 tensor" in lines["placement"]
    assert "sends" in lines["forward"] and lines["graph"] == ""
    expect(visit.page.locator(".key")).to_have_count(0)


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page", ["", "fold", "plans", "compare", "topology", "export"])
def test_nothing_is_cut_off_at_800_pixels(visit: Visit, page: str, theme: Literal["light", "dark"]) -> None:
    visit.page.set_viewport_size({"width": 800, "height": 900})
    visit.page.emulate_media(color_scheme=theme)
    visit.open(f"/{page}")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 800


@pytest.mark.slow
def test_a_line_of_code_and_its_node_are_linked_by_the_pointer(visit: Visit) -> None:
    """The code is the real one, which a process with torch writes."""
    page = visit.page
    visit.open("/export?layers=2")
    page.get_by_text("Show the code beside the graph").click()
    line = page.locator(".code .line", has_text="w.q_proj_weight").first
    line.wait_for(timeout=180_000)
    node = page.locator('g.node[data-id="LlamaDecoderLayer:self_attn.q_proj/linear"]')
    node.wait_for()
    line.hover()
    expect(node).to_have_class(re.compile(r"\bhinted\b"))
    expect(page.locator("g.node.hinted")).to_have_count(1)
    node.hover()
    expect(line).to_have_class(re.compile(r"\bhinted\b"))
    page.locator('g.node[data-id="LlamaDecoderLayer:mlp.down_proj/linear"]').hover()
    expect(line).not_to_have_class(re.compile(r"\bhinted\b"))
    down = page.locator(".code .line.hinted", has_text="w.down_proj_weight")
    expect(down).to_be_in_viewport()
    page.locator(".code").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("g.node.hinted")).to_have_count(1)


SHIFTS = """
window.shifted = 0;
new PerformanceObserver((list) => { for (const e of list.getEntries()) if (!e.hadRecentInput) window.shifted += e.value; })
  .observe({ type: "layout-shift", buffered: true });
"""


@pytest.mark.slow  # a page of its own for each
@pytest.mark.parametrize("width", [1440, 800, 400])
def test_pages_do_not_jump_while_they_come(chromium: Browser, app: str, width: int) -> None:
    for name in ("", "plans", "compare", "topology", "export"):
        context = chromium.new_context(viewport={"width": width, "height": 1000})
        context.add_init_script(SHIFTS)
        visit = Visit(context.new_page(), app)
        visit.open(f"/{name}")
        visit.page.wait_for_timeout(1000)
        assert visit.page.evaluate("window.shifted") <= 0.1, name
        context.close()
