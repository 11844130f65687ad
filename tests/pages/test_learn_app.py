"""Every lesson in Streamlit's own test runner: step forward and back, change the control, answer right and wrong."""

import io
import json
import re
import zipfile
from pathlib import Path

import pytest

from explorer.learn import export, warm
from explorer.learn.learner import Learner
from explorer.learn.lesson import Lesson, Question
from explorer.learn.lessons import LESSONS
from planner_core.planning.request import Request
from tests.support.app_test import AppTest

pytestmark = pytest.mark.lessons


ROOT = Path(__file__).resolve().parents[2]
LLAMA = Learner(Request("llama-3-8b"))


def every(*quick: int) -> pytest.MarkDecorator:
    """Every lesson in `make test-all`; in `make test` one of each kind that the test tells apart."""
    marks = [() if x.number in quick else pytest.mark.slow for x in LESSONS]
    params = [pytest.param(x, marks=m, id=f"lesson{x.number}") for x, m in zip(LESSONS, marks, strict=True)]
    return pytest.mark.parametrize("lesson", params)


def opened(**query: str) -> AppTest:
    at = AppTest.from_file(str(ROOT / "streamlit_app.py"))
    for key, text in query.items():
        at.query_params[key] = text
    at.switch_page("explorer/pages/learn.py")
    at.run()
    assert not at.exception
    return at


def words(at: AppTest) -> str:
    return "\n".join(
        str(e.value) for kind in (at.markdown, at.caption, at.warning, at.error, at.success, at.info) for e in kind
    )


def step(at: AppTest) -> str:
    """The heading of the step shown."""
    return next(m.value.replace("\\", "") for m in at.markdown if m.value.startswith("### "))


def done(at: AppTest, lesson: Lesson) -> bool:
    """Whether the rail marks the lesson as done: its question has been answered right."""
    return bool(at.session_state["learn"][lesson.number].solved)


def param(at: AppTest, key: str) -> str:
    """A parameter of the address, as the page or as the test wrote it."""
    value = at.query_params[key]
    return value if isinstance(value, str) else value[0]


def to_question(at: AppTest, lesson: Lesson) -> None:
    for _ in range(lesson.scene(LLAMA, lesson.defaults()).reveal - 1):
        at.button(key="w_next").click().run()


def give(at: AppTest, question: Question, index: int) -> None:
    """Answer with an option, by typing it where the lesson wants a number."""
    if question.values:
        at.text_input[-1].set_value(f"{question.values[index]:.6g}")
    else:
        at.radio[0].set_value(question.options[index])
    submit(at)


def submit(at: AppTest) -> None:
    at.button(key="w_answer").click().run()


@every(4, 13)
def test_forward_stops_at_the_question_and_back_returns(lesson: Lesson) -> None:
    at = opened(lesson=lesson.key)
    scene = lesson.scene(LLAMA, lesson.defaults())
    assert f"## {lesson.number}. {lesson.title}" in words(at) and lesson.idea in words(at)
    assert step(at).startswith("### 1. ")
    to_question(at, lesson)
    assert step(at).startswith(f"### {scene.reveal}. ")
    assert scene.steps[scene.reveal - 1].says in words(at)
    assert at.button(key="w_next").disabled
    assert not at.exception
    if scene.reveal > 1:
        at.button(key="w_back").click().run()
        assert step(at).startswith(f"### {scene.reveal - 1}. ")
    at.slider[0].set_value(len(scene.steps)).run()  # nothing beyond the question
    assert step(at).startswith(f"### {scene.reveal}. ")


@every(4, 23)
@pytest.mark.slow(only=("lesson9",))
def test_a_wrong_answer_is_explained_and_a_right_one_opens_the_rest(lesson: Lesson) -> None:
    at = opened(lesson=lesson.key)
    to_question(at, lesson)
    scene, question = lesson.scene(LLAMA, lesson.defaults()), lesson.question(LLAMA, lesson.defaults())
    wrong = (question.answer + 1) % len(question.options)
    give(at, question, wrong)
    assert question.why[wrong] in at.error[0].value and not at.success
    assert at.button(key="w_next").disabled and not done(at, lesson)
    give(at, question, question.answer)
    assert done(at, lesson) and question.why[question.answer] in at.success[0].value and not at.error
    for _ in range(len(scene.steps) - scene.reveal):
        at.button(key="w_next").click().run()
        assert not at.exception
    assert step(at).startswith(f"### {len(scene.steps)}. ")
    assert scene.steps[-1].says in words(at)


@every(13)
def test_the_rest_can_be_shown_without_an_answer(lesson: Lesson) -> None:
    at = opened(lesson=lesson.key)
    to_question(at, lesson)
    at.button(key="w_show").click().run()
    assert not at.button(key="w_next").disabled and not done(at, lesson)


