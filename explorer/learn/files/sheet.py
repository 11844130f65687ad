"""Exercises that can be answered from the sheet alone, and their keys, which mark the files that students save.

Each exercise stands with its case: model, GPUs, settings, and the picture where the question is about one. Where its answer is computed,
variants with other settings follow, made by the same functions of the lesson.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from explorer.learn.files import export
from explorer.learn.learner import Learner
from explorer.learn.lesson import Choice, Lesson, Question, Values
from explorer.learn.lessons import FORMER, key_of
from explorer.static import filled, script, style

CASE_STEPS: Mapping[int, tuple[int, ...]] = {
    1: (-1,),
    2: (-2, -1),
    5: (-2, -1),
    7: (-2, -1),
    10: (-2, -1),
    11: (-4, -3, -2, -1),
    13: (-1,),
    17: (-1,),
    19: (-2,),
    21: (-1,),
    24: (-2, -1),
}
"""The steps whose words and picture an exercise needs, counted back from the question (-1: the last before it); the other lessons' are told by
the question and the settings."""

VARIANTS: Mapping[int, tuple[dict[str, Choice], ...]] = {
    1: ({"batch": 1}, {"bytes": 8}),
    2: ({"cut": "rows"},),
    3: ({"case": 2}, {"case": 5}),
    4: ({"n": 8}, {"n": 3, "bytes": 2**20}),
    6: ({"t": 16}, {"t": 8}),
    7: ({"n": 8},),
    8: ({"way": "column"}, {"way": "row"}),
    9: ({"n": 8}, {"n": 512}),
    10: ({"batch": 2},),
    11: ({"case": 1}, {"case": 2}),
    12: ({"n": 2}, {"k": 1}),
    14: ({"speed": 4}, {"speed": 2}),
    15: ({"tokens": 1024}, {"tokens": 4096}),
    16: ({"m": 4}, {"m": 8}),
    17: ({"recompute": "full"},),
    18: ({"m": 8}, {"m": 2}),
    20: ({"skew": 0}, {"skew": 3, "seed": 1}),
    21: ({"n": 2},),
    22: ({"n": 64}, {"n": 64, "ratio": 4}),
}
"""Other settings at which a question has another answer or another reason."""


@dataclass(frozen=True, slots=True)
class Case:
    """A lesson at some settings; `name`, which addresses and files keep, is `collectives` or, for its variants, `collectives-b` and so on."""

    name: str
    number: str
    lesson: Lesson
    values: Values


@dataclass(frozen=True, slots=True)
class Exercise(Case):
    """The lesson's question at these settings."""

    question: Question


def exercises_of(lessons: Iterable[Lesson], learner: Learner) -> Iterator[Exercise]:
    """Every lesson's exercise, each followed by its variants."""
    for case in cases_of(lessons):
        yield Exercise(case.name, case.number, case.lesson, case.values, case.lesson.question(learner, case.values))


def cases_of(lessons: Iterable[Lesson]) -> Iterator[Case]:
    """The same without their questions, which take a model to compute."""
    for lesson in lessons:
        known = {c.key: c.options for c in lesson.controls}
        others = [o for o in VARIANTS.get(lesson.number, ()) if all(v in known.get(k, ()) for k, v in o.items())]
        for letter, changed in zip(("", "b", "c", "d"), ({}, *others), strict=False):
            name = f"{lesson.key}-{letter}" if letter else lesson.key
            yield Case(name, f"{lesson.number}{letter}", lesson, {**lesson.defaults(), **changed})


def renamed(name: str) -> str:
    """The name of an exercise that an address or a file once called by a number: `collectives-b` of `4b`."""
    number, letter = (name[:-1], f"-{name[-1]}") if name[-1:] in ("b", "c", "d") else (name, "")
    return f"{key_of(number)}{letter}" if number.isdecimal() else name


def former_names(names: Iterable[str]) -> dict[str, str]:
    """What `renamed` does, as a table for these exercises: `collectives-b` by `4b`."""
    old = (f"{n}{letter}" for n in range(1, len(FORMER) + 1) for letter in ("", "b", "c", "d"))
    there = set(names)
    return {name: renamed(name) for name in old if renamed(name) in there}


def exercises(lessons: Iterable[Lesson], learner: Learner) -> str:
    """The sheet, to be typed or chosen and saved as a file; it holds no answers."""
    parts = [
        _section(x, f"{_case(x, learner)}<p><strong>{export.inline(x.question.ask)}</strong></p>{_field(x)}")
        for x in exercises_of(lessons, learner)
    ]
    css = style("export") + style("lesson") + style("slides")
    return filled("exercises", {"title": "Exercises", "body": "".join(parts), "css": css, "js": script("exercises")})


def keys(lessons: Iterable[Lesson], learner: Learner) -> str:
    """The answers, what each expected mistake means, and a way to mark saved files."""
    found = list(exercises_of(lessons, learner))
    data = {"asked": {x.name: export.asked(x.question) for x in found}, "former": former_names(x.name for x in found)}
    fill = {
        "title": "Keys",
        "body": "".join(_section(x, _key(x)) for x in found),
        "css": style("export") + style("slides"),
        "data": json.dumps(data).replace("<", "\\u003c"),
        "js": script("keys"),
    }
    return filled("keys", fill)


def _section(x: Exercise, body: str) -> str:
    return f"<section><h2>{x.number}. {html.escape(x.lesson.title)}</h2>{body}</section>"


def _case(x: Exercise, learner: Learner) -> str:
    """The case of an exercise: on what machine, at which settings, and what the lesson shows of it."""
    words = [export.setting(x.lesson, learner)]
    words += [f"{c.label}: {c.name(x.values[c.key])}." for c in x.lesson.controls if c.kind in ("slider", "choice")]
    steps = CASE_STEPS.get(x.lesson.number, ())
    scene = x.lesson.scene(learner, x.values) if steps else None
    shown = "".join(
        f'<p>{export.inline(step.says)}</p><div class="lesson still">{step.picture}</div>'
        for step in ([scene.steps[scene.reveal + k] for k in steps] if scene else [])
    )
    return f'<p class="muted">{html.escape(" ".join(filter(None, words)))}</p>{shown}'


def _field(x: Exercise) -> str:
    if x.question.values:
        return f'<p><label>Your answer <input name="{x.name}" autocomplete="off"></label> {html.escape(x.question.unit)}</p>'
    return "".join(
        f'<p><label><input type="radio" name="{x.name}" value="{i + 1}"> <span>{export.inline(option)}</span></label></p>'
        for i, option in enumerate(x.question.options)
    )


def _key(x: Exercise) -> str:
    asked = x.question
    tolerance = (
        f'<p class="muted">Typed, in {html.escape(asked.unit) or "plain numbers"}. What is within 3 % of a number below is taken for it; other units, '
        "fractions and a comma are read too.</p>"
        if asked.values
        else ""
    )
    return f"<p>{export.inline(asked.ask)}</p>{tolerance}{told(asked)}"


def told(asked: Question) -> str:
    """A table of the options, the right one marked, and what is said to each."""
    rows = "".join(
        f"<tr{' class=right' if i == asked.answer else ''}><td>{export.inline(option)}</td><td>{export.inline(asked.why[i])}</td></tr>"
        for i, option in enumerate(asked.options)
    )
    return f"<table>{rows}</table>"
