"""A learner's way through every lesson in a real browser, and the exported files without any server."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest
from playwright.sync_api import expect

from explorer.learn.files import export, kit, sheet
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question
from explorer.learn.lessons import LESSONS
from explorer.learn.lessons.times import l09_algorithms
from explorer.learn.visit import answers
from explorer.static import script
from planner_core.planning.request import Request
from tests.conftest import forget

pytestmark = pytest.mark.lessons


if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, WebSocketRoute

LLAMA = Learner(Request("llama-3-8b"))
HERE = re.compile(r"^(?:(?:https?|wss?)://(?:127\.0\.0\.1|localhost)[:/]|data:|blob:|about:|file:)")
QUICK = (2, 4, 13, 23)
every = pytest.mark.parametrize(
    "lesson",
    [pytest.param(x, id=f"lesson{x.number}", marks=() if x.number in QUICK else pytest.mark.slow) for x in LESSONS],
)


class Visit:
    """A page that keeps what it asked of other hosts and what went wrong."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.wrong: list[str] = []
        page.on("request", lambda r: None if HERE.match(r.url) else self.wrong.append(r.url))
        page.on("pageerror", lambda e: self.wrong.append(str(e)))

    def settle(self) -> None:
        self.page.wait_for_selector(".lesson svg, .lesson table", timeout=180_000)
        self.page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]", timeout=180_000)

    def at_step(self, number: int) -> None:
        self.page.get_by_role("heading", name=re.compile(rf"^{number}\. "), level=3).wait_for(timeout=90_000)
        self.settle()

    def drawn_anew(self, old: str) -> None:
        """Wait until the picture is another one."""
        for _ in range(100):
            if self.page.locator(".lesson").inner_html() != old:
                return
            self.page.wait_for_timeout(50)
        pytest.fail("the picture did not change")

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).click()


WIDE: ViewportSize = {"width": 1280, "height": 1000}


@pytest.fixture(scope="module")
def visit(window: BrowserContext) -> Iterator[Visit]:
    page = window.new_page()
    page.set_viewport_size(WIDE)
    page.set_default_timeout(90_000)
    yield Visit(page)
    forget(window)


def answer(visit: Visit, question: Question, index: int) -> None:
    """Choose an option, or type its number and press Enter."""
    asked = visit.page.locator(".st-key-question")
    if question.values:
        asked.get_by_role("textbox").fill(f"{question.values[index]:.6g}")
        visit.page.keyboard.press("Enter")
    else:
        asked.locator("label", has_text=re.compile(rf"^{re.escape(question.options[index])}$")).first.click()
        visit.press("Answer")


def movable(lesson: Lesson) -> Control:
    """The first control beside the picture."""
    return next(c for c in lesson.controls if c.kind != "placed")


def change(visit: Visit, lesson: Lesson) -> None:
    """Another option of the lesson's first control, by the mouse or the keys."""
    control = movable(lesson)
    at = visit.page.locator(f".st-key-w_{lesson.number}_{control.key}")
    other = next(o for o in control.options if o != control.default)
    if control.kind == "draw":
        at.get_by_role("button").click()
    elif control.kind == "slider":
        at.locator("input[type=range]").focus()
        visit.page.keyboard.press("ArrowLeft" if control.options.index(control.default) else "ArrowRight")
    elif len(control.options) < 4:
        at.get_by_role("radio", name=control.name(other), exact=True).click()
    else:
        at.get_by_role("combobox").click()
        visit.page.get_by_role("option", name=control.name(other), exact=True).click()