@every(1, 4, 15, 23)
@pytest.mark.slow(only=("lesson13", "lesson1"))
def test_every_control_changes_what_is_shown(lesson: Lesson) -> None:
    for control in (c for c in lesson.controls if c.kind != "placed"):  # those: test_browser_learn.py
        at = opened(lesson=lesson.key, step=str(control.step))
        key = f"w_{lesson.number}_{control.key}"
        if control.kind == "draw":
            at.button(key=key).click().run()
        else:
            other = next(o for o in control.options if o != control.default)
            kind = (
                "select_slider"
                if control.kind == "slider"
                else "button_group"
                if len(control.options) < 4
                else "selectbox"
            )
            widget = next(w for w in at.get(kind) if w.key == key)
            widget.set_value(other).run()
            assert f"{control.key}:{other}" in param(at, "with")
        assert not at.exception and not at.error


def test_a_control_comes_with_the_step_that_it_changes() -> None:
    """Of lesson 25 nothing moves the first step, and the links between nodes only the last one."""
    shown = [
        [
            c.key
            for c in LESSONS[24].controls
            if f"w_25_{c.key}"
            in {w.key for w in (*at.get("select_slider"), *at.get("button_group"), *at.get("selectbox"))}
        ]
        for at in (opened(lesson="pipeline", step=step) for step in ("1", "2", "6"))
    ]
    assert shown == [[], ["order", "m"], ["order", "m", "stages", "speed"]]


def test_a_step_to_draw_says_that_next_is_open() -> None:
    at = opened(lesson="memory", step="6")
    assert "Draw it" in step(at) and not at.button(key="w_next").disabled
    assert "Before you go on" not in words(at) and "before you go on" not in words(at) and "does not wait" in words(at)


@pytest.mark.sample
def test_a_number_is_typed_and_its_mistake_answered() -> None:
    at = opened(lesson="collectives")
    to_question(at, LESSONS[3])
    question = LESSONS[3].question(LLAMA, LESSONS[3].defaults())
    half = question.values.index(question.values[question.answer] / 2)
    give(at, question, half)
    assert "reduce-scatter alone" in question.why[half] and question.why[half] in at.error[0].value
    at.text_input[-1].set_value(" ")
    submit(at)
    assert at.warning[0].value == "Type a number first." and not at.error
    at.text_input[-1].set_value("many")
    submit(at)
    assert "not a number" in at.warning[0].value and not at.error
    at.text_input[-1].set_value(f"{question.values[question.answer] * 1.1:.4g}")
    submit(at)
    assert at.warning[0].value.startswith("Close") and at.button(key="w_next").disabled
    at.button(key="w_options").click().run()
    at.radio[0].set_value(question.options[question.answer])
    submit(at)
    assert done(at, LESSONS[3]) and not at.button(key="w_next").disabled


def test_behind_the_last_step_of_the_last_lesson_are_all_lessons_and_their_words() -> None:
    last = LESSONS[-1]
    at = opened(lesson=last.key, step=str(len(last.scene(LLAMA, last.defaults()).steps)))
    assert at.button(key="w_onward").label == "All lessons"
    at.button(key="w_onward").click().run()
    assert at.button(key="w_begin") and not at.exception
    assert any(e.label == f"{sum(len(x.terms) for x in LESSONS)} words of the course" for e in at.expander)


def test_progress_comes_by_a_link_and_can_be_forgotten() -> None:
    at = opened(lesson="cuts", done="memory,collectives,mlp,3,abc")
    assert "“3” in the link names no lesson" in words(at) and "“abc”" in words(at)
    assert [done(at, LESSONS[n]) for n in range(6)] == [True, False, False, True, True, False]
    at.button(key="w_contents").click().run()
    assert "lesson" not in at.query_params and f"{len(LESSONS)} lessons, 3 done" in words(at)
    assert at.button(key="w_begin").label == f"Go on: 2. {LESSONS[1].title}"
    assert "done" not in at.query_params
    at.button(key="w_start_over").click().run()
    assert not any(done(at, x) for x in LESSONS if x.number in at.session_state["learn"])


def test_a_new_case_closes_the_answer() -> None:
    at = opened(lesson="placements")
    to_question(at, LESSONS[2])
    at.button(key="w_show").click().run()
    at.button(key="w_3_case").click().run()
    to_question(at, LESSONS[2])
    assert at.button(key="w_next").disabled


@pytest.mark.sample
def test_the_address_opens_a_lesson_at_a_step_with_its_controls() -> None:
    at = opened(lesson="collectives", step="3", **{"with": "n:6"}, model="gpt2-xl")
    assert step(at).startswith("### 3. reduce-scatter, step 2 of 5")
    assert param(at, "model") == "gpt2-xl" and param(at, "lesson") == "collectives"


