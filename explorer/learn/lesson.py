"""What a lesson is: an idea, controls, a list of steps computed live, a question, and the lines of PyTorch that do it.

A lesson holds no result. Its `scene` and `question` are functions of the learner's model and of the controls, and
every number in them comes from torch or `planner_core` at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from explorer.learn.learner import Learner

Choice: TypeAlias = int | str
Values: TypeAlias = Mapping[str, Choice]
TWO_FIGURES_SHARE = 0.03
"""Relative difference up to which two answers are the same: that of rounding to two figures."""


@dataclass(frozen=True, slots=True)
class Control:
    """Something to play with.

    `kind` is "slider", "choice", "draw" (a button that draws another case at random) or "placed" (changed in the picture itself). `step`
    is the first step that it changes: the page shows it from there on.
    """

    key: str
    label: str
    options: tuple[Choice, ...]
    default: Choice
    names: Mapping[Choice, str] = field(default_factory=dict)
    kind: str = "choice"
    step: int = 1

    def name(self, option: Choice) -> str:
        """Return an option in words."""
        return self.names.get(option, str(option))


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a lesson: `picture` is SVG or a table, `says` plain sentences with `code` and **strong**."""

    title: str
    says: str
    picture: str


@dataclass(frozen=True, slots=True)
class Scene:
    """The steps at one setting; those from `reveal` on wait for an answer. `numbers` are the figures shown, by name."""

    steps: tuple[Step, ...]
    numbers: Mapping[str, float]
    reveal: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """Asked before the reveal. `why[i]` says why option i is right, or what is wrong with it.

    Where `values` has a number for each option, in `unit`, the answer is typed, and `why` is the reply to that option's mistake.
    """

    ask: str
    options: tuple[str, ...]
    answer: int
    why: tuple[str, ...]
    values: tuple[float, ...] = ()
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Lesson:
    """One page of the course.

    number: its place in the course, from 1; `chapter` is the name of the part that it stands in.
    minutes: what it takes with its question: an estimate that no class has tried.
    key: its name in addresses, cookies and files, which stays when its place changes.
    terms: the words defined here, and only here, with their meanings.
    link: the page of the explorer that shows the same, and what is there; `focus` gives the settings of that page's address.
    cases: the settings that an exported file holds, where the options of the first controls would not do.
    """

    number: int
    chapter: str
    minutes: int
    key: str
    title: str
    idea: str
    text: tuple[str, ...]
    terms: tuple[tuple[str, str], ...]
    controls: tuple[Control, ...]
    scene: Callable[[Learner, Values], Scene]
    question: Callable[[Learner, Values], Question]
    code: str
    link: tuple[str, str]
    focus: Callable[[Learner, Values], dict[str, str]]
    uses_model: bool = False
    cases: Callable[[Learner, Values], list[tuple[str, dict[str, Choice]]]] | None = None

    def defaults(self) -> dict[str, Choice]:
        """Return the controls as they stand at first."""
        return {c.key: c.default for c in self.controls}


@dataclass(frozen=True, slots=True)
class Option:
    """An answer with the reply to it; `value` is the number that means it, where the answer is typed."""

    text: str
    why: str
    value: float = 0.0


def choice_question(ask: str, right: Option, wrong: tuple[Option, ...], position: int) -> Question:
    """Return a question whose answer is chosen. The right option stands at `position`, modulo their number; equal texts appear once."""
    by_text = {right.text: right}
    for option in wrong:
        by_text.setdefault(option.text, option)
    _, *others = by_text.values()
    place = position % (len(others) + 1)
    options = (*others[:place], right, *others[place:])
    return Question(ask, tuple(o.text for o in options), place, tuple(o.why for o in options))


def number_question(ask: str, unit: str, right: Option, wrong: tuple[Option, ...]) -> Question:
    """Return a question whose answer is typed, in `unit`. An expected mistake that is `near` an earlier option is left out."""
    options = [right]
    for option in wrong:
        if not any(near(option.value, other.value) for other in options):
            options.append(option)
    question = choice_question(ask, right, tuple(options[1:]), round(right.value))
    values = {o.text: o.value for o in options}
    return replace(question, values=tuple(values[text] for text in question.options), unit=unit)


def near(value: float, other: float) -> bool:
    """Return whether two answers are the same to somebody who rounds to two figures."""
    return abs(value - other) <= TWO_FIGURES_SHARE * max(abs(value), abs(other))
