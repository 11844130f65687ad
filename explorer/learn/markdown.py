"""Reads a lesson from Markdown: settings in front, then prose with live values, pictures by name, a question and its code.

A file of `lessons/content/` is a TOML front between two lines `+++`, an introduction, and parts under headings of the first level:

- `# Words`: a list of `- **term**: meaning`.
- `# Steps`: a step under each `## title`; `![what it shows](name)` is its picture, or a table is, or the bars of one (`pictures/tables.py`);
  what stands after a rule `---` waits for the answer.
- `# Question`: what is asked, and options as `- [x] the right one`, `- [ ] a wrong one`, each with its reason indented below. Where
  options end in `<!-- number -->` the answer is typed, in the unit that `<!-- unit: GB -->` names.
- `# Drawn`: why the truth of a prediction that is drawn is as it is, then a list of `- **mistake**: reply`.
- `# Note`: said under the lesson, where it is not empty.
- `# PyTorch`: the lines of code, in a fence.

Steps, question, predictions and note are Jinja templates: `{{ peak|memory }}` writes a value that the lesson's Python computed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import Environment, StrictUndefined

from explorer.figures.svg_tensors import Drawing, amount, difference, number, svg
from explorer.learn import links
from explorer.learn.learner import Learner
from explorer.learn.lesson import (
    Control,
    Lesson,
    Option,
    Question,
    Scene,
    Step,
    Values,
    choice_question,
    number_question,
)
from explorer.learn.pictures.film import Film
from explorer.learn.pictures.sketch import Prediction
from explorer.learn.pictures.tables import BARS, draw_bars, draw_table, keep_in_cell, memory_cells, memory_head
from explorer.text import units

CONTENT = Path(__file__).parent / "lessons" / "content"
Drawn: TypeAlias = Drawing | Film | str
Picture: TypeAlias = Drawn | Prediction
"""A drawing, a film of drawings, a prediction to draw, or markup that describes itself (a table)."""

HEADING = re.compile(r"^# (.+)$", re.MULTILINE)
IMAGE = re.compile(r"^!\[(.*)\]\((.+)\)$", re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE)
OPTION = re.compile(r"^- \[([x ])\] (.+?)(?: <!-- (\S+) -->)?$")
UNIT = re.compile(r"^<!-- unit: (.+) -->$", re.MULTILINE)
TERM = re.compile(r"^- \*\*(.+?)\*\*: (.+)$")


@dataclass(frozen=True, slots=True)
class Live:
    """What a lesson computes at one setting: `pictures` by name, `numbers` that its prose writes and that tests recompute, and `facts`, what else
    its prose needs. `shown` is the learner whose model is shown, if it is another, and `note` says why."""

    facts: Mapping[str, Any]
    pictures: Mapping[str, Picture]
    numbers: Mapping[str, float] = field(default_factory=dict)
    shown: Learner | None = None
    note: str = ""


def read_lesson(
    name: str,
    live: Callable[[Learner, Values], Live],
    *,
    focus: Callable[[Learner, Values], dict[str, str]] | None = None,
    cases: Callable[[Learner, Values], list[tuple[str, dict[str, int | str]]]] | None = None,
) -> Lesson:
    """Return the lesson of `lessons/content/name.md`, whose values `live` computes for a learner and the settings of the controls.

    `focus` adds settings that have to be computed to those that the front gives to the link (`links.py`).
    """
    front, parts = _split_parts((CONTENT / f"{name}.md").read_text())
    steps, question, drawn, note = (
        _make_environment().from_string(parts.get(part, "")) for part in ("Steps", "Question", "Drawn", "Note")
    )

    def make_scene(learner: Learner, values: Values) -> Scene:
        now = live(learner, values)
        facts = _gather_facts(learner, values, now)
        pictures = {
            name: _with_words(picture, drawn.render({**facts, **picture.facts}))
            if isinstance(picture, Prediction)
            else picture
            for name, picture in now.pictures.items()
        }
        shown, reveal = _read_steps(steps.render(facts), pictures)
        return Scene(shown, now.numbers, reveal, _one_line(note.render(facts)))

    def make_question(learner: Learner, values: Values) -> Question:
        now = live(learner, values)
        return _read_question(question.render(_gather_facts(learner, values, now)))

    controls = tuple(_read_control(c) for c in front.pop("controls", ()))
    terms = tuple(_read_terms(parts["Words"]).items())
    settings = front.pop("focus", {})

    def make_settings(learner: Learner, values: Values) -> dict[str, str]:
        more = focus(learner, values) if focus else {}
        return {**links.make_settings(settings, learner, values), **more}

    front["link"] = tuple(front["link"])
    return Lesson(
        **front,
        text=_split_paragraphs(parts[""]),
        terms=terms,
        controls=controls,
        scene=make_scene,
        question=make_question,
        code=_read_code(parts["PyTorch"]),
        focus=make_settings,
        cases=cases,
    )


def _gather_facts(learner: Learner, values: Values, now: Live) -> dict[str, Any]:
    """Gather everything that the prose of a lesson may name: the model and cluster shown, the controls, and what the lesson computed."""
    shown = now.shown or learner
    gpu, layer = shown.cluster.gpu, shown.find_layer()
    standard = {
        "model": shown.name,
        "gpus": shown.cluster.num_gpus,
        "gpu": gpu.name,
        "room": shown.usable_bytes,
        "gpu_memory": gpu.memory_bytes,
        "limit_is_set": shown.request.memory_gb is not None,
        "load": shown.planner.workload,
        "layer": layer,
        "stands_in": now.note,
    }
    return {**standard, **values, **now.numbers, **now.facts}


def _split_parts(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the front, and the parts by their headings."""
    _, front, body = text.split("+++\n", 2)
    # the listing comes last; its comments begin with "# " too
    fence = body.find("```")
    headings = [m for m in HEADING.finditer(body) if fence < 0 or m.start() < fence]
    ends = [*(m.start() for m in headings), len(body)]
    parts = {"": body[: ends[0]]}
    parts |= {m[1]: body[m.end() : end] for m, end in zip(headings, ends[1:], strict=True)}
    return tomllib.loads(front), parts


