"""A learner's way through every lesson in a real browser, and the exported files without any server."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest
from playwright.sync_api import expect

from explorer.learn import export
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question
from explorer.learn.lessons import LESSONS
from explorer.learn.lessons.times import l09_algorithms
from planner_core.planning.request import Request
from tests.conftest import PATIENCE_MS, forget
from tests.support import visiting
from tests.support.visiting import SlowServer

pytestmark = pytest.mark.lessons


if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ViewportSize, WebSocketRoute

LLAMA = Learner(Request("llama-3-8b"))
QUICK = (2, 4, 13, 23)
every = pytest.mark.parametrize(
    "lesson",
    [pytest.param(x, id=f"lesson{x.number}", marks=() if x.number in QUICK else pytest.mark.slow) for x in LESSONS],
)


class Visit(visiting.Visit):
    """A page with a lesson."""

    @property
    def wrong(self) -> list[str]:
        """What it asked of other hosts, and its errors."""
        return self.abroad + self.errors

    def settle(self) -> None:
        self.page.wait_for_selector(".lesson svg, .lesson table", timeout=visiting.LONG_MS)
        super().settle()

    def at_step(self, number: int) -> None:
        self.page.get_by_role("heading", name=re.compile(rf"^{number}\. "), level=3).wait_for()
        self.settle()

    def drawn_anew(self, old: str) -> None:
        """Wait until the picture is another one."""
        picture = self.page.locator(".lesson").element_handle()
        self.page.wait_for_function("([picture, old]) => picture.innerHTML !== old", arg=[picture, old])

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).click()


WIDE: ViewportSize = {"width": 1280, "height": 1000}


@pytest.fixture(scope="module")
def opened(window: BrowserContext, app: str) -> Iterator[Visit]:
    page = window.new_page()
    page.set_viewport_size(WIDE)
    page.set_default_timeout(PATIENCE_MS)
    yield Visit(page, app)
    forget(window)


@pytest.fixture
def visit(opened: Visit) -> Iterator[Visit]:
    """One page for all tests, to each of which it must have gone well."""
    yield opened
    wrong = opened.wrong
    opened.abroad, opened.errors = [], []
    assert not wrong


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


@every
@pytest.mark.slow(only=("lesson13", "lesson2", "lesson4", "lesson9"))
def test_the_file_works_offline(chromium: Browser, tmp_path: Path, lesson: Lesson) -> None:
    target = tmp_path / export.file_name(lesson)
    target.write_text(export.lesson_page(lesson, LLAMA, lesson.defaults()), encoding="utf-8")
    context = chromium.new_context(offline=True, reduced_motion="reduce")
    visit = Visit(context.new_page(), "")
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
    (target := tmp_path / "film.html").write_text(
        export.lesson_page(lesson, LLAMA, lesson.defaults()), encoding="utf-8"
    )
    states = l09_algorithms.run_ring(l09_algorithms.FIRST_NUMBERS)
    for motion in ("no-preference", "reduce"):
        context = chromium.new_context(offline=True, reduced_motion=motion)
        visit = Visit(context.new_page(), "")
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
        assert set(cells.all_text_contents()) == {str(sum(l09_algorithms.FIRST_NUMBERS))}
        expect(page.locator("#step")).to_have_text(re.compile("^1 of "))  # the arrows moved the picture, not the lesson
        place.evaluate("e => { e.value = '2.7'; e.dispatchEvent(new Event('input')); }")
        expect(flights).to_have_count(1 if motion == "no-preference" else 0)
        page.get_by_role("button", name="Play").click()
        expect(page.locator(".film .bar span")).to_have_text(f"5 of {len(states)}")
        page.get_by_role("button", name="Pause").click()
        assert not visit.wrong
        context.close()


@pytest.mark.parametrize("number", [4, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.slow(but=("5",))
def test_the_download_is_the_lesson_as_it_stands(
    visit: Visit, chromium: Browser, app: str, tmp_path: Path, number: int
) -> None:
    """Lesson 4 is about tensors, lesson 5 about the learner's model and settings."""
    lesson = LESSONS[number - 1]
    visit.page.goto(f"{app}/learn?lesson={lesson.key}&model=gpt2-xl&step={movable(lesson).step}")
    visit.settle()
    change(visit, lesson)
    visit.page.wait_for_url(lambda url: f"with={movable(lesson).key}:" in unquote(url))
    visit.settle()
    shown = visit.page.locator(".lesson svg, .lesson table").first.get_attribute("aria-label")
    with visit.page.expect_download() as waiting:
        visit.press("Download this lesson as one HTML page")
    waiting.value.save_as(target := tmp_path / waiting.value.suggested_filename)
    assert target.name == export.file_name(lesson)
    offline = Visit(chromium.new_context(offline=True).new_page(), "")
    offline.page.goto(target.as_uri())
    assert offline.page.title() == f"{number}. {lesson.title}"
    at_step = movable(lesson).step
    for _ in range(at_step - 1):
        offline.page.click("#next")
    picture = offline.page.locator("#picture svg, #picture table").first
    assert shown and picture.get_attribute("aria-label") == shown  # the case that the learner chose, not the default
    offline.page.click("#next")
    expect(offline.page.locator("#step")).to_have_text(re.compile(f"^{at_step + 1} of "))
    assert not offline.wrong
    offline.page.context.close()


