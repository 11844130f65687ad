"""Works while the learner reads: imports torch, and computes what will probably be asked for next."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial

from explorer.learn.learner import Learner
from explorer.learn.lessons import LESSONS
from explorer.learn.recent import seen, shown
from planner_core.core import PlannerError
from planner_core.planning import Request

PAUSE_S, BREATH_S = 1.0, 0.05
"""Before the work begins, and between its parts: the page comes first."""
QUIET_S, PATIENCE_S = 1.5, 8.0
"""A part begins when nobody has used a lesson for so long; in a class, where somebody always does, after the latter at most."""
ONE_AT_A_TIME = threading.Lock()
OFF = "SHARDSCOPE_PREFETCH"
"""Environment variable that turns the work ahead off if it is 0: it takes some 20 s of processor time for each model and workload."""


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


class _Use:
    """When a lesson of this process was last used, in seconds of the monotonic clock."""

    at = 0.0


def prefetch(number: int, learner: Learner, plan: Callable[[Request], object]) -> threading.Thread:
    """While lesson `number` is read, once: the other settings of its sliders, the first pictures of the lessons to come, and
    the plans that links name. Returns the thread that does it. Each call tells that a lesson is used."""
    _Use.at = time.monotonic()
    return _prefetch(number, learner, plan)


@lru_cache(maxsize=64)
def _prefetch(number: int, learner: Learner, plan: Callable[[Request], object]) -> threading.Thread:
    thread = threading.Thread(target=_ahead, args=(number, learner, plan), name=f"lesson {number}", daemon=True)
    thread.start()
    return thread


def _ahead(number: int, learner: Learner, plan: Callable[[Request], object]) -> None:
    if os.environ.get(OFF) == "0":
        return
    time.sleep(PAUSE_S)
    lesson = LESSONS[number - 1]
    sliders = [c for c in lesson.controls if c.kind == "slider"] if lesson.prefetch else []
    work: list[Callable[[], object]] = [
        partial(shown, number, learner, {**lesson.defaults(), c.key: o}) for c in sliders for o in c.options
    ]
    for other in (*LESSONS[number:], *LESSONS[: number - 1]):
        at = (other.number, learner, other.defaults())
        work += [partial(shown, *at), partial(seen, *at)]
    work.append(partial(plan, learner.request))
    for do in work:
        _let_pass()
        with suppress(PlannerError), ONE_AT_A_TIME:  # told on the page when it is asked for
            do()
        time.sleep(BREATH_S)


def _let_pass() -> None:
    """Wait while lessons are used."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < min(end, _Use.at + QUIET_S):
        time.sleep(BREATH_S)
