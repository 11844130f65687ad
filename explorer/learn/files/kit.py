"""A lecturer's kit: slides of all lessons as one HTML, exercises and keys, routes for a class, and everything as one zip.

All files work from a disk, without a server. The exercises hold no answers; the keys open the files that students save, and mark them.
"""

from __future__ import annotations

import html
import io
import zipfile
from collections.abc import Iterable, Sequence

from explorer.learn.files import export, routes, sheet
from explorer.learn.learner import Learner
from explorer.learn.lesson import Lesson, Question, Scene
from explorer.static import filled, script, style

LECTURERS = "for-the-lecturer/"
"""The folder of the bundle that is taken out before the rest is handed on."""


def slides(lessons: Sequence[Lesson], learner: Learner) -> str:
    """Contents, then every step of every lesson at its defaults; a question stands before what it asks for, and its answer behind it.
    `?lessons=1,2,5` in the file's address keeps those lessons only."""
    found = [f'<section class="slide contents">{_contents(lessons, learner)}</section>']
    for lesson in lessons:
        found += [
            f'<section class="slide {kind}" data-lesson="{lesson.number}">{body}</section>'
            for kind, body in _of_lesson(lesson, learner)
        ]
    css = style("export") + style("lesson") + style("slides")
    return filled("slides", {"title": "Slides", "body": "".join(found), "css": css, "js": script("slides")})


def _contents(lessons: Sequence[Lesson], learner: Learner) -> str:
    items = "".join(
        f'<li><a href="#lesson={x.number}" data-to="{x.number}">{x.number}. {html.escape(x.title)}</a></li>'
        for x in lessons
    )
    return (
        f"<h3>Parallel training, lesson by lesson</h3><p>{html.escape(_machine(learner))} Arrow keys, space and the page keys turn the "
        f"slides. The PyTorch of each lesson stands in the lesson.</p><ol>{items}</ol>"
    )


def _of_lesson(lesson: Lesson, learner: Learner) -> list[tuple[str, str]]:
    """(kind, markup) of a lesson's slides: its title and why, its steps, and question and answer in their place."""
    values = lesson.defaults()
    scene, asked = lesson.scene(learner, values), lesson.question(learner, values)
    title = f"<h2>{lesson.number}. {html.escape(lesson.title)}</h2>"
    why = "".join(f"<p>{export.inline(t)}</p>" for t in lesson.text)
    told = f'<p class="muted">{html.escape(export.setting(lesson, learner))}</p>'
    found = [("first", f'{title}<p class="idea">{export.inline(lesson.idea)}</p>{why}{told}')]
    for k, step in enumerate(scene.steps):
        if k == scene.reveal:
            found += [("asks", title + _asked(asked, scene)), ("answer", title + _answered(asked))]
        words = f"<h3>{html.escape(step.title)}</h3><p>{export.inline(step.says)}</p>"
        found.append(("", f'{title}{words}<div class="lesson">{step.picture}</div>'))
    return found


def _asked(asked: Question, scene: Scene) -> str:
    """The question with the picture of the step before it."""
    options = "" if asked.values else "<ul>" + "".join(f"<li>{export.inline(o)}</li>" for o in asked.options) + "</ul>"
    picture = scene.steps[scene.reveal - 1].picture
    return f'<h3>Before we go on</h3><p>{export.inline(asked.ask)}</p>{options}<div class="lesson">{picture}</div>'


def _answered(asked: Question) -> str:
    return f"<h3>The answer</h3><p>{export.inline(asked.ask)}</p>{sheet.told(asked)}"


def bundle(lessons: Sequence[Lesson], learner: Learner) -> bytes:
    """A zip: a start page, the lessons, slides, exercises, and a folder for the lecturer with keys and routes, to be taken out."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("index.html", _index(lessons, learner))
        for k, lesson in enumerate(lessons):
            around = _around(lessons[k - 1] if k else None, lessons[k + 1] if k + 1 < len(lessons) else None)
            made = export.page(lesson, learner, lesson.defaults(), around)
            archive.writestr(f"lessons/{export.file_name(lesson)}", made)
        archive.writestr("slides.html", slides(lessons, learner))
        archive.writestr("exercises.html", sheet.exercises(lessons, learner))
        archive.writestr(f"{LECTURERS}keys.html", sheet.keys(lessons, learner))
        archive.writestr(f"{LECTURERS}routes.html", _routes(lessons))
    return target.getvalue()


def _routes(lessons: Sequence[Lesson]) -> str:
    numbers = ",".join(str(s.lesson) for s in routes.NINETY.stops)
    head = (
        '<p><a href="keys.html">Keys</a>: the answers, and a way to mark the files that students save. '
        f'<a href="../slides.html?lessons={numbers}">Slides of the 90 minutes</a>. Take this folder out before you hand the rest on.</p>'
    )
    return _page("Routes for a class", head + routes.page(lessons, routes.in_bundle))


def _around(before: Lesson | None, after: Lesson | None) -> str:
    """The ways from a lesson's file to the others."""
    ways = ['<a href="../index.html">All lessons</a>']
    for words, lesson in (("Before", before), ("Next", after)):
        if lesson:
            ways.append(
                f'<a href="{export.file_name(lesson)}">{words}: {lesson.number}. {html.escape(lesson.title)}</a>'
            )
    return f'<nav class="muted" aria-label="Lessons">{" · ".join(ways)}</nav>'


def _index(lessons: Iterable[Lesson], learner: Learner) -> str:
    items = "".join(
        f'<li><a href="lessons/{export.file_name(x)}">{x.number}. {html.escape(x.title)}</a>: {export.inline(x.idea)}</li>'
        for x in lessons
    )
    body = (
        f'<p>{html.escape(_machine(learner))}</p><p><a href="slides.html">Slides</a>, <a href="exercises.html">exercises</a></p>'
        f"<ul>{items}</ul><p>{html.escape(routes.LEFT_OUT)}</p>"
        f'<p class="muted">Lecturers find routes and keys in <a href="{LECTURERS}routes.html">{LECTURERS}</a>, unless it was taken out.</p>'
    )
    return _page("Parallel training, lesson by lesson", body)


def _machine(learner: Learner) -> str:
    return f"Numbers are those of {learner.name} on {learner.cluster.description or learner.cluster.name}."


def _page(title: str, body: str) -> str:
    return filled("page", {"title": title, "body": body, "css": style("export") + style("slides")})
