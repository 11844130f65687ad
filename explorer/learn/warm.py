"""What is done while the learner reads: torch is imported, and the next lesson's first picture is computed."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from explorer.learn.lessons import LESSONS
from explorer.learn.recent import explorer_settings, scene_and_question
from planner_core.core import PlannerError

START_DELAY_S = 1.0
"""Before the work begins: the page that is read comes first, and both share one interpreter."""


@remember(1)
def import_torch() -> threading.Thread:
    """Start the import once per process; returns the thread that does it."""
    thread = threading.Thread(target=_import, name="torch for the lessons", daemon=True)
    thread.start()
    return thread


def _import() -> None:
    import torch

    x = torch.ones(2, 2, requires_grad=True)
    torch.autograd.grad((x @ x).sum(), x)  # the first backward pass sets autograd up


@remember(64)
def prefetch_next(number: int, learner: Learner) -> threading.Thread:
    """Compute what lesson `number + 1` shows first, once for each learner.

    Only this one: all lessons took 20 s of processor time for each model and workload, which every other visitor waited for.
    """
    thread = threading.Thread(target=_compute_next, args=(number, learner), name=f"lesson {number + 1}", daemon=True)
    thread.start()
    return thread


def _compute_next(number: int, learner: Learner) -> None:
    time.sleep(START_DELAY_S)
    for lesson in LESSONS[number : number + 1]:
        with suppress(PlannerError):  # the page reports it when the lesson is opened
            scene_and_question(lesson.number, learner, lesson.defaults())
            explorer_settings(lesson.number, learner, lesson.defaults())
