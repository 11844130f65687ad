"""Where a learner is in each lesson, in the session and in the address."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import streamlit as st

from explorer.address import settings
from explorer.learn.learner import Learner
from explorer.learn.lesson import Lesson, Values
from explorer.learn.lessons import LESSONS, by_key
from explorer.learn.visit import address, progress, task
from explorer.session import state


def begin() -> Lesson | None:
    """Bring the address and the session together, as `state.begin_page` does for the settings; returns the lesson, None for the contents."""
    state.begin_page("learn")
    s = st.session_state
    if "learn" not in s:
        s["learn"] = {}
        remember(progress.from_cookie(st.context.cookies.get(progress.COOKIE, "")))
    found = {k: v for k, v in st.query_params.to_dict().items() if k in address.KEYS}
    elsewhere, unknown = progress.read(found.get("done", ""))
    remember(elsewhere)
    if found and found != s.get("learn_written"):
        lesson, values, step, problems = address.read(task.led(found))
        named = [f"“{part[:20]}” in the link names no lesson; left out." for part in unknown]
        s["learn_problems"] = problems + named + _assign(found)
        left = s["learn"].get(lesson.number)
        # a link of the rail leads back to where the lesson was left, with its answer
        if not left or (left["values"], left["step"]) != (values, step):
            right = bool(left and left["right"])
            s["learn"][lesson.number] = {**fresh(values, step), "asked": step, "right": right, "open": right}
        s["learn_number"] = lesson.number if found.keys() - {"done"} else 0
    number = int(s.setdefault("learn_number", 0))
    return LESSONS[number - 1] if number else None


def _assign(found: Mapping[str, str]) -> list[str]:
    """Take the assignment of an address; a sentence for each of its parts that names no exercise."""
    if "task" not in found:
        return []
    names, unknown = task.read(found["task"])
    st.session_state["learn_task"] = names
    st.session_state["learn_given"] = task.read_given(found.get("given", ""), names)
    return [f"“{part[:20]}” in the link is not an exercise; left out." for part in unknown]


def assigned() -> tuple[tuple[str, ...], dict[str, str]]:
    """The exercises of the assignment, and the answers given so far."""
    s = st.session_state
    return s.get("learn_task", ()), s.get("learn_given", {})


def exercise(lesson: Lesson) -> str:
    """The exercise of the assignment that the lesson shows as it stands; empty if it shows none."""
    return task.at(assigned()[0], lesson, place(lesson)["values"])


def put_aside() -> None:
    """Callback: no assignment any more."""
    for key in ("learn_task", "learn_given"):
        st.session_state.pop(key, None)


def remember(done: Iterable[str]) -> None:
    """These lessons were done elsewhere: in this browser before, or where a link comes from."""
    for key in done:
        place(by_key(key))["right"] = True


def done() -> list[Lesson]:
    """The lessons that are done."""
    return [x for x in LESSONS if place(x)["right"]]


def start_over() -> None:
    """Callback: forget what was done, here and in the browser."""
    for x in LESSONS:
        place(x)["right"] = False
    st.session_state["learn_forgotten"] = st.session_state.get("learn_forgotten", 0) + 1


def fresh(values: Values, step: int = 0) -> dict[str, Any]:
    """A lesson as one comes to it: values, step, whether what the question holds back is open, the answer given, whether one was right, a hint to
    a typed answer, whether the options are shown where one could type, and whether the block's code is wanted."""
    return {
        "values": values,
        "step": step,
        "open": False,
        "told": None,
        "right": False,
        "hint": "",
        "options": False,
        "code": False,
    }


def place(lesson: Lesson) -> dict[str, Any]:
    """Where the learner is in a lesson (see `fresh`)."""
    found: dict[str, Any] = st.session_state["learn"].setdefault(lesson.number, fresh(lesson.defaults()))
    return found


def to_address(lesson: Lesson) -> None:
    """The address follows the learner."""
    here = place(lesson)
    wanted = {**address.write(lesson, here["values"], here["step"]), **task.written(*assigned())}
    now = st.query_params.to_dict()
    # a page just turned to has a bare address, so the settings are written along
    new = {**{k: v for k, v in now.items() if k not in address.KEYS}, **settings.to_query(state.values()), **wanted}
    if new != now:
        st.query_params.from_dict(new)  # at once: one entry in the browser's history
    st.session_state["learn_written"] = wanted


def to_contents() -> None:
    """The address names no lesson any more."""
    for key in address.KEYS & st.query_params.keys():
        del st.query_params[key]
    st.session_state["learn_written"] = None


def learner() -> Learner:
    """The model and cluster of the settings."""
    request = state.plain_request()
    return Learner(request, state.uploaded_graph if request.model.startswith("own-") else None)