def test_the_browser_remembers_what_is_done(window: BrowserContext, app: str) -> None:
    """Answer a question right, come back in a new session of the same browser: the rail knows."""
    window.clear_cookies()
    question, scene = (f(LLAMA, LESSONS[1].defaults()) for f in (LESSONS[1].question, LESSONS[1].scene))
    for again in (False, True):
        visit = Visit(window.new_page(), app)
        visit.page.set_default_timeout(PATIENCE_MS)
        visit.page.goto(f"{app}/learn?lesson=cuts&step={scene.reveal}")
        visit.settle()
        mine = visit.page.get_by_role("navigation", name="Lessons").get_by_role("link").nth(1)
        if not again:
            visit.at_step(scene.reveal)
            answer(visit, question, question.answer)
        visit.page.wait_for_function(
            r"document.cookie.split('; ').some((pair) => /^shardscope_done=cuts\.cuts~/.test(pair))"
        )
        assert mine.get_attribute("class") == "here"
        visit.page.get_by_role("button", name="Contents").click()
        visit.page.get_by_text(f"{len(LESSONS)} lessons, 1 done").wait_for()
        assert not visit.wrong
        visit.page.close()
    window.clear_cookies()


def test_a_reload_keeps_answers_and_what_they_opened(window: BrowserContext, app: str) -> None:
    """A wrong answer and its reply are there again, then the right one and the steps behind it; another case asks anew."""
    window.clear_cookies()
    question, scene = (f(LLAMA, LESSONS[1].defaults()) for f in (LESSONS[1].question, LESSONS[1].scene))
    wrong = (question.answer + 1) % len(question.options)
    visit = Visit(window.new_page(), app)
    visit.page.set_default_timeout(PATIENCE_MS)
    visit.page.goto(f"{app}/learn?lesson=cuts&step={scene.reveal}")
    visit.settle()
    reply, onward = visit.page.locator(".st-key-reply"), visit.page.get_by_role("button", name="Next", exact=True)
    for option in (wrong, question.answer):
        answer(visit, question, option)
        expect(reply).to_contain_text(plain(question.why[option]))
        visit.page.wait_for_function(f"document.cookie.includes('cuts~{option}~')")
        visit.page.reload()
        visit.settle()
        expect(reply).to_contain_text(plain(question.why[option]))
        expect(onward).to_be_enabled() if option == question.answer else expect(onward).to_be_disabled()
    other = f"{app}/learn?lesson=cuts&step={scene.reveal}&with=cut:rows"
    visit.page.goto(other)
    visit.settle()
    expect(visit.page.get_by_text(plain(question.why[question.answer]))).to_have_count(0)
    assert not visit.wrong
    visit.page.close()
    window.clear_cookies()


