"""Where a learner is in each lesson, in the session and in the address."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import streamlit as st

from explorer.address import settings
from explorer.learn.learner import Learner
from explorer.learn.lesson import Choice, Lesson, Question
from explorer.learn.lessons import BY_KEY, LESSONS
from explorer.learn.visit import address, progress
from explorer.session import shared_plans, state
from explorer.text.commands import is_uploaded_model


@dataclass(slots=True)
class LessonState:
    """A learner in a lesson.

    `revealed` opens the steps after the question; `answer` is the option given last, `solved` whether one was right before. `hint` is said to
    a typed answer that no option expects; `as_list` shows options where one could type.
    `requested_step` is the step that a link asked for, until the lesson's steps are known; `kept_answer` is the answer as the browser keeps it.
    """

    values: dict[str, Choice]
    step: int = 0
    revealed: bool = False
    answer: int | None = None
    solved: bool = False
    hint: str = ""
    as_list: bool = False
    requested_step: int = 0
    kept_answer: str = ""

    def take_answer(self, question: Question, option: int | None) -> None:
        """Keep an answer; the right one opens the rest."""
        right = option == question.answer
        self.answer, self.revealed, self.solved = option, self.revealed or right, self.solved or right
        self.kept_answer = progress.write_answer(question, option) if option is not None else ""

    def restore_answer(self, question: Question) -> None:
        """Take the answer that the browser kept, if it is one to this question: after a reload all is as it was."""
        option = progress.read_answer(question, self.kept_answer) if self.answer is None else None
        if option is not None:
            self.take_answer(question, option)

    def forget_answer(self) -> None:
        """Drop the answer and the hint: the question may have changed."""
        self.answer, self.hint, self.kept_answer = None, "", ""


def open_lesson() -> Lesson | None:
    """Bring the address and the session together, as `state.begin_page` does for the settings. Returns the lesson, None for the contents."""
    session = st.session_state
    # A run that a click started may carry the address from before it.
    clicked = session.pop("learn_clicked", False) or session.get("changed", False)
    stayed = session.get("page") == "learn"
    state.begin_page("learn")
    if "learn" not in session:
        session["learn"] = {}
        cookie = st.context.cookies.get(progress.COOKIE, "")
        mark_solved(progress.from_cookie(cookie))
        for key, answer in progress.answers_from_cookie(cookie).items():
            state_of(BY_KEY[key]).kept_answer = answer
    params = {k: v for k, v in st.query_params.to_dict().items() if k in address.KEYS}
    elsewhere, unknown = progress.read_progress(params.get("done", ""))
    mark_solved(elsewhere)
    if params and params != session.get("learn_written"):
        lesson, values, step, problems = address.read_address(params)
        session["learn_problems"] = problems + [
            f"“{part[:20]}” in the link names no lesson; left out." for part in unknown
        ]
        before = session["learn"].get(lesson.number)
        # a link of the rail leads back to where the lesson was left, with its answer
        if not before or (before.values, before.step) != (values, step):
            solved = bool(before and before.solved)
            session["learn"][lesson.number] = LessonState(
                values,
                step,
                revealed=solved,
                solved=solved,
                requested_step=step,
                kept_answer=before.kept_answer if before else "",
            )
        session["learn_number"] = lesson.number if params.keys() - {"done"} else 0
    if stayed and not params and not clicked and session.get("learn_written"):
        session["learn_number"] = 0  # the browser went back to the contents
    number = int(session.setdefault("learn_number", 0))
    return LESSONS[number - 1] if number else None


def state_of(lesson: Lesson) -> LessonState:
    """Return where the learner is in a lesson."""
    lesson_state: LessonState = st.session_state["learn"].setdefault(lesson.number, LessonState(lesson.defaults()))
    return lesson_state


def mark_solved(keys: Iterable[str]) -> None:
    """Mark lessons that were solved elsewhere: in this browser before, or where a link comes from."""
    for key in keys:
        state_of(BY_KEY[key]).solved = True


def solved_lessons() -> list[Lesson]:
    """Return the lessons whose question was answered right."""
    return [x for x in LESSONS if state_of(x).solved]


def forget_progress() -> None:
    """Callback: forget what was solved, here and in the browser."""
    for x in LESSONS:
        state_of(x).solved = False
        state_of(x).forget_answer()
    st.session_state["learn_forgotten"] = st.session_state.get("learn_forgotten", 0) + 1


def write_address(lesson: Lesson) -> None:
    """Make the address follow the learner."""
    here = state_of(lesson)
    wanted = address.write_lesson_address(lesson, here.values, here.step)
    now = st.query_params.to_dict()
    # a page just turned to has a bare address, so the settings are written too
    new = {**{k: v for k, v in now.items() if k not in address.KEYS}, **settings.to_query(state.values()), **wanted}
    # A link of the contents leads to this very page: Streamlit takes its settings and leaves the browser's address bare.
    from_contents = st.session_state.get("learn_written", wanted) is None
    if new != now or from_contents:
        st.query_params.from_dict(new)  # at once: one entry in the browser's history
    st.session_state["learn_written"] = wanted


def clear_address() -> None:
    """Name no lesson in the address any more."""
    for key in address.KEYS & st.query_params.keys():
        del st.query_params[key]
    st.session_state["learn_written"] = None


def current_learner() -> Learner:
    """Return the model and cluster of the settings."""
    request = state.plain_request()
    return Learner(request, shared_plans.uploaded_graph if is_uploaded_model(request.model) else None)
