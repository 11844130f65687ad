"""Work done while the learner reads: torch imported, and the other settings of a slow lesson computed and kept."""

from __future__ import annotations

import threading
from functools import lru_cache

from explorer.learn.learner import Learner
from explorer.learn.lessons import LESSONS
from explorer.learn.recent import shown
from planner_core.errors import PlannerError


@lru_cache(maxsize=1)
def warm() -> threading.Thread:
    """Start the import once per process; returns the thread that does it."""
    thread = threading.Thread(target=_import, name="torch for the lessons", daemon=True)
    thread.start()
    return thread


def _import() -> None:
    import torch

    x = torch.ones(2, 2, requires_grad=True)
    torch.autograd.grad((x @ x).sum(), x)  # the first backward pass sets autograd up


@lru_cache(maxsize=64)
def prefetch(number: int, learner: Learner) -> threading.Thread:
    """Compute every setting of a lesson's sliders once, the rest at their defaults; returns the thread that does it."""
    thread = threading.Thread(target=_settings, args=(number, learner), name=f"lesson {number}", daemon=True)
    thread.start()
    return thread


def _settings(number: int, learner: Learner) -> None:
    lesson = LESSONS[number - 1]
    for control in lesson.controls:
        for option in control.options if control.kind == "slider" else ():
            try:
                shown(number, learner, {**lesson.defaults(), control.key: option})
            except PlannerError:
                return  # told on the page when it is asked for