def _read_control(table: dict[str, Any]) -> Control:
    """Return a control. Its `names` are words by option (a key of TOML is a string), or the filter that writes an option."""
    names, options = table.pop("names", {}), tuple(table.pop("options"))
    if isinstance(names, str):
        write = _make_environment().filters[names]
        return Control(options=options, names={o: write(o) for o in options}, **table)
    return Control(options=options, names={o: names[str(o)] for o in options if str(o) in names}, **table)


def _read_code(part: str) -> str:
    return part.split("```python\n", 1)[1].rsplit("```", 1)[0]


def _read_steps(text: str, pictures: Mapping[str, Drawn]) -> tuple[tuple[Step, ...], int]:
    """Return the steps, and the number of those before the rule."""
    before, _, after = text.partition("\n---\n")
    shown, hidden = (
        tuple(_read_step(part, pictures) for part in re.split(r"^## ", half, flags=re.MULTILINE)[1:])
        for half in (before, after)
    )
    return shown + hidden, len(shown)


def _read_step(text: str, pictures: Mapping[str, Drawn]) -> Step:
    # Pictures and tables stand in the prose where they were written, and are drawn beside it: what is left are paragraphs.
    title, _, body = text.partition("\n")
    prose = TABLE.sub("", IMAGE.sub("", body))
    return Step(title.strip(), "\n\n".join(_split_paragraphs(prose)), _draw_step(title, body, pictures))


def _draw_step(title: str, body: str, pictures: Mapping[str, Drawn]) -> str:
    """Return the picture of a step: one by name, the bars of its table, or the table."""
    image, written = IMAGE.search(body), TABLE.search(body)
    lines = written[0].splitlines() if written else []
    of_bars = BARS.fullmatch(image[2]) if image else None
    if image and of_bars:
        unit, value, words = of_bars.groups()
        drawn, said = draw_bars(lines, _make_environment().filters[unit], (float(value), words) if value else None)
        return svg(drawn, f"{image[1]}. {said}" if image[1] else said)
    if image:
        return _draw_picture(pictures[image[2]], image[1])
    assert lines, f"step {title!r} has no picture"
    return draw_table(lines)


def _draw_picture(picture: Drawn, description: str) -> str:
    """Return the markup of a picture; a screen reader reads its description."""
    if isinstance(picture, Drawing):
        return svg(picture, description)
    return picture.markup(description) if isinstance(picture, Film) else picture


def _read_question(text: str) -> Question:
    """Return the question; its options stay in their order, unless the answer is typed."""
    unit = UNIT.search(text)
    ask, *listed = re.split(r"^(?=- \[[x ]\] )", UNIT.sub("", text), flags=re.MULTILINE)
    marks, options = [], []
    for item in listed:
        head, _, why = item.partition("\n")
        match = OPTION.match(head)
        assert match, f"not an option: {head!r}"
        marks.append(match[1])
        options.append(Option(match[2], _one_line(why), float(match[3] or 0)))
    assert marks.count("x") == 1, f"one option is right, not {marks.count('x')}: {ask!r}"
    position = marks.index("x")
    right = options.pop(position)
    if unit:
        return number_question(_one_line(ask), unit[1], right, tuple(options))
    return choice_question(_one_line(ask), right, tuple(options), position)


def _read_terms(text: str) -> dict[str, str]:
    """Return what stands behind each term of a list `- **term**: words`, on one line or on several."""
    items = re.split(r"^(?=- \*\*)", text, flags=re.MULTILINE)
    return {m[1]: m[2] for item in items if (m := TERM.match(_one_line(item)))}


def _with_words(prediction: Prediction, text: str) -> str:
    """Return the markup of a prediction with what the lesson says to it."""
    why, _, _ = text.partition("\n- **")
    return prediction.markup(_one_line(why), _read_terms(text))


def _split_paragraphs(text: str) -> tuple[str, ...]:
    return tuple(_one_line(part) for part in re.split(r"\n\s*\n", text) if part.strip())


def _one_line(text: str) -> str:
    """Join lines by one space; the thin spaces within numbers stay."""
    return re.sub(r"[ \t\n]+", " ", text).strip(" ")


@cache
def _make_environment() -> Environment:
    """Make templates that fail where a value is missing, with the filters by which numbers are written everywhere in the explorer."""
    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Lessons are the project's own text, and Markdown: `&` stays as it is here, and is escaped where it becomes HTML.
        autoescape=False,
        finalize=keep_in_cell,
    )
    names = ("memory", "count", "whole", "seconds", "traffic", "significant", "percent", "flops", "change")
    environment.filters |= {name: getattr(units, name) for name in names}
    environment.filters |= {
        "amount": amount,
        "number": number,
        "difference": difference,
        "plural": plural,
        "memory_above": lambda larger, smaller: units.difference(larger, smaller, units.memory),
        "gpus": lambda n: plural(n, "GPU"),
        "per_cent": lambda n: f"{n} %",
        "memory_cells": memory_cells,
    }
    environment.globals |= {"memory_head": memory_head()}
    return environment


def plural(n: int, word: str) -> str:
    """Write a number of things: `1 GPU`, `2 GPUs`."""
    return f"{n} {word}{'s' * (n != 1)}"
