"""Compare as a person uses it: look at the step, see all weights, take a trace along, add a plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from playwright.sync_api import expect

from tests.support.visiting import Visit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Locator, Page


@pytest.mark.slow
def test_compare_step_by_step(visit: Visit) -> None:
    page = visit.page
    visit.open("/compare?compare=best,megatron-lm")
    page.locator(".js-plotly-plot").nth(1).wait_for()
    visit.settle()

    page.get_by_text("How every weight lies").click()
    rows = page.locator("table[aria-label^='placement of weights'] tbody tr")
    few = rows.count()
    page.get_by_role("radio", name=re.compile("^all, ")).click()
    page.wait_for_function("location.search.includes('rows=all')")
    visit.settle()
    rows.nth(few).wait_for()

    page.get_by_role("radio", name="TAP", exact=True).click()
    page.wait_for_function("location.search.includes('rungs=tap')")
    page.get_by_text(re.compile("^TAP takes")).wait_for()
    visit.settle()
    before = visit.query
    page.reload()
    visit.settle()
    page.get_by_text(re.compile("^TAP takes")).wait_for()
    visit.asks(lambda query: query == before)


def test_the_step_in_time_opens_down_to_operators_and_downloads_as_a_trace(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    visit.open("/compare?compare=best,megatron-lm&layers=4")
    canvas, card = page.locator(".streams canvas"), page.locator(".streams .card")
    expect(canvas).to_have_attribute("aria-label", re.compile("Best plan: .*compute .*; Megatron-LM: .*waits"))
    canvas.scroll_into_view_if_needed()
    page.get_by_role("button", name="One layer").click()

    def said(apart: int = 20) -> Iterator[str]:
        return (words_at(page, canvas, card, x, lane) for x in range(100, 1100, apart) for lane in (84, 214))

    assert any("mlp.up_proj/linear" in t and "computes" in t and "LlamaDecoderLayer 1 of 4" in t for t in said())
    assert any("exposed, the GPU waits" in t and "wait for it" in t for t in said())
    assert not any("update weights" in t for t in said())
    canvas.press("0")
    assert any("update weights" in t and "of 4" not in t for t in said(4))  # the whole step, with what ends it
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Chrome trace").click()
    waiting.value.save_as(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["Best plan", "Megatron-LM"]


STRENGTHS = """(canvas, y) => {
  const scale = canvas.width / canvas.clientWidth;
  const row = canvas.getContext("2d").getImageData(92 * scale, y * scale, canvas.width, 1).data;
  return [...row.filter((_, k) => k % 4 === 3)].map((alpha) => alpha / 255);
}"""


def test_work_shorter_than_a_pixel_is_seen_in_the_whole_step(visit: Visit) -> None:
    """Of a lane with short collectives the dark theme showed next to nothing."""
    visit.page.set_viewport_size({"width": 800, "height": 900})
    visit.page.emulate_media(color_scheme="dark")
    visit.open("/compare?compare=best,megatron-lm")
    canvas = visit.page.locator(".streams canvas")
    expect(canvas).to_have_attribute("aria-label", re.compile("Megatron-LM: .*waits"))
    strengths = canvas.evaluate(STRENGTHS, 238)
    assert sum(strength > 0.5 for strength in strengths) > 60, "the collectives of Megatron-LM"


def words_at(page: Page, canvas: Locator, card: Locator, x: float, y: float) -> str:
    """What the card says of the work at a point of the canvas."""
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + x, box["y"] + y)
    return card.inner_text() if card.is_visible() else ""


@pytest.mark.slow
def test_a_third_plan_beside_the_two(visit: Visit) -> None:
    page = visit.page
    visit.open("/compare?compare=best,megatron-lm")
    field = page.get_by_role("combobox", name=re.compile("Plans"))
    visit.click(field)
    page.get_by_role("option", name=re.compile("^FSDP")).click()
    page.wait_for_function("location.search.includes('fsdp')")
    page.keyboard.press("Escape")
    visit.settle()
    expect(page.locator(".svg svg")).to_have_count(3)


@pytest.mark.parametrize(
    "path",
    [
        "compare?rungs=tap&rows=all",
    ],
)
@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
@pytest.mark.slow(but=("dark-compare?rungs=tap&rows=all",))
def test_opened_sections_fit_800_pixels(visit: Visit, path: str, theme: Literal["light", "dark"]) -> None:
    visit.page.set_viewport_size({"width": 800, "height": 900})
    visit.page.emulate_media(color_scheme=theme)
    visit.open(f"/{path}")
    assert visit.overflow() == 0
