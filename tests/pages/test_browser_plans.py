"""A person choosing a plan in a real browser: filter, click, pin, share the link."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.support.visiting import Visit

PLACE = """
(plot) => { const {xaxis: x, yaxis: y} = plot._fullLayout, front = plot._fullData[1];
            return [x._offset + x.l2p(front.x[2]), y._offset + y.l2p(front.y[2])]; }
"""
"""Where the third plan of the front of candidates is drawn."""


@pytest.mark.slow
def test_a_clicked_candidate_is_in_the_link(visit: Visit) -> None:
    page = visit.page
    visit.open("/plans?tab=block")
    candidates = page.locator("[data-testid=stPlotlyChart]").first
    candidates.locator(".nsewdrag").first.wait_for()
    plot = candidates.locator(".js-plotly-plot")
    plot.evaluate("e => e.scrollIntoView({block: 'center', behavior: 'instant'})")
    visit.settle()
    box, (x, y) = plot.bounding_box(), plot.evaluate(PLACE)
    assert box is not None
    page.mouse.move(box["x"] + x, box["y"] + y)
    page.locator(".hoverlayer .hovertext").first.wait_for()
    page.mouse.click(box["x"] + x, box["y"] + y)
    page.wait_for_function("location.search.includes('candidate=')")
    visit.settle()
    visit.asks(lambda query: "block=LlamaDecoderLayer" in query)
    told = page.get_by_text(re.compile("of communication = 32 ×")).inner_text()
    page.reload()
    visit.settle()
    expect(page.get_by_text(re.compile("of communication = 32 ×"))).to_have_text(told)


def test_a_point_of_the_chart_says_its_figures_and_chooses_its_plan(visit: Visit) -> None:
    page = visit.page
    visit.open("/plans")
    for plan in ("data-parallel", "hf-expert"):
        page.locator(f".chart [data-id={plan}] .mark").hover()
        card = page.locator(".chart .card").inner_text()
        assert "communication" in card and "GiB" in card
        page.locator(f".chart [data-id={plan}] .mark").click()
        visit.asks(lambda query, plan=plan: f"plan={plan}" in query)
        visit.settle()
        expect(page.locator(f".chart [data-id={plan}] .chosen")).to_have_count(1)
        expect(page.locator(f".plans tr[data-id={plan}]")).to_have_attribute("aria-current", "true")
    page.set_viewport_size({"width": 400, "height": 900})
    page.wait_for_function("document.querySelector('[data-testid=stMain]').clientWidth <= 400")
    chart, mark = page.locator(".chart").bounding_box(), page.locator(".chart [data-id=hf-expert]").bounding_box()
    assert chart is not None and mark is not None
    assert chart["x"] < mark["x"] and mark["x"] + mark["width"] < chart["x"] + chart["width"], "drawn anew for a phone"


@pytest.mark.slow
def test_pins_survive_new_settings_and_a_reload(visit: Visit) -> None:
    page = visit.page
    visit.open("/plans?plan=fsdp")
    page.get_by_role("button", name="Pin this plan").click()
    page.wait_for_function("location.search.includes('compare=fsdp')")
    visit.settle()
    page.locator("[class*='st-key-chip_batch'] button").first.click()
    page.get_by_role("textbox", name="Batch of a step").fill("32")
    page.locator("[class*='st-key-plan_batch'] button").click()
    page.wait_for_function("location.search.includes('batch=32')")
    visit.settle()
    page.get_by_role("button", name=re.compile(r"FSDP \(usual batch\)")).wait_for()
    page.get_by_role("button", name="Pin this plan").click()
    visit.settle()
    page.reload()
    visit.settle()
    page.get_by_role("link", name="Compare them").click()
    page.wait_for_url(re.compile("compare"))
    visit.settle()
    page.get_by_text(re.compile("less time than|tie in time")).first.wait_for()
    page.get_by_text(re.compile(r"FSDP \(usual batch\)")).first.wait_for()


@pytest.mark.slow
def test_a_slider_plans_again_and_its_values_can_be_taken(visit: Visit) -> None:
    page = visit.page
    visit.open("/whatif")
    knob = page.get_by_role("slider", name="Batch, samples a step")
    knob.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("location.search.includes('whatif=batch')")
    visit.settle()
    told = page.locator(".st-key-whatif_answer").inner_text()
    assert "%" in told and "before: " in told
    assert "being looked for" not in page.locator("[data-testid=stMain]").inner_text()
    page.reload()
    visit.settle()
    page.wait_for_function("(t) => document.querySelector('.st-key-whatif_answer')?.innerText === t", arg=told)
    page.get_by_role("button", name="Plan with these").click()
    page.wait_for_function("location.search.includes('batch=32') && !location.search.includes('whatif')")
    visit.settle()
    expect(page.locator("[class*='st-key-chip_batch']").first).to_contain_text("32 ×")


def test_planning_says_what_it_does_and_can_be_stopped(visit: Visit) -> None:
    page = visit.page
    page.goto(visit.base + "/plans?model=t5-large&cluster=8x8-h100&batch=96")
    page.get_by_text(re.compile("Planning: ")).wait_for()
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_text("Planning was stopped").wait_for()
    visit.settle()
    expect(page.locator(".chart")).to_have_count(0)
    page.get_by_role("button", name="Plan now").click()
    page.get_by_text(re.compile("Planning: ")).wait_for()
    expect(page.get_by_text("Planning was stopped")).to_have_count(0)
    page.get_by_role("button", name="Stop", exact=True).click()  # it takes minutes; others are planned without stopping
    page.get_by_text("Planning was stopped").wait_for()