@every
@pytest.mark.slow(only=("lesson13", "lesson2", "lesson4", "lesson9"))
def test_a_lesson_played(visit: Visit, app: str, lesson: Lesson) -> None:
    scene, question = lesson.scene(LLAMA, lesson.defaults()), lesson.question(LLAMA, lesson.defaults())
    page = visit.page
    page.goto(f"{app}/learn?lesson={lesson.key}")
    visit.settle()
    visit.at_step(1)
    first = page.locator(".lesson").inner_html()
    for number in range(2, scene.reveal + 1):
        visit.press("Next")
        visit.at_step(number)
    if scene.reveal > 1:
        visit.drawn_anew(first)
        visit.press("Back")
        visit.at_step(scene.reveal - 1)
        visit.press("Next")
        visit.at_step(scene.reveal)
    answer(visit, question, (question.answer + 1) % len(question.options))
    page.get_by_text("Not quite.").wait_for()
    answer(visit, question, question.answer)
    page.get_by_text("Right.", exact=False).first.wait_for()
    visit.press("Next")
    visit.at_step(scene.reveal + 1)
    page.wait_for_url(re.compile(f"step={scene.reveal + 1}"))
    change(visit, lesson)
    page.wait_for_url(lambda url: f"with={movable(lesson).key}:" in unquote(url))
    visit.settle()
    expect(page.locator("[data-testid=stException], [data-testid=stAlertContentError]")).to_have_count(0)
    assert not visit.wrong


@every
@pytest.mark.slow(only=("lesson13", "lesson2", "lesson4", "lesson9"))
def test_the_file_works_offline(chromium: Browser, tmp_path: Path, lesson: Lesson) -> None:
    target = tmp_path / export.file_name(lesson)
    target.write_text(export.page(lesson, LLAMA, lesson.defaults()), encoding="utf-8")
    context = chromium.new_context(offline=True, reduced_motion="reduce")
    visit = Visit(context.new_page())
    page = visit.page
    page.goto(target.as_uri())
    assert page.title() == f"{lesson.number}. {lesson.title}"
    heading = page.locator("#step")
    expect(heading).to_have_text(re.compile("^1 of "))
    reveal, right = page.evaluate("[cases[current].reveal, cases[current].question.answer]")
    assert page.evaluate("cases[current].steps[0].picture") == lesson.scene(LLAMA, lesson.defaults()).steps[0].picture
    for _ in range(reveal - 1):
        page.click("#next")
    expect(heading).to_have_text(re.compile(f"^{reveal} of "))
    expect(page.locator("#next")).to_be_disabled()
    question = lesson.question(LLAMA, lesson.defaults())
    for index in ((right + 1) % len(question.options), right):
        if question.values:
            page.locator("#options input").fill(f"{question.values[index]:.6g}")
        else:
            page.locator("#options input").nth(index).check()
        page.click("#answer button")
        expect(page.locator("#why")).to_contain_text("Right." if index == right else "Not quite.")
    expect(page.locator("#why")).to_contain_text("Right.")
    page.click("#next")
    expect(heading).to_have_text(re.compile(f"^{reveal + 1} of "))
    page.keyboard.press("ArrowLeft")
    if page.locator("#case option").count() > 1:
        page.select_option("#case", index=0 if page.evaluate("current") else 1)
        assert page.locator("#picture").inner_html() and not page.locator("#next").is_hidden()
    assert page.evaluate("getComputedStyle(document.getElementById('picture')).animationName") == "none"
    assert not visit.wrong
    context.close()


def test_a_picture_moves_by_play_scrub_and_arrow_keys(chromium: Browser, tmp_path: Path) -> None:
    """At every stop the cells show the data of that stop; between stops something flies, unless the reader wants it calm."""
    lesson = LESSONS[8]
    (target := tmp_path / "film.html").write_text(export.page(lesson, LLAMA, lesson.defaults()), encoding="utf-8")
    states = l09_algorithms.rounds_of_ring(l09_algorithms.START)
    for motion in ("no-preference", "reduce"):
        context = chromium.new_context(offline=True, reduced_motion=motion)
        visit = Visit(context.new_page())
        page = visit.page
        page.goto(target.as_uri())
        place = page.get_by_role("slider", name="Place in the motion")
        cells, flights = page.locator(".film .cell:visible text"), page.locator(".film .flight:visible")
        place.focus()
        for stop in (0, 1, 2):
            expect(page.locator(".film .bar span")).to_have_text(f"{stop + 1} of {len(states)}")
            assert sorted(map(int, cells.all_text_contents())) == sorted(states[stop])
            expect(flights).to_have_count(0)
            page.keyboard.press("ArrowRight")
        page.keyboard.press("End")
        assert set(cells.all_text_contents()) == {str(sum(l09_algorithms.START))}
        expect(page.locator("#step")).to_have_text(re.compile("^1 of "))  # the arrows moved the picture, not the lesson
        place.evaluate("e => { e.value = '2.7'; e.dispatchEvent(new Event('input')); }")
        expect(flights).to_have_count(1 if motion == "no-preference" else 0)
        page.get_by_role("button", name="Play").click()
        expect(page.locator(".film .bar span")).to_have_text(f"5 of {len(states)}", timeout=20_000)
        page.get_by_role("button", name="Pause").click()
        assert not visit.wrong
        context.close()


