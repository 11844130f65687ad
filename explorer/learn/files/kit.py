"""A lecturer's kit: slides of all lessons as one HTML, exercises to type with their keys apart, and everything as one zip.

All files work from a disk, without a server. The exercises hold no answers; a student saves a file of what was typed, and the keys say
what each mistake means.
"""

from __future__ import annotations

import html
import io
import zipfile
from collections.abc import Iterable, Sequence

from explorer.learn.files import export
from explorer.learn.learner import Learner
from explorer.learn.lesson import Lesson, Question
from explorer.static import filled, script, style


def slides(lessons: Iterable[Lesson], learner: Learner) -> str:
    """Every step of every lesson at its defaults, one after the other; a question stands before what it asks for."""
    found = []
    for lesson in lessons:
        values = lesson.defaults()
        scene, asked = lesson.scene(learner, values), lesson.question(learner, values)
        title = f"{lesson.number}. {html.escape(lesson.title)}"
        found.append(_slide(title, f'<p class="idea">{export.inline(lesson.idea)}</p>', "first"))
        for k, step in enumerate(scene.steps):
            if k == scene.reveal:
                found.append(_slide(title, f"<h3>Before we go on</h3>{_asked(asked)}", "asks"))
            words = f"<h3>{html.escape(step.title)}</h3><p>{export.inline(step.says)}</p>"
            found.append(_slide(title, f'{words}<div class="lesson">{step.picture}</div>', ""))
    css = style("export") + style("lesson") + style("slides")
    return filled("slides", {"title": "Slides", "body": "".join(found), "css": css, "js": script("slides")})


def exercises(lessons: Iterable[Lesson], learner: Learner) -> str:
    """The questions, to be typed or chosen and saved as a file; no answers."""
    parts = []
    for lesson in lessons:
        asked = lesson.question(learner, lesson.defaults())
        field = _typed(lesson, asked) if asked.values else _choices(lesson, asked)
        parts.append(
            f"<section><h2>{lesson.number}. {html.escape(lesson.title)}</h2><p>{export.inline(asked.ask)}</p>{field}</section>"
        )
    fill = {
        "title": "Exercises",
        "body": "".join(parts),
        "css": style("export") + style("slides"),
        "js": script("exercises"),
    }
    return filled("exercises", fill)


def keys(lessons: Iterable[Lesson], learner: Learner) -> str:
    """The answers, and what each expected mistake means."""
    parts = []
    for lesson in lessons:
        asked = lesson.question(learner, lesson.defaults())
        rows = "".join(
            f"<tr{' class=right' if i == asked.answer else ''}><td>{export.inline(option)}</td><td>{export.inline(asked.why[i])}</td></tr>"
            for i, option in enumerate(asked.options)
        )
        parts.append(
            f"<section><h2>{lesson.number}. {html.escape(lesson.title)}</h2><p>{export.inline(asked.ask)}</p><table>{rows}</table></section>"
        )
    return filled("keys", {"title": "Keys", "body": "".join(parts), "css": style("export") + style("slides")})


def bundle(lessons: Sequence[Lesson], learner: Learner) -> bytes:
    """A zip: a start page, the lessons, slides, exercises, and the keys in a folder of their own, to be taken out."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("index.html", _index(lessons, learner))
        for lesson in lessons:
            archive.writestr(f"lessons/{export.file_name(lesson)}", export.page(lesson, learner, lesson.defaults()))
        archive.writestr("slides.html", slides(lessons, learner))
        archive.writestr("exercises.html", exercises(lessons, learner))
        archive.writestr("for-the-lecturer/keys.html", keys(lessons, learner))
    return target.getvalue()


def _index(lessons: Iterable[Lesson], learner: Learner) -> str:
    items = "".join(
        f'<li><a href="lessons/{export.file_name(x)}">{x.number}. {html.escape(x.title)}</a>: {export.inline(x.idea)}</li>'
        for x in lessons
    )
    body = (
        f"<p>Numbers are those of {html.escape(learner.name)} on {html.escape(learner.cluster.description or learner.cluster.name)}.</p>"
        f'<p><a href="slides.html">Slides</a>, <a href="exercises.html">exercises</a></p><ul>{items}</ul>'
    )
    return filled(
        "keys", {"title": "Parallel training, lesson by lesson", "body": body, "css": style("export") + style("slides")}
    )


def _slide(title: str, body: str, kind: str) -> str:
    return f'<section class="slide {kind}"><h2>{title}</h2>{body}</section>'


def _asked(asked: Question) -> str:
    options = "" if asked.values else "<ul>" + "".join(f"<li>{export.inline(o)}</li>" for o in asked.options) + "</ul>"
    return f"<p>{export.inline(asked.ask)}</p>{options}"


def _typed(lesson: Lesson, asked: Question) -> str:
    return f'<p><label>Your answer <input name="{lesson.number}" inputmode="decimal" autocomplete="off"></label> {html.escape(asked.unit)}</p>'


def _choices(lesson: Lesson, asked: Question) -> str:
    return "".join(
        f'<p><label><input type="radio" name="{lesson.number}" value="{i + 1}"> {export.inline(option)}</label></p>'
        for i, option in enumerate(asked.options)
    )
