"""What a lesson is: an idea, controls, a list of steps computed live, a question, and the lines of PyTorch that do it.

A lesson holds no result. Its `scene` and `question` are functions of the learner's model and of the controls, and
every number in them comes from torch or `planner_core` at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from explorer.learn.blocks.arranged import Arranged
from explorer.learn.learner import Learner

Choice: TypeAlias = int | str
Values: TypeAlias = Mapping[str, Choice]


@dataclass(frozen=True, slots=True)
class Control:
    """Something to play with: `kind` is "slider", "choice", "draw" (a button that draws another case at random) or "placed" (changed in
    the picture itself). `step`: the first step that it changes, which a student is told if it is not the one at hand."""

    key: str
    label: str
    options: tuple[Choice, ...]
    default: Choice
    names: Mapping[Choice, str] = field(default_factory=dict)
    kind: str = "choice"
    step: int = 1

    def title(self, at: int) -> str:
        """Its label beside step number `at`."""
        return self.label if at >= self.step else f"{self.label} (changes step {self.step})"

    def name(self, option: Choice) -> str:
        """An option in words."""
        return self.names.get(option, str(option))


@dataclass(frozen=True, slots=True)
class Step:
    """One picture of the list: `picture` is SVG or a table, `says` plain sentences with `code` and **strong**."""

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
    """Asked before the reveal. `why[i]` says why option i is right or what is wrong with it. Where `values` has a number for each
    option, in `unit`, the answer is typed, and `why` is said to who makes that option's mistake."""

    ask: str
    options: tuple[str, ...]
    answer: int
    why: tuple[str, ...]
    values: tuple[float, ...] = ()
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Lesson:
    """One page of the course. `number` is its place, `minutes` what it takes in class with its question: an estimate that no class has
    tried. `key` names it in addresses, cookies and files, and stays when its place changes.
    `terms` are the words defined here, and only here; `link` is (page, what is there), and
    `focus` the settings of that page's address that show the same thing, e.g. the node or the plans meant;
    `prefetch` says that the settings of its sliders are worth computing before they are asked for;
    `cases` lists the settings that an exported file holds, where options of the first controls would not do;
    `block` is the block that the picture shows, whose code the page writes when it is asked to; None where it cannot run."""

    number: int
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
    uses_model: bool = False
    prefetch: bool = False
    focus: Callable[[Learner, Values], dict[str, str]] | None = None
    cases: Callable[[Learner, Values], list[tuple[str, dict[str, Choice]]]] | None = None
    block: Callable[[Learner, Values], Arranged | None] | None = None

    def defaults(self) -> dict[str, Choice]:
        """The controls as they stand at first."""
        return {c.key: c.default for c in self.controls}


def ordered(
    right: tuple[str, str], wrong: tuple[tuple[str, str], ...], place: int
) -> tuple[tuple[str, ...], int, tuple[str, ...]]:
    """Options with the right one at `place` (modulo their number), each (text, why); equal texts are said once."""
    others = [w for i, w in enumerate(wrong) if w[0] != right[0] and w[0] not in {o[0] for o in wrong[:i]}]
    at = place % (len(others) + 1)
    rows = [*others[:at], right, *others[at:]]
    return tuple(r[0] for r in rows), at, tuple(r[1] for r in rows)


def typed(
    ask: str,
    unit: str,
    right: tuple[float, str],
    wrong: tuple[tuple[float, str], ...],
    shown: Callable[[float], str],
) -> Question:
    """A question whose answer is a number that the learner types: the right one, and the mistakes that are expected, each
    (value in `unit`, why). `shown` writes a value with its unit. Mistakes that cannot be told from others are left out."""
    kept = [right]
    for slip in wrong:
        if all(not near(slip[0], value) for value, _ in kept):
            kept.append(slip)
    words = tuple((shown(value), why) for value, why in kept)
    options, answer, whys = ordered(words[0], words[1:], round(right[0]))
    by_words = {option: value for (option, _), (value, _) in zip(words, kept, strict=True)}
    return Question(ask, options, answer, whys, tuple(by_words[o] for o in options), unit)


def near(value: float, other: float) -> bool:
    """Whether two answers are the same for one who rounds to two figures."""
    return abs(value - other) <= 0.03 * max(abs(value), abs(other))


def asked(ask: str, right: tuple[str, str], wrong: tuple[tuple[str, str], ...], place: int = 1) -> Question:
    """A question from its right and its wrong options."""
    options, answer, why = ordered(right, wrong, place)
    return Question(ask, options, answer, why)
