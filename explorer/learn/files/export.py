"""A lesson as one HTML file that works offline: every step and case is computed now and put into the page."""

from __future__ import annotations

import html
import itertools
import json
import re
from typing import Any

from explorer.learn.learner import Learner
from explorer.learn.lesson import Choice, Control, Lesson, Question, Scene, Values
from explorer.learn.visit import address
from explorer.static import filled, script, style

MOST_CASES = 9


def page(lesson: Lesson, learner: Learner, values: Values, around: str = "") -> str:
    """The file: the lesson at the learner's model, with the cases of `cases`; opens at the learner's own settings, or at those
    of its address (`#step=3&with=n:6`), and asks nothing of any host. `around` is markup with the ways to other files."""
    found = cases(lesson, learner, values)
    start = next((i for i, (_, v) in enumerate(found) if v == dict(values)), 0)
    data = {"cases": [_case(lesson, learner, name, v) for name, v in found], "start": start}
    fill = {
        "around": around,
        "title": f"{lesson.number}. {html.escape(lesson.title)}",
        "idea": inline(lesson.idea),
        "text": "".join(f"<p>{inline(t)}</p>" for t in lesson.text),
        "terms": "".join(f"<dt>{html.escape(t)}</dt><dd>{html.escape(d)}</dd>" for t, d in lesson.terms),
        "code": html.escape(lesson.code),
        "model": html.escape(setting(lesson, learner)),
        "css": style("export") + style("lesson"),
        "js": script("export"),
        "data": json.dumps(data).replace("<", "\\u003c"),
    }
    return filled("export", fill)


def file_name(lesson: Lesson) -> str:
    """`05-column-then-row.html`."""
    slug = re.sub(r"[^a-z0-9]+", "-", lesson.title.lower()).strip("-")
    return f"{lesson.number:02d}-{slug}.html"


def cases(lesson: Lesson, learner: Learner, values: Values) -> list[tuple[str, dict[str, Choice]]]:
    """The settings in the file: the lesson's own list, or as many options of its first controls as stay below the most."""
    if lesson.cases is not None:
        return lesson.cases(learner, values)
    chosen: list[Control] = []
    for control in lesson.controls:
        if len(control.options) * _product(chosen) <= MOST_CASES:
            chosen.append(control)
    found = []
    for options in itertools.product(*(c.options for c in chosen)):
        name = ", ".join(
            f"{c.label}: {c.name(o)}" if c.kind != "draw" else f"case {i + 1}"
            for c, o, i in zip(chosen, options, _places(chosen, options), strict=True)
        )
        found.append((name, {**values, **dict(zip((c.key for c in chosen), options, strict=True))}))
    return found


def _places(chosen: list[Control], options: tuple[Choice, ...]) -> list[int]:
    return [c.options.index(o) for c, o in zip(chosen, options, strict=True)]


def _product(chosen: list[Control]) -> int:
    total = 1
    for c in chosen:
        total *= len(c.options)
    return total


def _case(lesson: Lesson, learner: Learner, name: str, values: Values) -> dict[str, Any]:
    scene: Scene = lesson.scene(learner, values)
    q = lesson.question(learner, values)
    return {
        "name": name,
        "with": address.write(lesson, values, 0).get("with", ""),
        "reveal": scene.reveal,
        "note": scene.note,
        "steps": [{"title": s.title, "says": inline(s.says), "picture": s.picture} for s in scene.steps],
        "question": asked(q),
    }


def asked(question: Question) -> dict[str, Any]:
    """A question as the files' scripts want it."""
    return {
        "ask": inline(question.ask),
        "options": [inline(o) for o in question.options],
        "answer": question.answer,
        "why": [inline(w) for w in question.why],
        "values": list(question.values),
        "unit": question.unit,
    }


def setting(lesson: Lesson, learner: Learner) -> str:
    """The model and the cluster, where the lesson is about them."""
    if not lesson.uses_model:
        return ""
    w = learner.planner.workload
    return (
        f"{learner.name} on {learner.cluster.description or learner.cluster.name}, batch {w.batch} × "
        f"{w.seq} tokens, {w.dtype}, where the lesson states no others."
    )


def inline(text: str) -> str:
    """`code` and **strong** as HTML; everything else is escaped."""
    text = html.escape(text)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