def test_slides_turn_and_exercises_are_saved(chromium: Browser, tmp_path: Path) -> None:
    some = (LESSONS[1], LESSONS[3], LESSONS[8])
    for name, make in (("slides", kit.slides), ("exercises", sheet.exercises), ("keys", sheet.keys)):
        (tmp_path / f"{name}.html").write_text(make(some, LLAMA), encoding="utf-8")
    context = chromium.new_context(offline=True)
    visit = Visit(context.new_page())
    page = visit.page
    page.goto((tmp_path / "slides.html").as_uri())
    count = page.locator(".slide").count()
    expect(page.locator("#at")).to_have_text(f"1 of {count}")
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Next").click()
    expect(page.locator("#at")).to_have_text(f"3 of {count}")
    expect(page.locator(".slide:visible")).to_have_count(1)
    page.goto(
        (tmp_path / "slides.html").as_uri() + f"#{count - 5}"
    )  # an address of a slide; the ring of lesson 9 moves there or near
    page.reload()
    expect(page.locator("#at")).to_have_text(f"{count - 5} of {count}")
    page.goto((tmp_path / "exercises.html").as_uri())
    page.locator("#who").fill("Ada L")
    page.locator("[name='collectives']").fill("101")
    page.locator("[name='cuts']").first.check()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Save my answers as a file").click()
    assert waiting.value.suggested_filename == "answers-Ada-L.json"
    waiting.value.save_as(target := tmp_path / "answers.json")
    asked = LESSONS[1].question(LLAMA, LESSONS[1].defaults())
    assert json.loads(target.read_text(encoding="utf-8")) == {
        "name": "Ada L",
        "answers": {"cuts": asked.options[0], "collectives": "101"},
    }
    page.reload()  # what was typed stays
    expect(page.locator("#who")).to_have_value("Ada L")
    expect(page.locator("[name='collectives']")).to_have_value("101")
    expect(page.locator("[name='cuts']").first).to_be_checked()
    page.goto((tmp_path / "keys.html").as_uri())  # which mark the saved file
    page.locator("#files").set_input_files(target)
    right = 1 + (asked.answer == 0)
    count = len(list(sheet.exercises_of(some, LLAMA)))
    expect(page.locator("#marks summary")).to_have_text(f"Ada L: {right} of {count} right, {count - 2} open")
    expect(page.locator("#marks tr")).to_have_text(
        [re.compile("^cuts(right|wrong)"), re.compile("^collectivesright101")]
    )
    with page.expect_download() as waiting:
        page.locator("#table").click()
    waiting.value.save_as(marks := tmp_path / "marks.csv")
    assert marks.read_text(encoding="utf-8").splitlines()[1].startswith(f'"Ada L","{right}"')
    (tmp_path / "assigned.json").write_text('{"name": "Bo", "task": "4,4b", "answers": {"4": "101"}}', encoding="utf-8")
    page.locator("#files").set_input_files(tmp_path / "assigned.json")  # an assignment counts its own exercises only
    expect(page.locator("#marks summary")).to_have_text("Bo: 1 of 2 right, 1 open")
    assert not visit.wrong
    context.close()


