"""axe-core over every page in both themes: nothing serious or critical that is ours (npm package axe-core, as bundled by
axe-playwright-python, put into the page by the test; nothing is fetched)."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pytest

from tests.pages.test_browser_own import LONG, config, press_plan, upload
from tests.support.visiting import Visit

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser

PAGES = {
    "overview": "/?tokens=15T&price=2",
    "a node": "/?node=LlamaDecoderLayer:self_attn.q_proj/linear&plan=megatron-lm-sequence-parallel",
    "plans": "/plans",
    "candidates": "/plans?tab=block&candidate=5",
    "a weight": "/plans?tab=weight&edit=best:keep,lm_head.weight:R",
    "compare": "/compare",
    "what if": "/whatif?whatif=batch:32",
    "measured": "/measured?of_kind=fsdp-one-node",
    "learn": "/learn?lesson=memory",
    "learn, the contents": "/learn",
    "learn, stages of a pipeline": "/learn?lesson=pipeline&step=2",
    "learn, a block to build": "/learn?lesson=choose",
    "learn, a wide table": "/learn?lesson=pays&step=6",
    "nothing fits": "/?model=gpt2-xl&cluster=1x8-h100&layers=2&batch=4096&accumulate=1&recompute=none",
    "refused": "/?model=gpt2-xl&cluster=1x8-h100&layers=2&memory=0.5&accumulate=1&recompute=none",
    "a link that asks for what is not there": "/?model=mamba9&cluster=moon&setup=dp",
    "what is run now": "/?model=gpt2-xl&cluster=1x8-h100&layers=2&setup=dp=8,recompute=full",
    "512 GPUs": "/compare?model=gpt2-xl&layers=2&cluster=64x8-h100",
    "70B": "/?model=llama-3-70b&cluster=8x8-h100",
}
STREAMLITS = {
    (
        "color-contrast",
        "[data-testid=stCode]",
    ): "the colours of st.code's syntax highlighting cannot be set from outside",
    (
        "color-contrast",
        "[data-stale=true]",
    ): "what the run before left is inactive, and fades until the new one has drawn",
    (
        "scrollable-region-focusable",
        "[data-testid=stCode]",
    ): "st.code's own scrolling <pre> takes no focus; its copy button does",
}
"""Findings inside widgets of Streamlit's that it gives no way to change: (rule, where), and why."""
AXE = files("axe_playwright_python") / "axe.min.js"
RUN = """
async (others) => {
  const found = await axe.run(document, {resultTypes: ["violations"]});
  const within = (target, where) => document.querySelector([target].flat()[0])?.closest(where);
  return found.violations.filter((v) => ["serious", "critical"].includes(v.impact)).flatMap((v) => v.nodes.map((n) => (
    {rule: v.id, html: n.html.slice(0, 200), why: n.failureSummary,
     theirs: others.some(([rule, where]) => rule === v.id && !!within(n.target[0], where))})));
}
"""


STILL = """
() => !document.querySelector("[data-stale=true]") && document.getAnimations().every(
  (a) => a.playState !== "running" || a.effect?.getComputedTiming().endTime === Infinity)
"""
"""Whether nothing of the run before is left and nothing fades in or out any more: colours in between have too little contrast."""


def findings(visit: Visit, path: str, opened: bool = False) -> list[dict[str, Any]]:
    """Serious and critical findings of a page that are not Streamlit's; with every closed section `opened` before."""
    visit.open(path)
    if opened:
        open_all(visit)
    visit.page.add_script_tag(content=AXE.read_text(encoding="utf-8"))
    return ours_at_rest(visit)


def ours_at_rest(visit: Visit) -> list[dict[str, Any]]:
    """What axe finds on the page while no run changes it: a search in the background runs it again, and what is drawn anew fades in."""
    runs = -1
    while runs != visit.num_runs:
        visit.settle()
        visit.page.wait_for_function(STILL)
        runs = visit.num_runs
        found = ours(visit)
    return found


