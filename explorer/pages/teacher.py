"""For teachers: every lesson with what it shows, its question and the answer, its address, and files for slides."""

from __future__ import annotations

from functools import partial

import streamlit as st

from explorer.address import settings
from explorer.components import frame
from explorer.learn.files import kit
from explorer.learn.learner import Learner
from explorer.learn.lesson import Lesson
from explorer.learn.lessons import LESSONS
from explorer.session import state


def outline(lesson: Lesson, who: Learner) -> None:
    """One lesson: steps, controls, question with answer, link."""
    scene, question = lesson.scene(who, lesson.defaults()), lesson.question(who, lesson.defaults())
    query = {**settings.write(state.values()), "lesson": str(lesson.number)}
    with st.container(gap="xsmall", key=f"outline_{lesson.number}"):
        st.page_link("explorer/pages/learn.py", label=f"**{lesson.number}. {lesson.title}**", query_params=query)
        st.markdown(lesson.idea)
    with st.expander("Steps, controls, question and answer"):
        steps = "  \n".join(
            f"{i}. {frame.text(s.title)}" + (" (the question first)" if i == scene.reveal + 1 else "")
            for i, s in enumerate(scene.steps, 1)
        )
        st.markdown(f"**Shows**  \n{steps}")
        st.markdown(
            "**To play with**: " + ", ".join(f"{c.label} ({len(c.options)} settings)" for c in lesson.controls) + "."
        )
        st.markdown("**New words**: " + ", ".join(term for term, _ in lesson.terms) + ".")
        st.markdown(f"**Question**: {question.ask}")
        told = enumerate(zip(question.options, question.why, strict=True))
        st.markdown(
            "\n".join(f"- {'**' + o + '** (right)' if i == question.answer else o}: {why}" for i, (o, why) in told)
        )


def files(who: Learner) -> None:
    """The lecturer's kit, made when it is asked for."""
    kinds = (
        ("Everything, to use offline (zip)", "shardscope-lessons.zip", "application/zip", kit.bundle),
        ("Slides (HTML)", "slides.html", "text/html", kit.slides),
        ("Exercises (HTML)", "exercises.html", "text/html", kit.exercises),
        ("Keys (HTML)", "keys.html", "text/html", kit.keys),
    )
    with st.container(horizontal=True):
        for label, name, mime, make in kinds:
            st.download_button(
                label, partial(make, LESSONS, who), file_name=name, mime=mime, on_click="ignore", icon=":material/download:"
            )  # fmt: skip
    st.caption(
        "All files work without a server. Exercises hold no answers: a student saves a file of what was typed. The keys say what each "
        "mistake means; in the zip they lie in a folder of their own. docs/LEARN.md has routes of 90 minutes and of five sessions, and "
        "misconceptions to expect."
    )


def page() -> None:
    """The page."""
    state.begin("teacher")
    st.markdown("## For teachers")
    st.markdown(
        f"{len(LESSONS)} lessons of five to ten minutes, in the order in which words are defined. Each has its own "
        "address; a link also keeps "
        "model, cluster, step and controls, so that you can open a lesson in class where you want it. "
        "Answers below are for the first "
        "setting of each lesson; they change with the controls, since every number is computed when it is shown."
    )
    request = state.plain_request()
    who = Learner(request, state.own_graph if request.model.startswith("own-") else None)
    files(who)
    for lesson in LESSONS:
        outline(lesson, who)


page()
