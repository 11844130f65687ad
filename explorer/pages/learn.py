"""Learn: how does it work? Lessons, each one idea with live numbers, a control, a question and the PyTorch."""

from __future__ import annotations

import random
from typing import Any
from urllib.parse import urlencode

import streamlit as st

from explorer.address import carry, settings
from explorer.components import frame
from explorer.components.lesson import lesson_links, picture
from explorer.components.request_form import sentence
from explorer.learn import export
from explorer.learn.lesson import Control, Lesson, Question, Scene
from explorer.learn.lessons import LESSONS
from explorer.learn.recent import explorer_settings, scene_and_question
from explorer.learn.visit import address, answers, course
from explorer.learn.visit.lesson_state import LessonState, current_learner, open_lesson, state_of, write_address
from explorer.learn.warm import import_torch, prefetch_next
from explorer.session import shared_plans, state
from explorer.text.option_words import page_wording
from planner_core.core import PlannerError

PAGE = "explorer/pages/{}.py"


def go(number: int) -> None:
    """Callback: another lesson; 0 is the contents."""
    st.session_state["learn_number"] = number
    st.session_state["learn_clicked"] = True
    st.session_state["learn_problems"] = []


def go_to_next_lesson(number: int) -> None:
    """Callback: the next lesson, or the contents behind the last one, which the whole page shows."""
    go(number)
    st.session_state["learn_rerun_page"] = True


def change_step(lesson: Lesson, scene: Scene, by: int | None = None) -> None:
    """Callback: another step, no further than what is open."""
    here = state_of(lesson)
    step = here.step + by if by is not None else st.session_state[f"w_step_{lesson.number}"] - 1
    num_open = len(scene.steps) if here.revealed else scene.reveal
    here.step = max(0, min(step, num_open - 1))


def change_control(lesson: Lesson, control: Control, widget: str) -> None:
    """Callback: a control was moved. A new case closes what its question asks for."""
    here = state_of(lesson)
    if control.kind == "draw":
        here.values[control.key] = random.choice([o for o in control.options if o != here.values[control.key]])
        here.step, here.revealed = 0, False
        here.forget_answer()
    elif st.session_state[widget] is not None:
        here.values[control.key] = st.session_state[widget]
        here.forget_answer()


def change_in_picture(lesson: Lesson) -> None:
    """Callback: the learner changed the picture itself."""
    wanted, here = st.session_state["picture"]["set"] or {}, state_of(lesson)
    placed = {c.key: wanted[c.key] for c in lesson.controls if c.kind == "placed" and wanted.get(c.key) in c.options}
    if any(here.values[key] != option for key, option in placed.items()):  # the picture may send the same twice
        here.values.update(placed)
        here.forget_answer()


def answer_by_option(lesson: Lesson, question: Question, widget: str) -> None:
    """Callback: an option was chosen."""
    option = st.session_state[widget]
    if option is None:
        take_answer(lesson, question, None, "Choose one of them first.")
    else:
        take_answer(lesson, question, question.options.index(option))


def answer_by_number(lesson: Lesson, question: Question, widget: str) -> None:
    """Callback: a number was typed."""
    option, reply = answers.judge_answer(question, st.session_state[widget].strip())
    take_answer(lesson, question, option, "" if option is not None else reply)


def take_answer(lesson: Lesson, question: Question, option: int | None, hint: str = "") -> None:
    """Keep an answer; the right one opens the rest."""
    here = state_of(lesson)
    here.take_answer(question, option)
    here.hint = hint
    st.session_state["learn_rerun_page"] = option is not None  # the rail keeps it in the browser
    st.session_state["learn_answers"] = st.session_state.get("learn_answers", 0) + 1


def show_options(lesson: Lesson) -> None:
    """Callback: the learner wants to choose instead of typing."""
    here = state_of(lesson)
    here.as_list, here.hint = True, ""


def reveal(lesson: Lesson) -> None:
    """Callback: the learner goes on without an answer."""
    state_of(lesson).revealed = True


def show_rail(lesson: Lesson) -> None:
    """The lessons, a link each to where the learner left it."""
    everywhere = settings.to_query(state.values())
    links = []
    for x in LESSONS:
        known = state_of(x)
        query = urlencode({**everywhere, **address.write_lesson_address(x, known.values, known.step)})
        mark = "here" if x is lesson else "done" if known.solved else "new"
        name = {"number": x.number, "key": x.key, "title": x.title}
        links.append({**name, "query": query, "state": mark, "done": known.solved, "answer": known.kept_answer})
    with st.container(horizontal=True, vertical_alignment="center", key="rail"):
        lesson_links(
            links,
            forgotten=st.session_state.get("learn_forgotten", 0),
            key="lessons",
            on_go=lambda: go(int(st.session_state["lessons"]["go"] or lesson.number)),
        )
        st.button("Contents", key="w_contents", type="tertiary", icon=":material/toc:", on_click=go, args=(0,))


