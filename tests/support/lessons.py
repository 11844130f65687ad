"""The course as tests ask it: a learner with the standard model, and a lesson's numbers."""

from explorer.learn.learner import Learner
from explorer.learn.lessons import LESSONS
from planner_core.planning.request import Request

LLAMA = Learner(Request("llama-3-8b"))


def numbers(number: int, **values: int | str) -> dict[str, float]:
    """Return the numbers of lesson `number` with the controls at `values`, else at their defaults."""
    lesson = LESSONS[number - 1]
    return dict(lesson.scene(LLAMA, {**lesson.defaults(), **values}).numbers)
