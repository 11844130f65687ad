"""Work that goes on while a page is read: one thread for all sessions, and a job that nobody waits for any more ends. No Streamlit here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_WORKER = ThreadPoolExecutor(1, "ahead")
"""One at a time: the pages' own runs come first, and several searches at once all end late."""


class Cancelled(Exception):
    """Nobody waits for this work any more."""


class BackgroundJob:
    """Work under way. It calls the `say` that it is given now and then, which keeps what is done, and ends work that was given up."""

    def __init__(self, work: Callable[[Callable[[str], None]], object]) -> None:
        self.said = ""
        self._left = threading.Event()
        self._future: Future[object] = _WORKER.submit(work, self._say)

    def _say(self, text: str) -> None:
        self.said = text
        if self._left.is_set():
            raise Cancelled

    def give_up(self) -> None:
        """End it at the next thing that it says; it does not begin if it has not."""
        self._left.set()
        self._future.cancel()

    @property
    def done(self) -> bool:
        """Whether it ended, well or not."""
        return self._future.done()
