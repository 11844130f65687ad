"""Predictions drawn with a mouse, a finger and keys, and what is said to them; the pages need no server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from explorer.learn.learner import Learner
from explorer.learn.lessons import LESSONS
from explorer.learn.pictures.sketch import Curve, ExpectedMistake, Handle, Sketch, bars, curves, spans
from explorer.static import script, style
from planner_core.planning import Request

pytestmark = pytest.mark.lessons


if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

HALVES = ExpectedMistake("halved", (40.0, 20.0), "You halved it each time.")
BARS = bars(
    Sketch(
        "bars",
        "GiB",
        100.0,
        (Handle("each of 2", 70.0, 60.0), Handle("each of 4", 70.0, 0.5)),
        (HALVES,),
        "Some of it stays whole.",
    ),
    ("one", 80.0),
    (79.6, "room"),
)
SPANS = spans(
    Sketch(
        "spans",
        "ms",
        12.0,
        (Handle("gather of layer 2", 6.0, 0.0, 1, 2.0), Handle("compute of layer 2", 9.0, 3.0, 0, 3.0)),
        why="Both at once.",
    ),
    [("compute", [(0.0, 3.0, "layer 1", "#0072b2")]), ("beside it", [])],
)
CURVES = curves(
    Sketch("curves", "s", 10.0, (Handle("few", 5.0, 2.0, 0.5), Handle("many", 5.0, 8.0, 1.0)), why="It grows."),
    [Curve("time", (0.0, 1.0))],
    [(0.0, "none"), (1.0, "many")],
    "s",
)


@pytest.fixture(scope="module")
def context(chromium: Browser) -> Any:
    made = chromium.new_context(
        viewport={"width": 400, "height": 900}, offline=True, reduced_motion="reduce", has_touch=True
    )
    yield made
    made.close()


def shown(context: BrowserContext, markup: str) -> Page:
    page = context.new_page()
    page.set_content(f'<style>{style("lesson")}</style><div class="lesson" id="here">{markup}</div>')
    page.add_script_tag(content=f"{script('alive')}\nlet end = alive(here);")
    return page


def to(page: Page, name: str, place: float) -> tuple[float, float, float, float]:
    """Where the handle can be taken, and where it is to go: `place` is a part of the scale."""
    start, scale = page.evaluate(
        """([name, place]) => {
          const handle = document.querySelector(`[aria-label="${name}"]`), svg = document.querySelector(".sketch svg");
          const { from, to, look } = JSON.parse(document.querySelector(".sketch").dataset.sketch);
          const matrix = svg.getScreenCTM(), at = handle.transform.baseVal.getItem(0).matrix, p = from + place * (to - from);
          const point = (x, y) => { const q = new DOMPoint(x, y).matrixTransform(matrix); return [q.x, q.y]; };
          const inside = look === "span" ? 8 : 0;
          return [point(at.e + inside, at.f + (look === "point" ? 0 : 8)), look === "point" ? point(at.e, p) : point(p + inside, at.f + 8)];
        }""",
        [name, place],
    )
    return (*start, *scale)


def test_bars_are_dragged_with_the_mouse_and_compared(context: BrowserContext) -> None:
    page = shown(context, BARS)
    compare, said = page.locator(".compare"), page.locator(".said")
    truth = page.locator(".truth")
    compare.click()
    expect(said).to_have_text("Nothing is drawn yet: move a handle first.")
    expect(truth).to_be_hidden()
    for name, place in (("each of 2", 0.4), ("each of 4", 0.2)):  # the mistake that is expected
        x0, y0, x1, y1 = to(page, name, place)
        page.mouse.move(x0, y0)
        page.mouse.down()
        page.mouse.move((x0 + x1) / 2, y0, steps=3)
        page.mouse.move(x1, y1)
        page.mouse.up()
        value = float(page.get_by_role("slider", name=name).get_attribute("aria-valuenow") or 0)
        assert value == pytest.approx(100 * place, abs=1)
        expect(page.locator(f'[aria-label="{name}"] .value')).to_have_text(f"{value:.3g} GiB")
    compare.click()
    expect(truth).to_be_visible()
    expect(said).to_contain_text("Not quite. You halved it each time. Some of it stays whole.")
    expect(said).to_contain_text("it is 60 GiB: 33 % too little.")
    expect(said).to_contain_text("it is 0.5 GiB: too much.")
    page.evaluate("end(); end = alive(here)")  # another step was shown in between: what was drawn is still there
    expect(said).to_contain_text("You halved it each time.")
    page.get_by_role("slider", name="each of 4").press("Home")
    expect(page.get_by_role("slider", name="each of 4")).not_to_have_attribute("aria-valuenow", "0")  # it was compared
    compare.click()
    expect(truth).to_be_hidden()
    page.get_by_role("slider", name="each of 4").press("Home")
    page.get_by_role("slider", name="each of 2").press("PageUp")
    page.get_by_role("slider", name="each of 2").press("PageUp")
    compare.click()
    expect(said).to_contain_text("As near as a hand can draw. Some of it stays whole.")
    assert "You halved" not in said.inner_text()
    page.close()


def test_spans_are_dragged_with_a_finger(context: BrowserContext) -> None:
    page = shown(context, SPANS)
    touch = context.new_cdp_session(page)

    def send(kind: str, *points: tuple[float, float]) -> None:
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y} for x, y in points]})

    for name, place in (("gather of layer 2", 0.0), ("compute of layer 2", 0.5)):
        x0, y0, x1, y1 = to(page, name, place)
        send("touchStart", (x0, y0))
        for part in (0.5, 1):
            send("touchMove", (x0 + part * (x1 - x0), y1))
        send("touchEnd")
    page.locator(".compare").tap()
    said = page.locator(".said")
    expect(said).to_contain_text("Not quite. Both at once.")
    expect(said).to_contain_text("gather of layer 2: you let it begin at 0 ms, it begins at 0 ms. Near enough.")
    expect(said).to_contain_text("compute of layer 2: you let it begin at 6 ms, it begins at 3 ms: 3 ms too late.")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.close()


def test_curves_are_moved_with_keys_and_follow(context: BrowserContext) -> None:
    page = shown(context, CURVES)
    line = page.locator(".drawn")
    before = line.get_attribute("d") or ""
    page.keyboard.press("Tab")
    few = page.get_by_role("slider", name="few")
    expect(few).to_be_focused()
    for key, value in (
        ("ArrowDown", 4.9),
        ("PageDown", 3.9),
        ("End", 10),
        ("ArrowUp", 10),
        ("Home", 0),
        ("ArrowUp", 0.1),
    ):
        page.keyboard.press(key)
        assert float(few.get_attribute("aria-valuenow") or 0) == pytest.approx(value), key
    assert few.get_attribute("aria-valuetext") == "0.1 s"
    after = line.get_attribute("d") or ""
    assert before.split("L")[0] == after.split("L")[0] and before.split("L")[1] != after.split("L")[1]
    page.keyboard.press("Tab")
    for _ in range(3):
        page.keyboard.press("PageUp")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".said")).to_contain_text("few: you drew 0.1 s, it is 2 s: 95 % too little.")
    expect(page.locator(".said")).to_contain_text("many: you drew 8 s, it is 8 s. Near enough.")
    animation = page.evaluate("getComputedStyle(document.querySelector('.truth')).animationName")
    assert animation == "none", "calm was asked for"
    assert json.loads(page.locator(".sketch").get_attribute("data-sketch") or "")["why"] == "It grows."
    page.close()


@pytest.mark.parametrize("number", [1, 14, 15, 16, 25])
def test_the_result_of_a_lessons_bars_is_on_a_phones_screen(context: BrowserContext, number: int) -> None:
    """Totals and "does not fit" stood at the bars' ends, 146 pixels off the screen, in a box that scrolled without a sign."""
    lesson = LESSONS[number - 1]
    steps = lesson.scene(Learner(Request("llama-3-8b")), lesson.defaults()).steps
    bars_of = ("<title>compute: ", "<title>fullest moment: ", "a plan may fill")
    pictures = [s.picture for s in steps if s.picture.startswith("<svg") and any(x in s.picture for x in bars_of)]
    assert pictures
    for picture in pictures:
        page = shown(context, f'<div class="lesson" id="box" style="width: 368px">{picture}</div>')
        out = page.evaluate(
            """() => [...box.querySelectorAll("svg text")].filter(
                 x => x.getBoundingClientRect().right > box.getBoundingClientRect().right).map(x => x.textContent)"""
        )
        assert not out
        page.close()