def show_control(lesson: Lesson, control: Control) -> None:
    """A button that draws, a slider, or a choice."""
    here, widget = state_of(lesson), f"w_{lesson.number}_{control.key}"
    change: dict[str, Any] = {"key": widget, "args": (lesson, control, widget)}
    if control.kind == "draw":
        st.button(control.label, on_click=change_control, icon=":material/casino:", **change)
        return
    state.set_widget(widget, here.values[control.key])
    few = len(control.options) < 4
    kind: Any = st.select_slider if control.kind == "slider" else st.segmented_control if few else st.selectbox
    options = list(control.options)
    kind(control.label, options=options, format_func=control.name, on_change=change_control, **change)


def show_scrubber(lesson: Lesson, scene: Scene) -> None:
    """Back, the list of steps, next."""
    here, num_steps = state_of(lesson), len(scene.steps)
    widget = state.set_widget(f"w_step_{lesson.number}", here.step + 1)
    num_open = num_steps if here.revealed else scene.reveal
    with st.container(horizontal=True, vertical_alignment="bottom", key="scrubber"):
        st.button("Back", key="w_back", on_click=change_step, args=(lesson, scene, -1), disabled=here.step == 0)
        st.slider(
            "Step",
            1,
            num_steps,
            key=widget,
            on_change=change_step,
            args=(lesson, scene),
            format=f"%d of {num_steps}",
            label_visibility="collapsed",
        )
        if here.step == num_steps - 1:
            label, number = ("Next lesson", lesson.number + 1) if lesson.number < len(LESSONS) else ("All lessons", 0)
            st.button(label, key="w_onward", on_click=go_to_next_lesson, args=(number,), type="primary")
            return
        st.button(
            "Next",
            key="w_next",
            on_click=change_step,
            args=(lesson, scene, 1),
            disabled=here.step >= num_open - 1,
            type="primary",
        )


def show_step(lesson: Lesson, scene: Scene) -> None:
    """The step: its title, its prose, the picture."""
    here = state_of(lesson)
    step = scene.steps[here.step]
    with st.container(key="says"):
        st.markdown(f"### {here.step + 1}. {frame.escape(step.title)}\n\n{step.says}")
    num_answers = st.session_state.get("learn_answers", 0)
    picture(step.picture, num_answers=num_answers, key="picture", on_set=lambda: change_in_picture(lesson))
    if not here.revealed and here.step == scene.reveal - 1:
        st.caption("The next step waits for your answer.")


def show_question(lesson: Lesson, question: Question) -> None:
    """The question, and the reply to the answer given."""
    here = state_of(lesson)
    typed = bool(question.values) and not here.as_list
    with st.container(border=True, key="question"):
        st.markdown("**Question**" if here.revealed else "**Before you go on**")
        show_answer_form(lesson, question, typed)
        with st.container(key="reply"):
            show_reply(here, question)
        with st.container(horizontal=True):
            if not here.revealed:
                st.button("Show the rest", key="w_show", on_click=reveal, args=(lesson,), type="tertiary")
            if typed and here.answer != question.answer:
                st.button("Choose from a list", key="w_options", on_click=show_options, args=(lesson,), type="tertiary")


def show_answer_form(lesson: Lesson, question: Question, typed: bool) -> None:
    """The options, or the field for a number. Nothing is answered before the button or Enter, so arrow keys may look around."""
    widget, here = f"w_ask_{lesson.number}_{hash((question.ask, question.options))}", state_of(lesson)
    is_right = here.answer == question.answer  # another answer would contradict the steps that this one opened
    with st.form("answer_form", border=False, enter_to_submit=True):
        if typed:
            widget += "_n"
            st.markdown(question.ask)
            st.text_input(
                f"Your answer{', ' * bool(question.unit)}{question.unit}", key=widget, width=240, disabled=is_right
            )
        else:
            if is_right:  # the browser would show the default of the run before, which a wrong answer set
                st.session_state[widget] = question.options[question.answer]
            index = None if is_right else here.answer
            st.radio(question.ask, question.options, index=index, key=widget, disabled=is_right)
        take = answer_by_number if typed else answer_by_option
        st.form_submit_button(
            "Answer", key="w_answer", on_click=take, args=(lesson, question, widget), disabled=is_right
        )


