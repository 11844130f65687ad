"""Reads a lesson from Markdown: settings in front, then prose with live values, pictures by name, a question and its code.

A file of `lessons/content/` is a TOML front between two lines `+++`, an introduction, and parts under headings of the first level:

- `# Words`: a list of `- **term**: meaning`.
- `# Steps`: a step under each `## title`; `![what it shows](name)` is its picture; what stands after a rule `---` waits for the answer.
- `# Question`: what is asked, and options as `- [x] the right one`, `- [ ] a wrong one`, each with its reason indented below. Where
  options end in `<!-- number -->` the answer is typed, in the unit that `<!-- unit: GB -->` names.
- `# Note`: said under the lesson, where it is not empty.
- `# PyTorch`: the lines of code, in a fence.

Steps, question and note are Jinja templates: `{{ peak|memory }}` writes a value that the lesson's Python computed.
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
from explorer.learn.blocks.arranged import Arranged
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, asked, typed
from explorer.learn.pictures.film import Film
from explorer.text import units

CONTENT = Path(__file__).parent / "lessons" / "content"
Picture: TypeAlias = Drawing | Film | str
"""A drawing, a film of drawings, or markup that describes itself (a table, something to draw in)."""

HEADING = re.compile(r"^# (.+)$", re.MULTILINE)
IMAGE = re.compile(r"^!\[(.*)\]\((\S+)\)$", re.MULTILINE)
OPTION = re.compile(r"^- \[([x ])\] (.+?)(?: <!-- (\S+) -->)?$")
UNIT = re.compile(r"^<!-- unit: (.+) -->$", re.MULTILINE)
TERM = re.compile(r"^- \*\*(.+?)\*\*: (.+)$")


@dataclass(frozen=True, slots=True)
class Live:
    """What a lesson computes at one setting: `facts` are for its prose, `pictures` by name, `numbers` the figures that tests recompute."""

    facts: Mapping[str, Any]
    pictures: Mapping[str, Picture]
    numbers: Mapping[str, float] = field(default_factory=dict)


def read_lesson(
    name: str,
    live: Callable[[Learner, Values], Live],
    *,
    focus: Callable[[Learner, Values], dict[str, str]] | None = None,
    cases: Callable[[Learner, Values], list[tuple[str, dict[str, int | str]]]] | None = None,
    block: Callable[[Learner, Values], Arranged | None] | None = None,
) -> Lesson:
    """The lesson of `lessons/content/name.md`, whose values `live` computes for a learner and the settings of the controls."""
    front, parts = _split((CONTENT / f"{name}.md").read_text())
    steps, question, note = (_environment().from_string(parts.get(part, "")) for part in ("Steps", "Question", "Note"))

    def context(learner: Learner, values: Values) -> tuple[Live, dict[str, Any]]:
        now = live(learner, values)
        return now, {**values, **now.facts}

    def scene(learner: Learner, values: Values) -> Scene:
        now, facts = context(learner, values)
        shown, reveal = _steps(steps.render(facts), now.pictures)
        return Scene(shown, now.numbers, reveal, _one_line(note.render(facts)))

    def ask(learner: Learner, values: Values) -> Question:
        return _question(question.render(context(learner, values)[1]))

    controls = tuple(_control(c) for c in front.pop("controls", ()))
    terms = tuple((m[1], m[2]) for line in parts["Words"].splitlines() if (m := TERM.match(line)))
    front["link"] = tuple(front["link"])
    return Lesson(
        **front,
        text=_paragraphs(parts[""]),
        terms=terms,
        controls=controls,
        scene=scene,
        question=ask,
        code=_code(parts["PyTorch"]),
        focus=focus,
        cases=cases,
        block=block,
    )


def _split(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The front, and the parts by their headings; lines of a code fence are no headings."""
    _, front, body = text.split("+++\n", 2)
    fence = body.find("```")
    marks = [m for m in HEADING.finditer(body) if fence < 0 or m.start() < fence]
    ends = [*(m.start() for m in marks), len(body)]
    parts = {"": body[: ends[0]]}
    parts |= {m[1]: body[m.end() : end] for m, end in zip(marks, ends[1:], strict=True)}
    return tomllib.loads(front), parts


