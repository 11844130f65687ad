"""The box of an assignment on a lesson's page, and the form that makes its link."""

from __future__ import annotations

from urllib.parse import urlencode

import streamlit as st

from explorer.address import settings
from explorer.components import frame
from explorer.learn.lesson import Lesson
from explorer.learn.visit import address, place, task
from explorer.session import state

LEARN = "explorer/pages/learn.py"


def box(lesson: Lesson) -> None:
    """What is to be done, what is answered, and the answers as a file; nothing without an assignment."""
    names, given = place.assigned()
    if not names:
        return
    here, there, everywhere = place.exercise(lesson), task.known(), settings.to_query(state.values())
    with st.container(border=True, key="assignment", gap="xsmall"):
        st.markdown(f"**Assignment**: {len(given)} of {len(names)} answered")
        with st.container(horizontal=True, gap="small"):
            for name in names:
                case = there[name]
                query = {**everywhere, **address.write(case.lesson, case.values, 0), **task.written(names, given)}
                mark = "this one" if name == here else "answered" if name in given else "open"
                st.page_link(
                    LEARN, label=f"{case.number}. {case.lesson.title}: {mark}", query_params=query, width="content"
                )
        with st.container(horizontal=True, vertical_alignment="bottom"):
            who = st.text_input("Your name", key="w_task_name", width=240, max_chars=60)
            file, text = task.file_of(who, names, given, everywhere)
            st.download_button(
                "Save my answers as a file",
                text,
                file_name=file,
                mime="application/json",
                on_click="ignore",
                icon=":material/download:",
            )
            st.button("Put the assignment aside", key="w_task_aside", type="tertiary", on_click=place.put_aside)
        st.caption(
            "Answers are kept and not judged here. They stay in this page's address, and go nowhere until you save the file and hand it in."
        )


def form() -> None:
    """For who sets it: choose exercises, and hand the link on."""
    there = task.known()
    with st.expander("An assignment: exercises as a link, answers as a file", key="assignment_form"):
        names = st.multiselect(
            "Exercises",
            list(there),
            format_func=lambda n: f"{there[n].number}. {there[n].lesson.title}{_settings(n)}",
            key="w_task_names",
            placeholder="Choose one or more",
        )
        st.caption(
            "The link opens the first one, with the model and cluster chosen on the other pages. What is answered is kept, not judged; "
            "students save it as a file, and the keys mark it."
        )
        if names:
            first = there[names[0]]
            query = {
                **settings.to_query(state.values()),
                **address.write(first.lesson, first.values, 0),
                **task.written(names, {}),
            }
            st.page_link(
                LEARN, label="Open the assignment", query_params=query, icon=":material/link:", width="content"
            )
            st.code(f"learn?{urlencode(query)}", language=None, wrap_lines=True)


def _settings(name: str) -> str:
    """What an exercise has other than the lesson at first."""
    case = task.known()[name]
    changed = [
        f"{c.label} {c.name(case.values[c.key])}" for c in case.lesson.controls if case.values[c.key] != c.default
    ]
    return f" ({frame.escape(', '.join(changed))})" if changed else ""
