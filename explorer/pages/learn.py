"""Learn: how does it work? Lessons, each one idea with live numbers, a control, a question and the PyTorch."""

from __future__ import annotations

import random
from typing import Any
from urllib.parse import urlencode

import streamlit as st

from explorer.address import carry, settings
from explorer.components import frame
from explorer.components.lesson import picture
from explorer.components.lesson import rail as lesson_links
from explorer.components.request_form import sentence
from explorer.learn.files import export, written
from explorer.learn.lesson import Control, Lesson, Question, Scene
from explorer.learn.lessons import LESSONS
from explorer.learn.recent import seen, shown
from explorer.learn.visit import address, answers, assignment, course, task
from explorer.learn.visit.place import (
    assigned,
    begin,
    exercise,
    learner,
    place,
    to_address,
)
from explorer.learn.warm import prefetch, warm
from explorer.session import state
from planner_core.core import PlannerError

PAGE = "explorer/pages/{}.py"


def go(number: int) -> None:
    """Callback: another lesson; 0 is the contents."""
    st.session_state["learn_number"] = number
    st.session_state["learn_problems"] = []


def turn(lesson: Lesson, scene: Scene, by: int | None = None) -> None:
    """Callback: another step, no further than what is open."""
    here = place(lesson)
    to = here["step"] + by if by is not None else st.session_state[f"w_step_{lesson.number}"] - 1
    most = len(scene.steps) if here["open"] else scene.reveal
    here["step"] = max(0, min(to, most - 1))


def take(lesson: Lesson, control: Control, widget: str) -> None:
    """Callback: a control was moved. A new case closes what its question asks for."""
    here = place(lesson)
    if control.kind == "draw":
        others = [o for o in control.options if o != here["values"][control.key]]
        here["values"][control.key] = random.choice(others)
        here.update(step=min(here["step"], 0), open=False, told=None, hint="")
    elif st.session_state[widget] is not None:
        here["values"][control.key] = st.session_state[widget]
        here.update(told=None, hint="")


def take_placed(lesson: Lesson) -> None:
    """Callback: the learner changed the picture itself."""
    wanted, here = st.session_state["picture"]["set"] or {}, place(lesson)
    placed = {
        c.key: wanted.get(c.key) for c in lesson.controls if c.kind == "placed" and wanted.get(c.key) in c.options
    }
    if any(here["values"][key] != option for key, option in placed.items()):  # the picture may say the same twice
        here["values"].update(placed)
        here.update(told=None, hint="")


def answer(lesson: Lesson, question: Question, widget: str) -> None:
    """Callback: an option was chosen."""
    chosen = st.session_state[widget]
    if chosen is not None and keep_answer(lesson, task.answer_of(question, question.options.index(chosen))):
        return
    take_answer(lesson, question, None if chosen is None else question.options.index(chosen))
    place(lesson)["hint"] = "Choose one of them first." if chosen is None else ""


def answer_typed(lesson: Lesson, question: Question, widget: str) -> None:
    """Callback: a number was typed."""
    text = st.session_state[widget].strip()
    if text and keep_answer(lesson, text):
        return
    told, words = answers.judged(question, text) if text else (None, "")
    take_answer(lesson, question, told)
    place(lesson)["hint"] = words if told is None else ""


def keep_answer(lesson: Lesson, text: str) -> bool:
    """Keep an answer for the assignment, unjudged; False where the lesson shows none of its exercises."""
    name = exercise(lesson)
    if name:
        assigned()[1][name] = text[: task.LONGEST]
        place(lesson)["hint"] = ""
        st.session_state["learn_newly"] = True
    return bool(name)


def take_answer(lesson: Lesson, question: Question, told: int | None) -> None:
    """Keep an answer; the right one opens the rest."""
    here, right = place(lesson), told == question.answer
    st.session_state["learn_newly"] = right and not here["right"]
    here.update(told=told, open=here["open"] or right, right=here["right"] or right)
    st.session_state["learn_answers"] = st.session_state.get("learn_answers", 0) + 1


def choose_options(lesson: Lesson) -> None:
    """Callback: the learner wants to choose instead of typing."""
    place(lesson).update(options=True, hint="")


def show_rest(lesson: Lesson) -> None:
    """Callback: the learner gives up, or the teacher goes on."""
    place(lesson)["open"] = True


def rail(lesson: Lesson) -> None:
    """The lessons, a link each to where the learner left it."""
    everywhere = settings.to_query(state.values())
    links = []
    for x in LESSONS:
        here = place(x)
        query = urlencode({**everywhere, **address.write(x, here["values"], here["step"])})
        mark = "here" if x is lesson else "done" if here["right"] else "new"
        named = {"number": x.number, "key": x.key, "title": x.title}
        links.append({**named, "query": query, "state": mark, "done": here["right"]})
    with st.container(horizontal=True, vertical_alignment="center", key="rail"):
        lesson_links(
            links,
            forgotten=st.session_state.get("learn_forgotten", 0),
            key="lessons",
            on_go=lambda: go(int(st.session_state["lessons"]["go"] or lesson.number)),
        )
        st.button("Contents", key="w_contents", type="tertiary", icon=":material/toc:", on_click=go, args=(0,))


