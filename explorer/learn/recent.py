"""Keeps what a lesson computed a moment ago, so that another step of the same setting computes nothing again."""

from __future__ import annotations

from functools import lru_cache

from explorer.learn.learner import Learner
from explorer.learn.lesson import Choice, Question, Scene, Values
from explorer.learn.lessons import LESSONS


def shown(number: int, learner: Learner, values: Values) -> tuple[Scene, Question]:
    """Scene and question of lesson `number` at these settings. Raises PlannerError as the lesson does."""
    return _shown(number, learner, tuple(values.items()))


@lru_cache(maxsize=256)
def _shown(number: int, learner: Learner, values: tuple[tuple[str, Choice], ...]) -> tuple[Scene, Question]:
    lesson = LESSONS[number - 1]
    return lesson.scene(learner, dict(values)), lesson.question(learner, dict(values))


@lru_cache(maxsize=256)
def _seen(number: int, learner: Learner, values: tuple[tuple[str, Choice], ...]) -> dict[str, str]:
    focus = LESSONS[number - 1].focus
    return focus(learner, dict(values)) if focus else {}


def seen(number: int, learner: Learner, values: Values) -> dict[str, str]:
    """Settings of the address under which the explorer shows what lesson `number` shows."""
    return dict(_seen(number, learner, tuple(values.items())))
