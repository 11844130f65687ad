"""Pages in windows of several widths: nothing is cut off, nothing jumps while it comes, and the first page is one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest

from tests.support.visiting import Visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.mark.parametrize("model", ["llama-3-8b", "t5-large"])  # the second has notes beside its plans
def test_the_first_page_is_one_screen(visit: Visit, model: str) -> None:
    visit.page.set_viewport_size({"width": 1440, "height": 900})
    visit.open(f"/?model={model}")
    visit.page.locator("g.node").first.wait_for()
    for part in (".graph", ".plans", ".st-key-export_bar"):
        box = visit.page.locator(part).first.bounding_box()
        assert box is not None and box["y"] + box["height"] <= 900, part
    assert visit.page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight") <= 900


def test_lists_and_dialogs_have_the_colours_of_the_page(visit: Visit) -> None:
    """They lie outside of the element that Streamlit tells the theme: dark words of code lay on a dark ground there."""
    visit.page.emulate_media(color_scheme="dark")
    visit.open("/?layers=2")
    visit.page.locator("[class*='st-key-chip_tool'] button").first.click()
    body = visit.page.locator("[data-testid=stPopoverBody]")
    body.wait_for()
    assert body.evaluate("e => getComputedStyle(e).colorScheme") == "dark"
    words = body.get_by_role("button", name="Plan", exact=True).locator("p")
    assert words.evaluate("e => getComputedStyle(e).color") == "rgb(15, 19, 23)", "white on light blue"


def test_a_pop_up_ends_with_its_last_line(visit: Visit) -> None:
    """The cluster's ended at 70 % of the window: its last line was cut through."""
    visit.page.set_viewport_size({"width": 1440, "height": 900})
    visit.open("/?layers=2")
    visit.page.locator("[class*='st-key-chip_cluster'] button").first.click()
    body = visit.page.locator("[data-testid=stPopoverBody]")
    body.get_by_text("This cluster as a file").wait_for()
    assert body.evaluate("e => e.scrollHeight <= e.clientHeight + 1")
    box = body.bounding_box()
    assert box is not None and box["y"] + box["height"] <= 900


NOTHING_FITS = "/?model=gpt2-xl&cluster=1x8-h100&layers=2&batch=4096&accumulate=1&recompute=none"


def test_what_would_fit_is_beside_the_graph(visit: Visit) -> None:
    """It lay a screen below the graph, and the place beside it was empty. A button changes the whole page."""
    visit.page.set_viewport_size({"width": 1440, "height": 900})
    visit.open(NOTHING_FITS)
    ways, graph = visit.page.locator("[class*='st-key-take_remedy_']"), visit.page.locator(".graph").first
    ways.first.wait_for()
    at, beside = ways.first.bounding_box(), graph.bounding_box()
    assert at and beside and at["x"] > beside["x"] + beside["width"] and at["y"] < beside["y"] + beside["height"]
    ways.first.locator("button").click()
    visit.page.get_by_text("No plan fits the memory").wait_for(state="detached")


@pytest.mark.parametrize("width", [1440, 800])
def test_the_bar_begins_where_the_page_does(visit: Visit, width: int) -> None:
    visit.page.set_viewport_size({"width": width, "height": 900})
    visit.open("/?layers=2")
    logo, page = (
        visit.page.locator(part).first.bounding_box() for part in ("[data-testid=stHeaderLogo]", ".st-key-sentence")
    )
    assert logo and page and abs(logo["x"] - page["x"]) < 2


def test_on_a_phone_it_reads_from_top_to_bottom(visit: Visit) -> None:
    visit.page.set_viewport_size({"width": 400, "height": 850})
    visit.open("/")
    boxes = [
        visit.page.locator(part).first.bounding_box()
        for part in (".st-key-sentence", ".graph", ".plans", ".st-key-export_bar")
    ]
    tops = [box["y"] for box in boxes if box is not None]
    assert len(tops) == 4 and tops == sorted(tops)


def test_on_a_phone_the_graph_is_as_high_as_its_drawing(visit: Visit) -> None:
    """T5 has two stacks side by side: its drawing filled 230 of the frame's 660 pixels, and the plans lay a screen below."""
    visit.page.set_viewport_size({"width": 400, "height": 850})
    visit.open("/?model=t5-large")
    visit.page.locator(".st-key-graph[data-drawn]").wait_for()
    frame, drawing = (visit.page.locator(part).first.bounding_box() for part in (".st-key-graph", ".world"))
    assert frame and drawing and drawing["height"] < frame["height"] < drawing["height"] + 130