def controls(lesson: Lesson) -> None:
    """What can be changed."""
    here = place(lesson)
    for c in lesson.controls:
        if c.kind != "placed":
            one_control(lesson, c, here)


def one_control(lesson: Lesson, c: Control, here: dict[str, Any]) -> None:
    """A button that draws, a slider, or a choice."""
    widget = f"w_{lesson.number}_{c.key}"
    if c.kind == "draw":
        st.button(c.label, key=widget, on_click=take, args=(lesson, c, widget), icon=":material/casino:")
        return
    state.set_widget(widget, here["values"][c.key])
    kind: Any = st.select_slider if c.kind == "slider" else st.segmented_control if len(c.options) < 4 else st.selectbox
    kind(
        c.title(here["step"] + 1),
        options=list(c.options),
        format_func=c.name,
        key=widget,
        on_change=take,
        args=(lesson, c, widget),
    )


def scrubber(lesson: Lesson, scene: Scene) -> None:
    """Back, the list of steps, next."""
    here, steps = place(lesson), len(scene.steps)
    widget = state.set_widget(f"w_step_{lesson.number}", here["step"] + 1)
    most = steps if here["open"] else scene.reveal
    with st.container(horizontal=True, vertical_alignment="bottom", key="scrubber"):
        st.button("Back", key="w_back", on_click=turn, args=(lesson, scene, -1), disabled=here["step"] == 0)
        st.slider(
            "Step",
            1,
            steps,
            key=widget,
            on_change=turn,
            args=(lesson, scene),
            format=f"%d of {steps}",
            label_visibility="collapsed",
        )
        if here["step"] == steps - 1 and lesson.number < len(LESSONS):
            st.button("Next lesson", key="w_onward", on_click=_onward, args=(lesson.number + 1,), type="primary")
            return
        st.button(
            "Next",
            key="w_next",
            on_click=turn,
            args=(lesson, scene, 1),
            disabled=here["step"] >= most - 1,
            type="primary",
        )


def _onward(number: int) -> None:
    """Callback: the next lesson, which the whole page shows."""
    go(number)
    st.session_state["learn_newly"] = True


def show(lesson: Lesson, scene: Scene) -> None:
    """The step: its title, what it says, the picture."""
    here = place(lesson)
    step = scene.steps[here["step"]]
    with st.container(key="says"):
        st.markdown(f"### {here['step'] + 1}. {frame.escape(step.title)}\n\n{step.says}")
    picture(
        step.picture, told=st.session_state.get("learn_answers", 0), key="picture", on_set=lambda: take_placed(lesson)
    )
    if not here["open"] and here["step"] == scene.reveal - 1:
        st.caption("The next step waits for your answer.")


def ask(lesson: Lesson, question: Question) -> None:
    """The question, and what the answer given was worth."""
    here = place(lesson)
    typing = bool(question.values) and not here["options"]
    with st.container(border=True, key="question"):
        st.markdown("**Before you go on**" if not here["open"] else "**Question**")
        answer_form(lesson, question, typing)
        told = here["told"]
        name = exercise(lesson)
        with st.container(key="told"):
            if name in assigned()[1]:
                st.info(f"Kept for your assignment: {frame.escape(assigned()[1][name])}. You may still change it.")
            else:
                result(here, question)
        with st.container(horizontal=True):
            if not here["open"] and not name:
                st.button("Show the rest", key="w_show", on_click=show_rest, args=(lesson,), type="tertiary")
            if typing and told != question.answer:
                st.button(
                    "Choose from a list", key="w_options", on_click=choose_options, args=(lesson,), type="tertiary"
                )


def answer_form(lesson: Lesson, question: Question, typing: bool) -> None:
    """The options, or the field for a number. Nothing is answered before the button or Enter, so arrow keys may look around."""
    widget = f"w_ask_{lesson.number}_{hash((question.ask, question.options))}"
    with st.form("answer_form", border=False, enter_to_submit=True):
        if typing:
            widget += "_n"
            st.markdown(question.ask)
            st.text_input(f"Your answer{', ' * bool(question.unit)}{question.unit}", key=widget, width=240)
        else:
            st.radio(question.ask, question.options, index=place(lesson)["told"], key=widget)
        st.form_submit_button(
            "Answer", key="w_answer", on_click=answer_typed if typing else answer, args=(lesson, question, widget)
        )


def result(here: dict[str, Any], question: Question) -> None:
    """What the answer was worth, or a hint."""
    told = here["told"]
    if told is not None and told == question.answer:
        st.success(f"Right. {question.why[told]}")
    elif told is not None:
        st.error(f"Not quite. {question.why[told]}")
    elif here["hint"]:
        st.warning(here["hint"])


def new_words(lesson: Lesson) -> None:
    """The words that are defined here, where they first appear."""
    with st.expander("Words", key="terms"):
        st.markdown("  \n".join(f"**{term}**: {meaning}." for term, meaning in lesson.terms))


