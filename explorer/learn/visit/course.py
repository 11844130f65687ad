"""The contents of the course, and what its reader can do by now."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from explorer.address import settings
from explorer.learn.lesson import Lesson
from explorer.learn.lessons import CHAPTERS, LESSONS
from explorer.learn.visit import progress
from explorer.learn.visit.place import done, start_over, to_contents
from explorer.session import state

PAGE = "explorer/pages/{}.py"


def contents(go: Callable[[int], None]) -> None:
    """The course: every lesson with its idea, its minutes, and whether it is done; what one can do by now. `go` is called
    with the number of a lesson to turn to."""
    to_contents()
    for problem in st.session_state.pop("learn_problems", []):
        st.warning(problem)
    everywhere, mine = settings.to_query(state.values()), done()
    begun = next((x for x in LESSONS if x not in mine), LESSONS[0])
    with st.container(key="lesson_head", gap="xxsmall"):
        st.markdown("## Learn how a model is split over GPUs")
        total = sum(x.minutes for x in LESSONS)
        st.markdown(
            f"{len(LESSONS)} lessons, {len(mine)} done, some {total // 60} hours. Every number is computed while you read."
        )
    with st.container(horizontal=True, vertical_alignment="center"):
        label = f"{'Go on' if mine else 'Begin'}: {begun.number}. {begun.title}"
        st.button(label, key="w_begin", type="primary", on_click=go, args=(begun.number,))
        st.page_link(PAGE.format("teacher"), label="For teachers", query_params=everywhere, width="content")
    with st.container(key="contents"):
        for chapter, numbers in CHAPTERS.items():
            st.markdown(f"**{chapter}**")
            for x in (LESSONS[n - 1] for n in numbers):
                query = {**everywhere, "lesson": x.key}
                with st.container(horizontal=True, vertical_alignment="center", key=f"entry_{x.number}"):
                    icon = ":material/check_circle:" if x in mine else ":material/circle:"
                    st.page_link(
                        PAGE.format("learn"), label=f"{x.number}. {x.title}", icon=icon, query_params=query, width=330
                    )
                    st.caption(x.idea, width="stretch")
                    st.caption(f"{x.minutes} min", width="content")
    map_of_progress(begun)


def map_of_progress(lesson: Lesson) -> None:
    """What one can do by now, and how to take it along to the same lesson elsewhere."""
    mine = done()
    with st.expander(f"What you can do now: {len(mine)} of {len(LESSONS)} lessons", key="progress"):
        if not mine:
            st.markdown(
                "Nothing yet. A lesson is done when its question is answered right, at whatever try. This browser remembers it, and a link "
                "takes it along. It is for you: it proves nothing to others."
            )
            return
        st.markdown("\n".join(f"- {progress.ABLE[x.number - 1].capitalize()} ({x.number})" for x in mine))
        left = [str(x.number) for x in LESSONS if x not in mine]
        if left:
            st.caption(f"Not yet: {', '.join(left)}.")
        with st.container(horizontal=True, vertical_alignment="center"):
            keys = progress.write(x.key for x in mine)
            query = {**settings.to_query(state.values()), "lesson": lesson.key, "done": keys}
            here, icon = PAGE.format("learn"), ":material/link:"
            st.page_link(here, label="Link with my progress", icon=icon, query_params=query, width="content")
            st.button("Start over", key="w_start_over", type="tertiary", on_click=start_over)