def test_the_chart_of_plans_stays_beside_their_rows(visit: Visit) -> None:
    """Below it lay an empty column, and who chose one of the last rows did not see its point."""
    visit.page.set_viewport_size({"width": 1440, "height": 900})
    visit.open("/plans?layers=2")
    chart, row = visit.page.locator(".chart > svg"), visit.page.locator(".plans tbody tr").last
    row.evaluate("e => e.scrollIntoView({block: 'center', behavior: 'instant'})")
    at, beside = chart.bounding_box(), row.bounding_box()
    assert at and beside and at["y"] >= 0 and at["y"] < beside["y"] < at["y"] + at["height"]


@pytest.mark.parametrize("width", [400, 800])
def test_a_runs_name_takes_one_line(visit: Visit, width: int) -> None:
    """At 800 pixels it took two, beside columns that were half empty; a phone began a line with a per cent sign."""
    visit.page.set_viewport_size({"width": width, "height": 900})
    visit.open("/measured")
    heights = visit.page.locator(".plans tbody button").evaluate_all(
        "es => es.map(e => e.getBoundingClientRect().height)"
    )
    assert heights and max(heights) < 30
    assert "\u00a0%" in visit.page.get_by_text("of what was measured").inner_text()


@pytest.mark.parametrize("model", ["llama-3-8b", "t5-large"])
def test_a_launch_line_is_whole_beside_its_button(visit: Visit, model: str) -> None:
    """Beside the graph of T5, which is wider, it was cut off."""
    visit.page.set_viewport_size({"width": 1440, "height": 900})
    visit.open(f"/?layers=2&model={model}")
    line = visit.page.locator(".st-key-export_bar pre")
    line.get_by_text("--data").wait_for()
    assert line.evaluate("e => e.scrollWidth <= e.clientWidth")


def test_a_stage_is_not_covered_by_another_node(visit: Visit) -> None:
    """That of the embedding of words lay behind the embedding of positions."""
    visit.open("/?model=gpt2-xl&layers=4&setup=dp=8,pp=2&plan=our-current-setup")
    boxes = "es => es.map(e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; })"
    stages, bodies = (visit.page.locator(f".node {what}").evaluate_all(boxes) for what in (".stages text", "rect.body"))
    assert len(stages) >= 4 and len(bodies) > 8
    for left, top, right, bottom in stages:
        assert all(right <= b[0] or b[2] <= left or bottom <= b[1] or b[3] <= top for b in bodies)


@pytest.mark.parametrize("page", ["", "plans", "compare", "whatif", "measured", "learn?lesson=choose"])
def test_nothing_is_wider_than_a_phone(visit: Visit, page: str) -> None:
    visit.page.set_viewport_size({"width": 400, "height": 850})
    visit.open(f"/{page}")
    assert visit.overflow() == 0
    if not page:
        visit.page.locator(".st-key-export button").click()
        visit.page.get_by_role("dialog").get_by_role("button", name="Download train.py").wait_for()
        assert visit.overflow() == 0, "the dialog"


def test_a_plans_name_is_whole_on_a_phone(visit: Visit) -> None:
    """What if cut it off at “ZeRO-2 32, embedding split · 2 micr...”, and hid what is recomputed."""
    visit.page.set_viewport_size({"width": 400, "height": 850})
    visit.open("/whatif?layers=2&accumulate=2&recompute=full&whatif=batch:128,nodes:4")
    visit.page.locator(".st-key-whatif_answer [data-testid=stMetricValue]").last.wait_for()
    cut = "es => es.filter(e => [e, ...e.querySelectorAll('*')].some(x => x.scrollWidth > x.clientWidth + 1)).map(e => e.innerText)"
    texts = visit.page.locator(".st-key-whatif_answer").locator(
        "[data-testid=stMetricValue], [data-testid=stMetricDelta]"
    )
    assert texts.count() >= 6 and texts.evaluate_all(cut) == []
    assert visit.overflow() == 0


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page", ["", "plans", "compare", "whatif"])
def test_nothing_is_cut_off_at_800_pixels(visit: Visit, page: str, theme: Literal["light", "dark"]) -> None:
    visit.page.set_viewport_size({"width": 800, "height": 900})
    visit.page.emulate_media(color_scheme=theme)
    visit.open(f"/{page}")
    assert visit.overflow() == 0


SHIFTS = """
window.shifted = 0;
new PerformanceObserver((list) => { for (const e of list.getEntries()) if (!e.hadRecentInput) window.shifted += e.value; })
  .observe({ type: "layout-shift", buffered: true });
"""


@pytest.mark.slow  # a page of its own for each
@pytest.mark.parametrize("width", [1440, 800, 400])
def test_pages_do_not_jump_while_they_come(chromium: Browser, app: str, width: int) -> None:
    for name in ("", "plans", "compare", "whatif"):
        context = chromium.new_context(viewport={"width": width, "height": 1000})
        context.add_init_script(SHIFTS)
        visit = Visit(context.new_page(), app)
        visit.open(f"/{name}")
        visit.page.wait_for_timeout(1000)
        assert visit.page.evaluate("window.shifted") <= 0.1, name
        context.close()
