"""Ranks that live on between tests.

A fresh rank takes 0.8 s of processor time before it does anything (it imports, makes a group, and runs each path of torch for the first
time); the job of a test takes a tenth of that. So a team of ranks with one process group takes one job after the other. What a job could
leave to the next is put back, or its team is ended: after a failure, a hang, or a function of torch that is not what it was.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from planner_core.core import VerificationFailed
from planner_core.verification import processes
from planner_core.verification.processes import GRACE_S, RankFunction

fresh_ranks = processes.run_ranks
"""Processes that have run nothing else, for tests of processes themselves."""

# The server starts with the first process that it forks; until then the list may grow.
processes.PRELOADED = (*processes.PRELOADED, "tests.support.preloaded")

ROOT = Path(__file__).resolve().parents[2]
MAX_TEAMS = 3
MAX_JOBS = 100
"""A team makes room for a new one after so many jobs: groups that they made are never closed."""
SEED = torch.default_generator.initial_seed()
PATCHABLE = (
    torch,
    torch.Tensor,
    torch.nn.functional,
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.autograd,
    torch.autograd.Function,
    dist,
)
"""Names of these are the same before and after a job, and so is all code of the planner."""


def run_ranks(
    work: RankFunction,
    num_ranks: int,
    args: tuple[Any, ...] = (),
    *,
    timeout_s: float = 300.0,
    backend: str | None = "gloo",
) -> list[Any]:
    """As `processes.run_ranks`, on ranks that have run other jobs before."""
    key = num_ranks, backend
    team = _teams.pop(key, None) or _Team(*key)
    while len(_teams) >= MAX_TEAMS:
        _teams.pop(next(iter(_teams))).close()
    try:
        results = team.run(work, args, timeout_s)
    except BaseException:
        team.close()
        raise
    if team.reusable:
        _teams[key] = team
    else:
        team.close()
    return results


_teams: dict[tuple[int, str | None], _Team] = {}
"""Idle teams; the one that was used last is last."""


@atexit.register
def close_teams() -> None:
    """End all ranks."""
    while _teams:
        _teams.popitem()[1].close()


class _Team:
    """The processes of one process group."""

    def __init__(self, num_ranks: int, backend: str | None) -> None:
        self.folder = processes._make_folder()
        self.jobs, self.reusable = 0, True
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        context = processes._start_context()
        with processes._not_running_main(_serve, ()):
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(self.folder.name, rank, num_ranks, backend, theirs), daemon=True
                )
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)

    def run(self, work: RankFunction, args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        """Results of the job from each rank."""
        self.jobs += 1
        for pipe in self.pipes:
            pipe.send((work, args))
        answers = self._answers(time.monotonic() + timeout_s)
        failures = [processes.RankFailure(rank, **said) for rank, (ok, said, _) in sorted(answers.items()) if not ok]
        if failures:
            raise processes.find_cause(failures, len(self.pipes))
        if len(answers) < len(self.pipes):
            raise VerificationFailed(
                f"{len(self.pipes)} ranks did not finish in {timeout_s:g} s; all of them were stopped"
            )
        self.reusable = self.jobs < MAX_JOBS and not any(changed for _, _, changed in answers.values())
        return [json.loads(answers[rank][1]) for rank in range(len(self.pipes))]

    def _answers(self, deadline: float) -> dict[int, tuple[bool, Any, bool]]:
        """Return what the ranks say until the deadline. Once one has failed the others have little time left to say why."""
        answers: dict[int, tuple[bool, Any, bool]] = {}
        while len(answers) < len(self.pipes) and (left := deadline - time.monotonic()) > 0:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            for pipe in connection.wait(waiting, left):
                rank = self.pipes.index(pipe)
                try:
                    answers[rank] = self.pipes[rank].recv()
                except EOFError:
                    self.processes[rank].join()
                    status = self.processes[rank].exitcode
                    answers[rank] = False, {"text": f"it exited with status {status}"}, True
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def close(self) -> None:
        """End the ranks, whatever they do."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self.folder.cleanup()


def _serve(folder: str, rank: int, num_ranks: int, backend: str | None, jobs: Any) -> None:
    """One rank: do jobs until it is killed or the test session is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    torch.set_num_threads(1)  # threads sum in another order: a test would depend on the number of cores
    if backend:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    gc.collect()
    gc.freeze()
    while True:
        try:
            work, args = jobs.recv()
        except EOFError:
            os._exit(0)
        except Exception as error:
            jobs.send((False, processes.describe_failure(error), True))
            continue
        with _put_back(bool(backend)) as changed:
            try:
                answer: tuple[bool, Any] = True, json.dumps(work(*args))
            except Exception as error:
                answer = False, processes.describe_failure(error)
            del work, args
        jobs.send((*answer, bool(changed)))


@lru_cache(maxsize=1)
def _list_names(num_modules: int) -> dict[Any, dict[str, Any]]:
    """Return what `PATCHABLE` has, the functions and classes of the planner's modules, and all that these classes have, by owner.

    A job that plants a fault there would leave it to the next one. Other values of a module are caches. They are listed anew only if
    another module was imported since: listing takes 9 ms, which each job of each rank would pay.
    """
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("planner_core.")]
    code: dict[Any, dict[str, Any]] = {m: {n: v for n, v in vars(m).items() if callable(v)} for m in modules}
    classes = {c for m in modules for c in code[m].values() if isinstance(c, type) and c.__module__ == m.__name__}
    return {owner: dict(vars(owner)) for owner in (*PATCHABLE, *classes)} | code


@contextmanager
def _put_back(grouped: bool) -> Iterator[list[str]]:
    """Put back what a job may change; the list names at the end what it changed and cannot be put back."""
    folder, variables, paths, arguments, output = Path.cwd(), dict(os.environ), sys.path[:], sys.argv, sys.stdout
    standard_output = os.dup(1)
    names = _list_names(len(sys.modules))
    dtype, changed = torch.get_default_dtype(), list[str]()
    group = dist.group.WORLD._get_backend(torch.device("cpu")).options if grouped else None
    timeout = group and group._timeout
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(0)
    yield changed
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:], sys.argv, sys.stdout = paths, arguments, output
    os.dup2(standard_output, 1)
    os.close(standard_output)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or str(ROOT)
        if file.startswith(tempfile.gettempdir()) and not file.startswith(str(ROOT)):
            del sys.modules[name]  # a file of this test; another's may have its name
    if group:
        group._timeout = timeout
    if not grouped and dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    changed += [
        f"{owner.__name__}.{name}"
        for owner, before in names.items()
        if not before.items() <= vars(owner).items()
        for name, value in before.items()
        if vars(owner).get(name) is not value
    ]
    facts = {
        "dtype": torch.get_default_dtype() != dtype,
        "device": torch.get_default_device() != torch.device("cpu"),
        "grad": not torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "group": dist.is_initialized() != grouped,
    }
    changed += [name for name, differs in facts.items() if differs]
