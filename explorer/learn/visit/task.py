"""An assignment: a link names exercises at their settings, the answers given are kept unjudged, and become a file for who set it.

`task=collectives,zero-b` in the address are exercises as the sheet names them; `given` holds the answers, so that a reload loses none. The keys mark
the file as they mark a saved sheet (`files/sheet.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from explorer.learn.files.sheet import Case, cases_of, renamed
from explorer.learn.lesson import Lesson, Question, Values
from explorer.learn.lessons import LESSONS
from explorer.learn.visit import address

LONGEST = 200
"""Characters of an answer that are kept, at most."""
MOST = 2000
"""Characters of the exercises' names in an address, at most."""


def known() -> dict[str, Case]:
    """Every exercise of the course by its name."""
    return {case.name: case for case in cases_of(LESSONS)}


def read(text: str) -> tuple[tuple[str, ...], list[str]]:
    """The exercises that such a text names, in order, and the parts of it that name none."""
    parts = list(dict.fromkeys(filter(None, text[:MOST].split(","))))
    there = known()
    names = dict.fromkeys(renamed(p) for p in parts if renamed(p) in there)
    return tuple(names), [p for p in parts if renamed(p) not in there]


def led(params: Mapping[str, str]) -> Mapping[str, str]:
    """The address with the lesson and settings of its first exercise, if it names exercises and no lesson."""
    names, _ = read(params.get("task", ""))
    if "lesson" in params or not names:
        return params
    first = known()[names[0]]
    return {**params, **address.write(first.lesson, first.values, 0)}


def read_given(text: str, names: Sequence[str]) -> dict[str, str]:
    """The answers in an address, those to other exercises than `names` left out."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    given = [(renamed(name), answer) for name, answer in found.items()] if isinstance(found, dict) else []
    return {name: answer[:LONGEST] for name, answer in given if name in names and isinstance(answer, str)}


def written(names: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """The address's parts; none without an assignment."""
    if not names:
        return {}
    return {"task": ",".join(names), **({"given": json.dumps(given, ensure_ascii=False)} if given else {})}


def at(names: Sequence[str], lesson: Lesson, values: Values) -> str:
    """The exercise of the assignment that the lesson shows at these settings; empty if it shows none."""
    there = known()
    return next((n for n in names if there[n].lesson is lesson and there[n].values == values), "")


def answer_of(question: Question, told: int) -> str:
    """An option as the sheet saves it: its words without marks."""
    return re.sub(r"`|\*\*", "", question.options[told])


def file_of(who: str, names: Sequence[str], given: Mapping[str, str], settings: Mapping[str, str]) -> tuple[str, str]:
    """Name and text of the file with the answers."""
    name = re.sub(r"[^\w-]+", "-", who.strip()) or "anonymous"
    data = {"name": who, "task": ",".join(names), "settings": dict(settings), "answers": dict(given)}
    return f"answers-{name}.json", json.dumps(data, indent=1, ensure_ascii=False)