def _control(told: dict[str, Any]) -> Control:
    """A control. Its `names` are words by option (TOML has no keys but strings), or the filter that writes an option."""
    names, options = told.pop("names", {}), tuple(told.pop("options"))
    if isinstance(names, str):
        write = _environment().filters[names]
        return Control(options=options, names={o: write(o) for o in options}, **told)
    return Control(options=options, names={o: names[str(o)] for o in options if str(o) in names}, **told)


def _code(part: str) -> str:
    return part.split("```python\n", 1)[1].rsplit("```", 1)[0]


def _steps(text: str, pictures: Mapping[str, Picture]) -> tuple[tuple[Step, ...], int]:
    """The steps, and how many stand before the rule."""
    before, _, after = text.partition("\n---\n")
    found = [
        tuple(_step(part, pictures) for part in re.split(r"^## ", half, flags=re.MULTILINE)[1:])
        for half in (before, after)
    ]
    return found[0] + found[1], len(found[0])


def _step(text: str, pictures: Mapping[str, Picture]) -> Step:
    title, _, body = text.partition("\n")
    image = IMAGE.search(body)
    assert image, f"step {title!r} has no picture"
    return Step(title.strip(), "\n\n".join(_paragraphs(IMAGE.sub("", body))), _draw(pictures[image[2]], image[1]))


def _draw(picture: Picture, told: str) -> str:
    """Markup of a picture, described by `told` for who does not see it."""
    if isinstance(picture, Drawing):
        return svg(picture, told)
    return picture.markup(told) if isinstance(picture, Film) else picture


def _question(text: str) -> Question:
    """The question; its options stay in their order, unless the answer is typed."""
    unit = UNIT.search(text)
    ask, *listed = re.split(r"^(?=- \[[x ]\] )", UNIT.sub("", text), flags=re.MULTILINE)
    options = []
    for option in listed:
        head, _, why = option.partition("\n")
        mark = OPTION.match(head)
        assert mark, f"not an option: {head!r}"
        options.append((mark[1] == "x", mark[2], mark[3], _one_line(why)))
    [place] = [i for i, option in enumerate(options) if option[0]]
    right, wrong = options[place], [o for i, o in enumerate(options) if i != place]
    if unit is None:
        return asked(_one_line(ask), (right[1], right[3]), tuple((o[1], o[3]) for o in wrong), place)
    words = {float(o[2]): o[1] for o in options}
    return typed(
        _one_line(ask),
        unit[1],
        (float(right[2]), right[3]),
        tuple((float(o[2]), o[3]) for o in wrong),
        words.__getitem__,
    )


def _paragraphs(text: str) -> tuple[str, ...]:
    return tuple(_one_line(part) for part in re.split(r"\n\s*\n", text) if part.strip())


def _one_line(text: str) -> str:
    """Lines joined by one space; the thin spaces within numbers stay."""
    return re.sub(r"[ \t\n]+", " ", text).strip(" ")


@cache
def _environment() -> Environment:
    """Templates that fail where a value is missing, with the filters by which numbers are written everywhere in the explorer."""
    made = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    for write in (
        units.memory,
        units.count,
        units.whole,
        units.seconds,
        units.traffic,
        units.significant,
        units.percent,
        units.flops,
    ):
        made.filters[write.__name__] = write
    made.filters |= {
        "amount": amount,
        "number": number,
        "difference": difference,
        "plural": plural,
        "gpus": lambda n: plural(n, "GPU"),
        "per_cent": lambda n: f"{n} %",
    }
    return made


def plural(n: int, word: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{n} {word}{'s' * (n != 1)}"
