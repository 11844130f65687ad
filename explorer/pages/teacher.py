"""For teachers: every lesson with what it shows, its question and the answer, its address, and files for slides."""

from __future__ import annotations

from functools import partial
from urllib.parse import urlencode

import streamlit as st

from explorer.address import settings
from explorer.components import frame
from explorer.learn.files import kit, routes, sheet
from explorer.learn.learner import Learner
from explorer.learn.lesson import Choice, Lesson
from explorer.learn.lessons import LESSONS
from explorer.learn.visit import assignment
from explorer.session import state


def outline(lesson: Lesson, who: Learner) -> None:
    """One lesson: steps, controls, question with answer, link."""
    scene, question = lesson.scene(who, lesson.defaults()), lesson.question(who, lesson.defaults())
    query = {**settings.to_query(state.values()), "lesson": lesson.key}
    with st.container(gap="xsmall", key=f"outline_{lesson.number}"):
        st.page_link("explorer/pages/learn.py", label=f"**{lesson.number}. {lesson.title}**", query_params=query)
        st.markdown(lesson.idea)
    with st.expander("Steps, controls, question and answer"):
        steps = "  \n".join(
            f"{i}. {frame.escape(s.title)}" + (" (the question first)" if i == scene.reveal + 1 else "")
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
        ("Exercises (HTML)", "exercises.html", "text/html", sheet.exercises),
        ("Keys, which mark saved answers (HTML)", "keys.html", "text/html", sheet.keys),
    )
    with st.container(horizontal=True, key="kit"):
        for label, name, mime, make in kinds:
            st.download_button(
                label,
                partial(make, LESSONS, who),
                file_name=name,
                mime=mime,
                on_click="ignore",
                icon=":material/download:",
            )
    st.caption(
        "All files work without a server. Each exercise stands with its case, most with variants in other numbers; a student saves "
        "what was typed as a file. The keys open such files, mark them, and say what each mistake means; in the zip they lie with the "
        "routes in a folder of their own. `slides.html?lessons=1,2,5` shows the slides of those lessons only."
    )


def routes_for_a_class() -> None:
    """What to show in 90 minutes and in five sessions, and what students will get wrong."""
    everywhere = settings.to_query(state.values())

    def link(lesson: Lesson, step: int, chosen: tuple[tuple[str, Choice], ...]) -> str:
        return f"learn?{urlencode({**everywhere, **routes.in_app(lesson, step, chosen)})}"

    with st.expander("Routes for a class: 90 minutes, five sessions, misconceptions to expect", key="routes"):
        st.html(f'<div class="routes">{routes.page(LESSONS, link)}</div>')
        st.caption(routes.LEFT_OUT)


def page() -> None:
    """The page."""
    state.begin_page("teacher")
    st.markdown("## For teachers")
    st.markdown(
        f"{len(LESSONS)} lessons of eight to fifteen minutes in class, in the order in which words are defined. Each has its own "
        "address; a link also keeps "
        "model, cluster, step and controls, so that you can open a lesson in class where you want it. A link to the step before a "
        "question holds the question; one behind it shows the rest. "
        "Answers below are for the first "
        "setting of each lesson; they change with the controls, since every number is computed when it is shown."
    )
    request = state.plain_request()
    who = Learner(request, state.uploaded_graph if request.model.startswith("own-") else None)
    files(who)
    routes_for_a_class()
    assignment.form()
    for lesson in LESSONS:
        outline(lesson, who)


page()