def test_a_slide_fits_a_projector(chromium: Browser, tmp_path: Path) -> None:
    """Nothing of a slide, its tables or its picture lies outside 1280 × 720; keys of a control do not turn it; lessons can be chosen."""
    some = (LESSONS[1], LESSONS[12], LESSONS[8])
    (target := tmp_path / "slides.html").write_text(kit.slides(some, LLAMA), encoding="utf-8")
    page = chromium.new_page(viewport={"width": 1280, "height": 720})
    page.goto(target.as_uri())
    outside = """() => all.map((slide, i) => {
        turnTo(i);
        const boxes = [slide, ...slide.querySelectorAll(".scroll, .lesson")];
        return boxes.some((b) => b.scrollHeight > b.clientHeight + 8 || b.scrollWidth > b.clientWidth + 1) ? i + 1 : 0;
    }).filter(Boolean)"""
    assert page.evaluate(outside) == []
    page.goto(target.as_uri() + "#lesson=13")
    page.reload()
    page.keyboard.press("ArrowRight")
    now = page.locator("#at").text_content()
    matrix = page.locator(".slide.here .slot").last
    matrix.press("ArrowUp")
    expect(page.locator(".slide.here .count")).to_have_text(re.compile("^About"))
    expect(page.locator("#at")).to_have_text(now or "")
    page.goto(target.as_uri() + "?lessons=2")
    assert page.evaluate("all.every((s) => !s.dataset.lesson || s.dataset.lesson === '2')")
    expect(page.locator(".contents li")).to_have_count(1)
    page.close()