def ours(visit: Visit) -> list[dict[str, Any]]:
    """What axe finds on the page as it stands that is not Streamlit's."""
    found: list[dict[str, Any]] = visit.page.evaluate(RUN, [list(key) for key in STREAMLITS])
    return [f for f in found if not f["theirs"]]


def open_all(visit: Visit) -> None:
    """Open every section of the page, also those that come with others."""
    closed = visit.page.locator("[data-testid=stExpander] details:not([open]) > summary")
    for _ in range(20):
        if not closed.count():
            return
        visit.click(closed.first)
        visit.settle()
    raise AssertionError("sections without end")


def test_axe_finds_nothing_serious_from_page_to_page(visit: Visit) -> None:
    """One window turns the pages, so that it loads only once."""
    visit.open(PAGES["overview"] + "&model=gpt2-xl&edit=best:keep,transformer.wte.weight:S(0)")
    visit.page.add_script_tag(content=AXE.read_text(encoding="utf-8"))
    for title in ("Overview", "Plans", "Compare", "Learn"):
        if title != "Overview":
            visit.turn(title)
        found = ours_at_rest(visit)
        assert not found, f"{title}: {json.dumps(found[:5], indent=1)}"


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_nothing_serious(chromium: Browser, app: str, page: str, theme: str) -> None:
    context = chromium.new_context(viewport={"width": 1440, "height": 1000}, color_scheme=theme)  # type: ignore[arg-type]
    found = findings(Visit(context.new_page(), app), PAGES[page])
    context.close()
    assert not found, json.dumps(found[:5], indent=1)


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "path",
    [
        "/?node=LlamaDecoderLayer:self_attn.q_proj/linear",
        "/plans",
        "/whatif?sweep=nodes&model=gpt2-xl",
        "/compare",
    ],
)
def test_axe_finds_nothing_serious_in_opened_sections(chromium: Browser, app: str, path: str, theme: str) -> None:
    context = chromium.new_context(viewport={"width": 1440, "height": 1000}, color_scheme=theme)  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(90_000)
    found = findings(Visit(page, app), path, opened=True)
    context.close()
    assert not found, json.dumps(found[:5], indent=1)


@pytest.mark.slow
def test_axe_finds_nothing_serious_while_a_model_is_read_and_once_it_is_there(visit: Visit, tmp_path: Path) -> None:
    upload(visit, tmp_path, json.dumps(config()))
    press_plan(visit)
    visit.page.get_by_text(re.compile("reading the model")).wait_for()
    visit.page.add_script_tag(content=AXE.read_text(encoding="utf-8"))
    for state in ("while it is read", "once it is there"):
        found = ours(visit)
        assert not found, f"{state}: {json.dumps(found[:5], indent=1)}"
        visit.page.locator("g.node").first.wait_for(timeout=LONG)
        visit.settle()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["Llama-3-8B", "2 nodes × 8 H100", "add our setup", "any tool", "Terms"])
def test_axe_finds_nothing_serious_in_what_pops_up(visit: Visit, which: str) -> None:
    visit.open("/")
    visit.page.get_by_role("button", name=which).click()
    closed = visit.page.locator("[data-testid=stPopoverBody] details:not([open]) > summary")
    for _ in range(closed.count()):  # one that opens is found no more
        closed.first.click()
    visit.page.wait_for_function(STILL)
    visit.page.add_script_tag(content=AXE.read_text(encoding="utf-8"))
    found = ours(visit)
    assert not found, json.dumps(found[:5], indent=1)


def test_axe_sees_what_is_wrong(chromium: Browser, app: str) -> None:
    """Broken on purpose: a button without a name and faint text are found."""
    context = chromium.new_context(viewport={"width": 1440, "height": 1000})
    page = context.new_page()
    page.set_content(
        "<html lang=en><title>x</title><main><button></button><p style='color:#ccc;background:#fff'>faint</p></main>"
    )
    page.add_script_tag(content=AXE.read_text(encoding="utf-8"))
    rules = {f["rule"] for f in page.evaluate(RUN, [list(key) for key in STREAMLITS])}
    context.close()
    assert {"button-name", "color-contrast"} <= rules
