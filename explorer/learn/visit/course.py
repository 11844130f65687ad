"""The contents of the course, and how far its reader has come."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from explorer.address import settings
from explorer.learn.export import course_archive
from explorer.learn.lesson import Lesson
from explorer.learn.lessons import CHAPTERS, LESSONS
from explorer.learn.visit.lesson_state import clear_address, current_learner, forget_progress, solved_lessons
from explorer.session import state

PAGE = "explorer/pages/learn.py"


def show_contents(go: Callable[[int], None]) -> None:
    """Show every lesson, with its idea on hover and whether it is solved, and the minutes of each chapter.

    `go` is called with the number of the lesson to turn to.
    """
    clear_address()
    for problem in st.session_state.pop("learn_problems", []):
        st.warning(problem)
    solved = solved_lessons()
    next_lesson = next((x for x in LESSONS if x not in solved), LESSONS[0])
    hours = sum(x.minutes for x in LESSONS) // 60
    with st.container(key="lesson_head", gap="xxsmall"):
        st.markdown("## Learn how a model is split over GPUs")
        st.markdown(
            f"{len(LESSONS)} lessons, {len(solved)} done, {hours} hours. Every number is computed while you read."
        )
    label = f"{'Go on' if solved else 'Begin'}: {next_lesson.number}. {next_lesson.title}"
    st.button(label, key="w_begin", type="primary", on_click=go, args=(next_lesson.number,))
    with st.container(key="contents"):
        for number, (chapter, lessons) in enumerate(CHAPTERS.items()):
            with st.container(key=f"chapter_{number}", gap=None):
                st.markdown(f"**{chapter}** :gray[{sum(x.minutes for x in lessons)} min]")
                for lesson in lessons:
                    _show_entry(lesson, done=lesson in solved)
    if solved:
        _offer_progress(solved, next_lesson)
    _show_glossary()
    # The file is made after this script has ended, when there is no session to read: the learner is taken now.
    learner = current_learner()
    st.download_button(
        "Download all lessons, to use offline",
        lambda: course_archive(LESSONS, learner),
        file_name="shardscope-lessons.zip",
        mime="application/zip",
        on_click="ignore",
        icon=":material/download:",
        type="tertiary",
    )


def _show_entry(lesson: Lesson, *, done: bool) -> None:
    query = {**settings.to_query(state.values()), "lesson": lesson.key}
    icon = ":material/check_circle:" if done else ":material/circle:"
    st.page_link(PAGE, label=f"{lesson.number}. {lesson.title}", icon=icon, query_params=query, help=lesson.idea)


def _show_glossary() -> None:
    """Show every word that a lesson defines, with the lesson's number."""
    words = sorted((term, meaning, x.number) for x in LESSONS for term, meaning in x.terms)
    with st.expander(f"{len(words)} words of the course", key="glossary"):
        st.markdown("  \n".join(f"**{term}**: {meaning} ({number})" for term, meaning, number in words))


def _offer_progress(solved: list[Lesson], next_lesson: Lesson) -> None:
    """Offer a link that takes the progress to another browser, and to forget it."""
    with st.container(horizontal=True, vertical_alignment="center", key="progress"):
        keys = ",".join(x.key for x in solved)
        query = {**settings.to_query(state.values()), "lesson": next_lesson.key, "done": keys}
        link = ":material/link:"
        st.page_link(PAGE, label="Link with my progress", icon=link, query_params=query, width="content")
        st.button("Start over", key="w_start_over", type="tertiary", on_click=forget_progress)
