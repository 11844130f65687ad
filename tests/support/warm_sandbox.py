"""Captures of users' files in processes that are forked from the server of ranks, which has imported torch: a fifth of a new one's time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from planner_core.models.sandbox import child


class Forked:
    """As the `subprocess.Popen` of `capture_in_process`: a session of its own, no input and no output but the pipe."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any) -> None:
        from planner_core.verification.processes import _not_running_main, _start_context

        (write,) = pass_fds
        with Connection(os.dup(write), readable=False) as end:
            args = (end, list(command[4:]), dict(env))
            self._process = _start_context().Process(target=_run, args=args)
            with _not_running_main(_run, ()):
                self._process.start()
        self.pid = self._process.pid

    def wait(self) -> int:
        """Return the exit status, or a signal's number below zero."""
        self._process.join()
        return int(self._process.exitcode)


def _run(end: Connection, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    os.environ.clear()
    os.environ.update(environment)
    child.main([str(end.fileno()), *arguments])


SUBPROCESS = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)
"""For `process.subprocess`."""