def show_reply(here: LessonState, question: Question) -> None:
    """Why the answer is right or wrong, or a hint."""
    if here.answer is not None:
        right = here.answer == question.answer
        (st.success if right else st.error)(f"{'Right' if right else 'Not quite'}. {question.why[here.answer]}")
    elif here.hint:
        st.warning(here.hint)


def show_words(lesson: Lesson) -> None:
    """The words that are defined here, where they first appear."""
    with st.expander("Words", key="terms"):
        st.markdown("  \n".join(f"**{term}**: {meaning}." for term, meaning in lesson.terms))


def show_code_and_links(lesson: Lesson) -> None:
    """The code, the same thing in the explorer, and the lesson as a file."""
    with st.expander("Show me the PyTorch"):
        st.code(lesson.code, language="python", wrap_lines=True)
    page, label = lesson.link
    icon = ":material/arrow_forward:"
    st.page_link(PAGE.format(page), label=label, icon=icon, query_params=explorer_address(lesson))
    # The file is made after this script has ended, when there is no session to read: what it needs is taken now.
    learner, values = current_learner(), dict(state_of(lesson).values)
    st.download_button(
        "Download this lesson as one HTML page",
        lambda: export.lesson_page(lesson, learner, values),
        file_name=export.file_name(lesson),
        mime="text/html",
        on_click="ignore",
        icon=":material/download:",
        type="tertiary",
    )


def explorer_address(lesson: Lesson) -> dict[str, str]:
    """Return the address in the explorer of what the lesson shows, at the learner's settings."""
    wanted = explorer_settings(lesson.number, current_learner(), state_of(lesson).values)
    now = state.values()
    if wanted.get("model", now["model"]) != now["model"]:
        now = {**now, **carry.MODEL_SETTINGS, "batch": None, "seq": None}
    plans = shared_plans.known_plan_ids(settings.build_request({**now, "model": wanted.get("model", now["model"])}))
    for key in {"plan", "compare"} & wanted.keys() if plans else ():
        wanted[key] = ",".join(n for n in wanted[key].split(",") if n in plans)
    return {**settings.to_query(now), **{k: v for k, v in wanted.items() if v}}


@st.fragment
def show_lesson(number: int) -> None:
    """Everything that changes while the learner plays; the rest of the page stands still."""
    if st.session_state.pop("learn_rerun_page", False):
        st.rerun()  # the rail and the progress lie outside this fragment
    lesson = LESSONS[number - 1]
    here, learner = state_of(lesson), current_learner()
    try:
        scene, question = scene_and_question(number, learner, here.values)
    except PlannerError as error:
        st.error(page_wording(error))
        return
    if here.requested_step >= scene.reveal:
        here.revealed = True  # a link past the question: somebody wants to show that step
    if here.requested_step >= len(scene.steps):
        st.warning(
            f"This lesson has {len(scene.steps)} steps, there is no step {here.requested_step + 1}; showing the last."
        )
    here.requested_step, here.step = 0, min(here.step, len(scene.steps) - 1)
    here.restore_answer(question)
    prefetch_next(number, learner)
    write_address(lesson)
    with st.container(key="lesson_wide"):
        # a grid in css/learn.css: the third lies below the first, on a phone last
        left, right, below = st.columns([7, 5, 7])
    with left:
        show_scrubber(lesson, scene)
        show_step(lesson, scene)
    with below:
        show_words(lesson)
    with right:
        if scene.note:
            st.info(scene.note)
        for paragraph in lesson.text:
            st.markdown(paragraph)
        for control in lesson.controls:
            if control.kind != "placed" and here.step + 1 >= control.step:
                show_control(lesson, control)
        if here.revealed or here.step >= scene.reveal - 1:
            show_question(lesson, question)
        else:
            st.caption(f"A question waits at step {scene.reveal}.")
        show_code_and_links(lesson)


def show_page() -> None:
    """The page."""
    lesson = open_lesson()
    if lesson is not None:
        write_address(lesson)  # before the lesson is computed, which may take seconds
    import_torch()
    if lesson is None:
        course.show_contents(go)
        return
    show_rail(lesson)
    for problem in st.session_state.pop("learn_problems", []):
        st.warning(problem)
    with st.container(key="lesson_head", gap="xxsmall"):
        st.markdown(f"## {lesson.number}. {lesson.title}")
        st.markdown(lesson.idea)
    if lesson.uses_model:
        sentence.show_sentence(brief=True)
    show_lesson(lesson.number)


show_page()