def way_on(lesson: Lesson) -> None:
    """The code, the same thing in the explorer, and the lesson as a file."""
    with st.expander("Show me the PyTorch"):
        st.code(lesson.code, language="python", wrap_lines=True)
    if lesson.block:
        with st.expander("The block in the picture, as generated code", key=f"code_{lesson.number}"):
            code_of_block(lesson)
    target, label = lesson.link
    st.page_link(
        PAGE.format(target),
        label=label,
        icon=":material/arrow_forward:",
        query_params=same_thing(lesson),
    )
    # The file is made after this script has ended, when there is no session to read: what it needs is taken now.
    who, here = learner(), dict(place(lesson)["values"])
    st.download_button(
        "Download this lesson as one HTML page",
        lambda: export.page(lesson, who, here),
        file_name=export.file_name(lesson),
        mime="text/html",
        on_click="ignore",
        icon=":material/download:",
        type="tertiary",
    )


def code_of_block(lesson: Lesson) -> None:
    """The code that the runtime writes for the picture's block; made when it is asked for, since that takes seconds."""
    here = place(lesson)
    if not here["code"]:
        st.caption("What each GPU runs: the model's own lines on its slices, with the collectives in place.")
        st.button("Write it", key="w_code", on_click=write_code, args=(lesson,))
        return
    with st.spinner("Recording the model, without its weights …"):
        found = written.written(lesson.number, learner(), here["values"])
    if found.why:
        st.info(found.why)
        return
    if found.talks:
        st.markdown(f"These lines talk to other GPUs ({len(found.talks)}):")
        st.code("\n".join(found.talks), language="python", wrap_lines=True)
        st.caption(
            "`move(forward, backward)` is what is sent going forward and what going back, TENSOR the devices of the picture, `w` "
            "this GPU's slices. Gradients of weights that several GPUs use whole are summed behind this function, so their sums are "
            "not among these lines."
        )
    else:
        st.markdown(
            "No line talks to other GPUs: weights are gathered and gradients leave before and behind this function."
        )
    st.code(found.source, language="python", height=420)


def write_code(lesson: Lesson) -> None:
    """Callback: the code is wanted."""
    place(lesson)["code"] = True


def same_thing(lesson: Lesson) -> dict[str, str]:
    """The address in the explorer of what the lesson shows, at the learner's settings."""
    found = seen(lesson.number, learner(), place(lesson)["values"])
    now = state.values()
    if found.get("model", now["model"]) != now["model"]:
        now = {**now, **carry.MODEL_SETTINGS, "batch": None, "seq": None}
    plans = state.known_plan_ids(settings.build_request({**now, "model": found.get("model", now["model"])}))
    for key in {"plan", "compare"} & found.keys() if plans else ():
        found[key] = ",".join(n for n in found[key].split(",") if n in plans)
    return {**settings.to_query(now), **{k: v for k, v in found.items() if v}}


@st.fragment
def body(number: int) -> None:
    """Everything that changes while the learner plays; the rest of the page stands still."""
    if st.session_state.pop("learn_newly", False):
        st.rerun()  # the rail and the map of progress lie outside this fragment
    lesson = LESSONS[number - 1]
    here, who = place(lesson), learner()
    try:
        scene, question = shown(number, who, here["values"])
    except PlannerError as error:
        st.error(state.page_wording(str(error)))
        return
    if (asked := here.pop("asked", 0)) >= scene.reveal:
        here["open"] = True  # a link behind the question: somebody wants to show that step
    if asked >= len(scene.steps):
        st.warning(f"This lesson has {len(scene.steps)} steps, there is no step {asked + 1}; showing the last.")
    here["step"] = min(here["step"], len(scene.steps) - 1)
    prefetch(number, who, state.plan_request)
    to_address(lesson)
    with st.container(key="lesson_wide"):
        left, right, below = st.columns(
            [7, 5, 7]
        )  # a grid in css/learn.css: the third lies below the first, on a phone last
    with left:
        scrubber(lesson, scene)
        show(lesson, scene)
    with below:
        new_words(lesson)
    with right:
        if scene.note:
            st.info(scene.note)
        for paragraph in lesson.text:
            st.markdown(paragraph)
        controls(lesson)
        if here["open"] or here["step"] >= scene.reveal - 1:
            ask(lesson, question)
        else:
            st.caption(f"A question waits at step {scene.reveal}.")
        way_on(lesson)


def page() -> None:
    """The page."""
    lesson = begin()
    warm()
    if lesson is None:
        course.contents(go)
        return
    rail(lesson)
    assignment.box(lesson)
    for problem in st.session_state.pop("learn_problems", []):
        st.warning(problem)
    with st.container(key="lesson_head", gap="xxsmall"):
        st.markdown(f"## {lesson.number}. {lesson.title}")
        st.markdown(lesson.idea)
    if lesson.uses_model:
        sentence.show_sentence(brief=True)
    body(lesson.number)


page()