def plain(text: str) -> str:
    """What a page shows of a text, without marks of Markdown."""
    return re.sub(r"[`*]", "", text)


def test_the_rail_is_links_for_mouse_keys_and_new_windows(visit: Visit, app: str) -> None:
    page = visit.page
    page.goto(f"{app}/learn?lesson=cuts&model=gpt2-xl")
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


def test_a_lesson_of_the_contents_is_in_the_address(visit: Visit, app: str) -> None:
    page = visit.page
    page.goto(f"{app}/learn")
    page.get_by_role("link", name=LESSONS[1].title).click()
    page.get_by_role("heading", name=f"2. {LESSONS[1].title}", level=2).wait_for()
    page.wait_for_url(re.compile(f"lesson={LESSONS[1].key}"))


def test_keys_reach_the_question_and_its_answer(visit: Visit, app: str) -> None:
    """Past the numbers by one link; a closed button passes the focus on; arrows choose and do not answer; the answer has the focus; the
    next lesson begins at its top."""
    page = visit.page
    page.goto(f"{app}/learn?lesson=cuts")
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
    expect(page.locator(".st-key-reply [role=alert]")).to_have_count(0)
    answer(visit, question, question.answer)
    page.wait_for_function("document.activeElement.classList.contains('st-key-reply')")
    assert page.evaluate("document.activeElement.textContent").startswith("Right.")
    scene = LESSONS[1].scene(LLAMA, LESSONS[1].defaults())
    for number in range(scene.reveal + 1, len(scene.steps) + 1):
        page.get_by_role("button", name="Next", exact=True).press("Enter")
        visit.at_step(number)
    page.get_by_role("button", name="Next lesson").press("Enter")
    page.wait_for_function("document.activeElement.textContent.startsWith('3. Replicate')")
    assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollTop") == 0


def test_the_right_answer_stands_in_the_question_after_wrong_ones(visit: Visit, app: str) -> None:
    """The locked question showed the wrong option before it, beside “Right”."""
    lesson, page = LESSONS[0], visit.page
    question, scene = (f(LLAMA, lesson.defaults()) for f in (lesson.question, lesson.scene))
    page.goto(f"{app}/learn?lesson={lesson.key}&step={scene.reveal}")
    visit.settle()
    asked = page.locator(".st-key-question")
    for index in sorted(range(len(question.options)), key=lambda k: k == question.answer):
        answer(visit, question, index)
        expect(asked.locator(".st-key-reply")).to_contain_text("Right." if index == question.answer else "Not quite.")
        visit.settle()
        expect(asked.get_by_role("radio").nth(index)).to_be_checked()
    expect(asked.get_by_role("radio").nth(question.answer)).to_be_disabled()


def test_what_is_typed_below_a_reply_has_its_enter(visit: Visit, app: str) -> None:
    """Somebody types the next answer before the page stands still: the reply does not take the focus from it."""
    lesson = next(x for x in LESSONS if x.question(LLAMA, x.defaults()).values)
    question, page, server = lesson.question(LLAMA, lesson.defaults()), visit.page, SlowServer(visit.page)
    page.goto(f"{app}/learn?lesson={lesson.key}&step={lesson.scene(LLAMA, lesson.defaults()).reveal}")
    visit.settle()
    server.hold_end()
    answer(visit, question, (question.answer + 1) % len(question.options))
    page.get_by_text("Not quite.").wait_for()
    page.locator(".st-key-question").get_by_role("textbox").fill(f"{question.values[question.answer]:.6g}")
    server.release()
    visit.settle()
    page.wait_for_timeout(400)  # the focus goes to a reply by then
    page.keyboard.press("Enter")
    page.get_by_text("Right.").first.wait_for()


