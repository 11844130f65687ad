"""Works while the learner reads: imports torch, and computes what will probably be shown next."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial

from explorer.learn.learner import Learner
from explorer.learn.lessons import LESSONS
from explorer.learn.recent import explorer_settings, scene_and_question
from planner_core.core import PlannerError
from planner_core.planning import Request

START_DELAY_S, PAUSE_S = 1.0, 0.05
"""Before the work begins, and between its parts: the page comes first."""
QUIET_S, MAX_WAIT_S = 1.5, 8.0
"""A part begins when nobody has used a lesson for `QUIET_S`; in a class, where somebody always does, after `MAX_WAIT_S` at most."""
ONE_AT_A_TIME = threading.Lock()
PREFETCH_VARIABLE = "SHARDSCOPE_PREFETCH"
"""Environment variable that turns the work ahead off if it is 0: it takes some 20 s of processor time for each model and workload."""


@lru_cache(maxsize=1)
def import_torch() -> threading.Thread:
    """Start the import once per process; returns the thread that does it."""
    thread = threading.Thread(target=_import, name="torch for the lessons", daemon=True)
    thread.start()
    return thread


def _import() -> None:
    import torch

    x = torch.ones(2, 2, requires_grad=True)
    torch.autograd.grad((x @ x).sum(), x)  # the first backward pass sets autograd up


class _LastUse:
    """When a lesson of this process was last used, in seconds of the monotonic clock."""

    at_s = 0.0


def prefetch(number: int, learner: Learner, plan: Callable[[Request], object]) -> threading.Thread:
    """While lesson `number` is read, compute the other settings of its sliders, the first pictures of the lessons to come, and the
    plans that links name. Each part is computed once. Call it whenever a lesson is used: the work waits for quiet."""
    _LastUse.at_s = time.monotonic()
    return _start_prefetch(number, learner, plan)


@lru_cache(maxsize=64)
def _start_prefetch(number: int, learner: Learner, plan: Callable[[Request], object]) -> threading.Thread:
    thread = threading.Thread(target=_work_ahead, args=(number, learner, plan), name=f"lesson {number}", daemon=True)
    thread.start()
    return thread


def _work_ahead(number: int, learner: Learner, plan: Callable[[Request], object]) -> None:
    if os.environ.get(PREFETCH_VARIABLE) == "0":
        return
    time.sleep(START_DELAY_S)
    lesson = LESSONS[number - 1]
    sliders = [c for c in lesson.controls if c.kind == "slider"] if lesson.prefetch else []
    tasks: list[Callable[[], object]] = [
        partial(scene_and_question, number, learner, {**lesson.defaults(), c.key: o})
        for c in sliders
        for o in c.options
    ]
    for other in (*LESSONS[number:], *LESSONS[: number - 1]):
        arguments = (other.number, learner, other.defaults())
        tasks += [partial(scene_and_question, *arguments), partial(explorer_settings, *arguments)]
    tasks.append(partial(plan, learner.request))
    for task in tasks:
        _wait_for_quiet()
        with suppress(PlannerError), ONE_AT_A_TIME:  # the page reports it when it is asked for
            task()
        time.sleep(PAUSE_S)


def _wait_for_quiet() -> None:
    """Wait while lessons are used."""
    end = time.monotonic() + MAX_WAIT_S
    while time.monotonic() < min(end, _LastUse.at_s + QUIET_S):
        time.sleep(PAUSE_S)