@pytest.mark.parametrize("number", [4, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.slow(but=("5",))
def test_the_download_is_the_lesson_as_it_stands(
    visit: Visit, chromium: Browser, app: str, tmp_path: Path, number: int
) -> None:
    """Lesson 4 is about tensors, lesson 5 about the learner's model and settings."""
    lesson = LESSONS[number - 1]
    visit.page.goto(f"{app}/learn?lesson={number}&model=gpt2-xl")
    visit.settle()
    change(visit, lesson)
    visit.page.wait_for_url(lambda url: f"with={movable(lesson).key}:" in unquote(url))
    visit.settle()
    shown = visit.page.locator(".lesson svg, .lesson table").first.get_attribute("aria-label")
    with visit.page.expect_download(timeout=90_000) as waiting:
        visit.press("Download this lesson as one HTML page")
    waiting.value.save_as(target := tmp_path / waiting.value.suggested_filename)
    assert target.name == export.file_name(lesson)
    offline = Visit(chromium.new_context(offline=True).new_page())
    offline.page.goto(target.as_uri())
    assert offline.page.title() == f"{number}. {lesson.title}"
    picture = offline.page.locator("#picture svg, #picture table").first
    assert shown and picture.get_attribute("aria-label") == shown  # the case that the learner chose, not the default
    offline.page.click("#next")
    expect(offline.page.locator("#step")).to_have_text(re.compile("^2 of "))
    assert not visit.wrong and not offline.wrong
    offline.page.context.close()


def test_the_browser_remembers_what_is_done(window: BrowserContext, app: str) -> None:
    """Answer a question right, come back in a new session of the same browser: the rail knows."""
    window.clear_cookies()
    question, scene = (f(LLAMA, LESSONS[1].defaults()) for f in (LESSONS[1].question, LESSONS[1].scene))
    for again in (False, True):
        visit = Visit(window.new_page())
        visit.page.set_default_timeout(90_000)
        visit.page.goto(f"{app}/learn?lesson=2&step={scene.reveal}")
        visit.settle()
        mine = visit.page.get_by_role("navigation", name="Lessons").get_by_role("link").nth(1)
        if not again:
            visit.at_step(scene.reveal)
            answer(visit, question, question.answer)
        visit.page.wait_for_function("document.cookie.split('; ').includes('shardscope_done=cuts')")
        assert mine.get_attribute("class") == "here"
        visit.page.get_by_role("button", name="Contents").click()
        visit.page.get_by_text(f"What you can do now: 1 of {len(LESSONS)} lessons").wait_for()
        assert not visit.wrong
        visit.page.close()
    window.clear_cookies()


def test_the_rail_is_links_for_mouse_keys_and_new_windows(visit: Visit, app: str) -> None:
    page = visit.page
    page.goto(f"{app}/learn?lesson=2&model=gpt2-xl")
    visit.settle()
    visit.press("Next")
    visit.at_step(2)
    links = page.get_by_role("navigation", name="Lessons").get_by_role("link")
    expect(links).to_have_count(len(LESSONS))
    for lesson, href in zip(LESSONS, links.evaluate_all("all => all.map((a) => a.href)"), strict=True):
        assert f"lesson={lesson.key}" in href and "model=gpt2-xl" in href
    expect(links.nth(1)).to_have_attribute("aria-current", "page")
    links.nth(3).focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="4. Collectives", level=2).wait_for()
    page.wait_for_url(lambda url: "lesson=collectives" in url and "model=gpt2-xl" in url)
    assert links.nth(3).evaluate("a => a.getRootNode().activeElement === a"), "the focus stays on the rail"
    links.nth(1).click()
    visit.at_step(2)  # where the learner left it
    page.wait_for_url(re.compile("step=2"))
    page.go_back()
    page.get_by_role("heading", name="4. Collectives", level=2).wait_for()
    assert not visit.wrong


def test_keys_reach_the_question_and_its_answer(visit: Visit, app: str) -> None:
    """Past the numbers by one link; a closed button passes the focus on; arrows choose and do not answer; the answer has the focus; the
    next lesson begins at its top."""
    page = visit.page
    page.goto(f"{app}/learn?lesson=2")
    visit.settle()
    page.get_by_role("link", name="Skip to the lesson").press("Enter")
    assert page.evaluate("document.activeElement.textContent").startswith("2. Two ways")
    question, scene = (f(LLAMA, LESSONS[1].defaults()) for f in (LESSONS[1].question, LESSONS[1].scene))
    for number in range(2, scene.reveal + 1):
        page.get_by_role("button", name="Next", exact=True).press("Enter")
        visit.at_step(number)
    page.wait_for_function("document.activeElement.classList.contains('st-key-says')")
    page.locator(".st-key-question input[type=radio]").first.focus()
    page.keyboard.press(" ")
    for _ in range(question.answer + 1):
        page.keyboard.press("ArrowDown")
    page.wait_for_timeout(400)
    expect(page.locator(".st-key-told [role=alert]")).to_have_count(0)
    answer(visit, question, question.answer)
    page.wait_for_function("document.activeElement.classList.contains('st-key-told')")
    assert page.evaluate("document.activeElement.textContent").startswith("Right.")
    scene = LESSONS[1].scene(LLAMA, LESSONS[1].defaults())
    for number in range(scene.reveal + 1, len(scene.steps) + 1):
        page.get_by_role("button", name="Next", exact=True).press("Enter")
        visit.at_step(number)
    page.get_by_role("button", name="Next lesson").press("Enter")
    page.wait_for_function("document.activeElement.textContent.startsWith('3. Replicate')")
    assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollTop") == 0
    assert not visit.wrong


def test_what_is_said_of_typed_answers_is_the_same_without_a_server(chromium: Browser) -> None:
    """The files' own script against the page's Python, on numbers, units, mistakes and nonsense."""
    questions = [x.question(LLAMA, x.defaults()) for x in LESSONS]
    texts = [
        "12",
        "1,900",
        "1.923",
        "4/3",
        "1.5",
        "101 MB",
        "0.1 GB",
        "46%",
        "0.46",
        "2650 µs",
        "x",
        "",
        "-1",
        "1e9",
        "1,2,3",
        "9 999 999",
        "≈ 8",
    ]
    page = chromium.new_page()
    page.add_script_tag(content=script("answers"))
    for asked in (q for q in questions if q.values):
        data = export.asked(asked)
        for text in [*texts, *(f"{v:.6g}" for v in asked.values)]:
            told, words = answers.judged(asked, text)
            got = page.evaluate("([q, t]) => judged(q, t)", [data, text])
            assert got == [told, export.inline(words) if told is not None else words]
    page.close()


@pytest.mark.slow
def test_lesson_13_tells_what_a_changed_placement_causes(visit: Visit, app: str) -> None:
    page = visit.page
    page.goto(f"{app}/learn?lesson=13&step=2")
    visit.settle()
    picture = page.locator(".lesson")
    expect(picture.get_by_text("all_to_all")).to_have_count(2)
    visit.press("Back")
    visit.at_step(1)
    cut, matrix = page.get_by_role("button", name="rows, S(1)"), page.get_by_role("spinbutton", name="down_proj")
    cut.hover()
    page.mouse.down()
    matrix.hover()  # held over it, it is counted already
    expect(page.locator(".count")).to_have_text(re.compile("^About 9.7 ms of messages"))
    page.mouse.up()
    expect(page.locator(".count")).to_have_text(re.compile("^4 collectives in a layer take 9.66 ms"))
    matrix.press("ArrowDown")  # the same with keys: columns, and back
    expect(page.locator(".count")).not_to_have_text(re.compile("^4 collectives"))
    expect(matrix).to_be_focused()
    matrix.press("ArrowUp")
    expect(page.locator(".count")).to_have_text(re.compile("^4 collectives"))
    visit.press("Next")
    page.get_by_text(re.compile(r"^4 collectives in one layer")).wait_for()
    visit.settle()
    expect(picture.get_by_text("all_reduce", exact=True)).to_have_count(4)
    expect(picture.get_by_text("all_to_all")).to_have_count(0)
    assert not visit.wrong


def test_lesson_13_tells_a_placement_again_whose_word_was_lost(visit: Visit, app: str) -> None:
    """The page sends a placement, and it never reaches the server."""
    page, lost = visit.page, []

    def between(browser: WebSocketRoute) -> None:
        server = browser.connect_to_server()

        def up(message: str | bytes) -> None:
            raw = message if isinstance(message, bytes) else message.encode()
            if not lost and b"down_proj" in raw:
                lost.append(raw)
            else:
                server.send(message)

        browser.on_message(up)

    page.route_web_socket(re.compile("_stcore/stream"), between)
    page.goto(f"{app}/learn?lesson=13")
    visit.settle()
    page.get_by_role("spinbutton", name="down_proj").press("ArrowUp")
    expect(page.locator(".count")).to_have_text(re.compile("^About"))
    expect(page.locator(".count")).not_to_have_text(re.compile("^About"), timeout=30_000)
    assert len(lost) == 1 and not visit.wrong


def test_pictures_stand_still_for_those_who_ask(visit: Visit, app: str) -> None:
    visit.page.emulate_media(reduced_motion="reduce")
    visit.page.goto(f"{app}/learn?lesson=4")
    visit.settle()
    visit.press("Next")
    visit.at_step(2)
    name = visit.page.locator(".lesson").evaluate("e => getComputedStyle(e).animationName")
    assert name == "none" and not visit.wrong
    visit.page.emulate_media(reduced_motion="no-preference")
    assert visit.page.locator(".lesson").evaluate("e => getComputedStyle(e).animationName") != "none"


def test_the_way_to_the_explorer_keeps_the_model(visit: Visit, app: str) -> None:
    visit.page.goto(f"{app}/learn?lesson=9&model=gpt2-xl")
    visit.settle()
    visit.page.get_by_role("link", name=re.compile("folded graph")).click()
    # the lesson's own address names the model too, so wait for the page as well
    visit.page.wait_for_url(lambda url: "/learn" not in url and "model=gpt2-xl" in url)
    visit.page.get_by_text("GPT-2 XL").first.wait_for()
    assert not visit.wrong


def test_headings_skip_no_level_and_a_closed_button_can_be_read(visit: Visit, app: str) -> None:
    page = visit.page
    page.goto(f"{app}/learn?lesson=8")
    visit.at_step(1)
    levels = page.locator("h1, h2, h3, h4, h5, h6").evaluate_all("all => all.map((h) => Number(h.tagName[1]))")
    assert levels and all(b - a <= 1 for a, b in itertools.pairwise(levels))
    closed = page.locator(".st-key-w_next button")
    expect(closed).to_be_disabled()  # the question comes first
    look = "e => [getComputedStyle(e.querySelector('p')).color, getComputedStyle(e).backgroundColor, getComputedStyle(document.body).backgroundColor]"
    words, *papers = closed.evaluate(look)
    assert words not in papers


@pytest.mark.parametrize("numbers", [(4, 13), pytest.param((2, 6, 7), marks=pytest.mark.slow)], ids=str)
def test_nothing_is_cut_off_on_a_small_screen(visit: Visit, app: str, numbers: tuple[int, ...]) -> None:
    page = visit.page
    page.set_viewport_size({"width": 800, "height": 1000})
    for number in numbers:
        page.goto(f"{app}/learn?lesson={number}")
        visit.settle()
        wide = "['html', '[data-testid=stMain]'].map((at) => document.querySelector(at)).map((e) => e.scrollWidth - e.clientWidth)"
        assert max(page.evaluate(wide)) <= 0  # the page scrolls inside its main box
        box = page.locator(".lesson svg").first.bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= 800
    page.set_viewport_size(WIDE)