def test_the_next_lesson_has_the_focus_where_it_is_drawn_at_once(visit: Visit, app: str) -> None:
    """What the server says of the next lesson comes all together: the button that was pressed is gone when the rail is drawn."""
    page, server = visit.page, SlowServer(visit.page)
    page.goto(f"{app}/learn?lesson=cuts&step={len(LESSONS[1].scene(LLAMA, LESSONS[1].defaults()).steps)}")
    visit.settle()
    server.hold_all()
    page.get_by_role("button", name="Next lesson").press("Enter")
    while not server.ended:
        page.wait_for_timeout(50)
    server.release()
    page.wait_for_function("document.activeElement.textContent.startsWith('3. Replicate')")


@pytest.mark.slow
def test_lesson_13_tells_what_a_changed_placement_causes(visit: Visit, app: str) -> None:
    page = visit.page
    page.goto(f"{app}/learn?lesson=choose&step=2")
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
    page.goto(f"{app}/learn?lesson=choose")
    visit.settle()
    page.get_by_role("spinbutton", name="down_proj").press("ArrowUp")
    expect(page.locator(".count")).to_have_text(re.compile("^About"))
    expect(page.locator(".count")).not_to_have_text(re.compile("^About"))
    assert len(lost) == 1


def test_pictures_stand_still_for_those_who_ask(visit: Visit, app: str) -> None:
    visit.page.emulate_media(reduced_motion="reduce")
    visit.page.goto(f"{app}/learn?lesson=collectives")
    visit.settle()
    visit.press("Next")
    visit.at_step(2)
    name = visit.page.locator(".lesson").evaluate("e => getComputedStyle(e).animationName")
    assert name == "none"
    visit.page.emulate_media(reduced_motion="no-preference")
    assert visit.page.locator(".lesson").evaluate("e => getComputedStyle(e).animationName") != "none"


def test_the_way_to_the_explorer_keeps_the_model(visit: Visit, app: str) -> None:
    visit.page.goto(f"{app}/learn?lesson=folding&model=gpt2-xl")
    visit.settle()
    visit.page.get_by_role("link", name=re.compile("folded graph")).click()
    # the lesson's own address names the model too, so wait for the page as well
    visit.page.wait_for_url(lambda url: "/learn" not in url and "model=gpt2-xl" in url)
    visit.page.get_by_text("GPT-2 XL").first.wait_for()


def test_headings_skip_no_level_and_a_closed_button_can_be_read(visit: Visit, app: str) -> None:
    page = visit.page
    page.goto(f"{app}/learn?lesson=backward")
    visit.at_step(1)
    levels = page.locator("h1, h2, h3, h4, h5, h6").evaluate_all("all => all.map((h) => Number(h.tagName[1]))")
    assert levels and all(b - a <= 1 for a, b in itertools.pairwise(levels))
    closed = page.locator(".st-key-w_next button")
    expect(closed).to_be_disabled()  # the question comes first
    look = "e => [getComputedStyle(e.querySelector('p')).color, getComputedStyle(e).backgroundColor, getComputedStyle(document.body).backgroundColor]"
    words, *papers = closed.evaluate(look)
    assert words not in papers


@pytest.mark.parametrize(
    "keys",
    [("collectives", "choose"), pytest.param(("cuts", "heads", "sequence"), marks=pytest.mark.slow)],
    ids=str,
)
def test_nothing_is_cut_off_on_a_small_screen(visit: Visit, app: str, keys: tuple[str, ...]) -> None:
    page = visit.page
    page.set_viewport_size({"width": 800, "height": 1000})
    for key in keys:
        page.goto(f"{app}/learn?lesson={key}")
        visit.settle()
        wide = "['html', '[data-testid=stMain]'].map((at) => document.querySelector(at)).map((e) => e.scrollWidth - e.clientWidth)"
        assert max(page.evaluate(wide)) <= 0  # the page scrolls inside its main box
        box = page.locator(".lesson svg").first.bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= 800
    page.set_viewport_size(WIDE)
