"""A lesson as one HTML file that works offline, and the whole course as a zip of such files.

Every step of every case is computed at export and stored in the page; the file asks nothing of any host.
"""

from __future__ import annotations

import html
import io
import itertools
import json
import math
import re
import zipfile
from collections.abc import Sequence
from typing import Any

from explorer.learn.learner import Learner
from explorer.learn.lesson import Choice, Control, Lesson, Values
from explorer.learn.visit import address
from explorer.static import filled, script, style

MAX_CASES = 9
"""Cases that a file holds, at most: all steps and pictures of each are written into it."""


def lesson_page(lesson: Lesson, learner: Learner, values: Values, navigation: str = "") -> str:
    """Return the lesson for the learner's model, with the cases of `list_cases`.

    It opens at `values`, or at the settings of its own address (`#step=3&with=n:6`). `navigation` is markup above the title.
    """
    cases = list_cases(lesson, learner, values)
    start = next((i for i, (_, v) in enumerate(cases) if v == dict(values)), 0)
    data = {"cases": [_case(lesson, learner, name, v) for name, v in cases], "start": start}
    fill = {
        "navigation": navigation,
        "title": f"{lesson.number}. {html.escape(lesson.title)}",
        "idea": inline_html(lesson.idea),
        "text": "".join(f"<p>{inline_html(t)}</p>" for t in lesson.text),
        "terms": "".join(f"<dt>{html.escape(t)}</dt><dd>{html.escape(d)}</dd>" for t, d in lesson.terms),
        "code": html.escape(lesson.code),
        "model": html.escape(_model_sentence(lesson, learner)),
        "css": style("export") + style("lesson"),
        "js": script("export"),
        # "</script>" in a text would end the script that the data stands in.
        "data": json.dumps(data).replace("<", "\\u003c"),
    }
    return filled("export", fill)


def course_archive(lessons: Sequence[Lesson], learner: Learner) -> bytes:
    """Return a zip with a page of contents and a file for each lesson, at its defaults."""
    names = [file_name(x) for x in lessons]
    links = [f'<a href="{name}">{x.number}. {html.escape(x.title)}</a>' for name, x in zip(names, lessons, strict=True)]
    entries = "".join(f"<li>{link}: {inline_html(x.idea)}</li>" for link, x in zip(links, lessons, strict=True))
    machine = learner.cluster.description or learner.cluster.name
    body = f"<p>Numbers are those of {html.escape(learner.name)} on {html.escape(machine)}.</p><ul>{entries}</ul>"
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        title = "Parallel training, lesson by lesson"
        archive.writestr("index.html", filled("page", {"title": title, "body": body, "css": style("export")}))
        for k, lesson in enumerate(lessons):
            others = ['<a href="index.html">All lessons</a>', *links[max(0, k - 1) : k], *links[k + 1 : k + 2]]
            navigation = f'<nav class="muted" aria-label="Lessons">{" · ".join(others)}</nav>'
            archive.writestr(names[k], lesson_page(lesson, learner, lesson.defaults(), navigation))
    return target.getvalue()


def file_name(lesson: Lesson) -> str:
    """Name a file: `05-column-then-row.html`."""
    slug = re.sub(r"[^a-z0-9]+", "-", lesson.title.lower()).strip("-")
    return f"{lesson.number:02d}-{slug}.html"


def list_cases(lesson: Lesson, learner: Learner, values: Values) -> list[tuple[str, dict[str, Choice]]]:
    """Return the settings that a file holds: the lesson's own list, or the options of its first controls, up to `MAX_CASES`."""
    if lesson.cases is not None:
        return lesson.cases(learner, values)
    controls: list[Control] = []
    for control in lesson.controls:
        if math.prod(len(c.options) for c in (*controls, control)) <= MAX_CASES:
            controls.append(control)
    cases = []
    for options in itertools.product(*(c.options for c in controls)):
        chosen = list(zip(controls, options, strict=True))
        name = ", ".join(_option_name(c, o) for c, o in chosen)
        cases.append((name, {**values, **{c.key: o for c, o in chosen}}))
    return cases


def _option_name(control: Control, option: Choice) -> str:
    if control.kind == "draw":
        return f"case {control.options.index(option) + 1}"
    return f"{control.label}: {control.name(option)}"


def _case(lesson: Lesson, learner: Learner, name: str, values: Values) -> dict[str, Any]:
    scene, question = lesson.scene(learner, values), lesson.question(learner, values)
    return {
        "name": name,
        "with": address.write_lesson_address(lesson, values, 0).get("with", ""),
        "reveal": scene.reveal,
        "note": scene.note,
        "steps": [{"title": s.title, "says": inline_html(s.says), "picture": s.picture} for s in scene.steps],
        "question": {
            "ask": inline_html(question.ask),
            "options": [inline_html(o) for o in question.options],
            "answer": question.answer,
            "why": [inline_html(w) for w in question.why],
        },
    }


def _model_sentence(lesson: Lesson, learner: Learner) -> str:
    """Return the model and the cluster, where the lesson is about them."""
    if not lesson.uses_model:
        return ""
    load = learner.planner.workload
    machine = learner.cluster.description or learner.cluster.name
    return (
        f"{learner.name} on {machine}, batch {load.batch} × {load.seq} tokens, {load.dtype}, "
        "where the lesson states no others."
    )


def inline_html(text: str) -> str:
    """Write `code` and **strong** as HTML; everything else is escaped."""
    text = html.escape(text)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