def test_a_link_to_a_question_holds_it_and_one_behind_it_shows_the_rest() -> None:
    reveal = LESSONS[3].scene(LLAMA, LESSONS[3].defaults()).reveal
    at = opened(lesson="collectives", step=str(reveal))
    assert at.button(key="w_next").disabled and "The next step waits for your answer." in words(at)
    at.button(key="w_answer").click().run()
    assert not at.error and not at.success
    at = opened(lesson="collectives", step=str(reveal + 1))
    assert not at.button(key="w_next").disabled and step(at).startswith(f"### {reveal + 1}. ")


def test_an_option_is_an_answer_only_when_it_is_given() -> None:
    """Arrow keys pass over options; none of those counts."""
    at = opened(lesson="cuts")
    to_question(at, LESSONS[1])
    question = LESSONS[1].question(LLAMA, LESSONS[1].defaults())
    at.button(key="w_answer").click().run()
    assert "Choose one of them first." in words(at)
    at.radio[0].set_value(question.options[question.answer]).run()
    assert not done(at, LESSONS[1]) and not at.success
    give(at, question, question.answer)
    assert done(at, LESSONS[1])


def test_the_right_answer_closes_its_question() -> None:
    """After “4 GPUs” somebody chose 8, and read “Not quite” below “It fits from 4 GPUs on”."""
    at = opened(lesson="cuts")
    to_question(at, LESSONS[1])
    question = LESSONS[1].question(LLAMA, LESSONS[1].defaults())
    wrong = next(k for k in range(len(question.options)) if k != question.answer)
    give(at, question, wrong)
    assert not at.radio[0].disabled and not at.button(key="w_answer").disabled
    give(at, question, question.answer)
    assert at.radio[0].disabled and at.button(key="w_answer").disabled and at.success


def test_a_bad_address_is_told_in_place() -> None:
    at = opened(lesson="77")
    assert "There is no lesson “77”" in at.warning[0].value
    at = opened(lesson="cuts", **{"with": "cut:sideways"})
    assert "sideways" in at.warning[0].value and step(at).startswith("### 1.")


def test_lessons_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after a lesson is prepared while it is read."""
    ahead: list[int] = []
    monkeypatch.setattr(warm, "prefetch_next", lambda number, learner: ahead.append(number))
    at = opened(
        lesson="memory", step=str(len(LESSONS[0].scene(Learner(Request("llama-3-8b")), LESSONS[0].defaults()).steps))
    )
    assert "## 1. " in words(at)
    at.button(key="w_onward").click().run()
    assert "## 2. Two ways to cut a matrix" in words(at)
    assert param(at, "lesson") == "cuts" and set(ahead) == {1, 2}


def test_another_model_is_shown_or_its_absence_told() -> None:
    at = opened(lesson="memory", model="gpt2-xl")
    assert "GPT-2 XL trains on 1 GPU" in words(at)
    at = opened(lesson="choose", model="resnet50-100k")
    assert "no block with these seven weights" in at.info[0].value


def test_a_step_that_is_not_there_is_told() -> None:
    at = opened(lesson="memory", step="99")
    assert "there is no step 99; showing the last" in words(at)


def test_all_lessons_are_one_archive_without_a_server() -> None:
    """Contents and a file for each lesson, each linked; nothing asks a host. On three lessons: typed, chosen, moving."""
    some = (LESSONS[1], LESSONS[3], LESSONS[8])
    with zipfile.ZipFile(io.BytesIO(export.course_archive(some, LLAMA))) as archive:
        names = [export.file_name(x) for x in some]
        assert archive.namelist() == ["index.html", *names]
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    assert all(len(text) < 4_000_000 and "{{" not in text.split("<script")[0] for text in files.values())
    assert not any(re.search(r"https?://(?!www\.w3\.org)|@import|url\(|src=", text) for text in files.values())
    links = {name: re.findall(r'href="([^"#?]+)', text.split("<script")[0]) for name, text in files.items()}
    assert links["index.html"] == names
    assert links[names[1]] == ["index.html", names[0], names[2]] and links[names[0]] == ["index.html", names[1]]
    for name, lesson in zip(names, some, strict=True):
        scene, question = lesson.scene(LLAMA, lesson.defaults()), lesson.question(LLAMA, lesson.defaults())
        data = json.loads(re.search(r'id="data">(.*?)</script>', files[name], re.DOTALL)[1])  # type: ignore[index]
        case = data["cases"][data["start"]]
        assert [step["picture"] for step in case["steps"]] == [step.picture for step in scene.steps]
        assert case["question"]["answer"] == question.answer
        assert case["question"]["why"] == [export.inline_html(why) for why in question.why]


def test_back_from_a_lesson_leads_to_the_contents() -> None:
    at = opened()
    at.button(key="w_begin").click().run()
    assert param(at, "lesson") == LESSONS[0].key
    at.query_params.clear()  # as the browser's Back does
    at.run()
    assert "Learn how a model is split" in words(at)
    at.button(key="w_begin").click().run()
    assert param(at, "lesson") == LESSONS[0].key
