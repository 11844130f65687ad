"""Keeps what a lesson computed a moment ago, so that another step at the same settings computes nothing."""

from __future__ import annotations

from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from explorer.learn.lesson import Choice, Question, Scene, Values
from explorer.learn.lessons import LESSONS


def scene_and_question(number: int, learner: Learner, values: Values) -> tuple[Scene, Question]:
    """Return the scene and question of lesson `number` at these settings. Raises PlannerError as the lesson does."""
    return _scene_and_question(number, learner, tuple(values.items()))


@remember(256)
def _scene_and_question(
    number: int, learner: Learner, values: tuple[tuple[str, Choice], ...]
) -> tuple[Scene, Question]:
    lesson = LESSONS[number - 1]
    return lesson.scene(learner, dict(values)), lesson.question(learner, dict(values))


def explorer_settings(number: int, learner: Learner, values: Values) -> dict[str, str]:
    """Return the settings of the address under which the explorer shows what lesson `number` shows."""
    return dict(_explorer_settings(number, learner, tuple(values.items())))


@remember(256)
def _explorer_settings(number: int, learner: Learner, values: tuple[tuple[str, Choice], ...]) -> dict[str, str]:
    return LESSONS[number - 1].focus(learner, dict(values))
