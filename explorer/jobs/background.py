"""Work that goes on while a page is read: one thread for all sessions. No Streamlit here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_WORKER = ThreadPoolExecutor(1, "background")
"""One job at a time: the pages' own runs come first, and several searches at once all end late."""


class Cancelled(Exception):
    """Nobody waits for this work any more."""


class BackgroundJob:
    """Work under way. It calls the progress callback that it gets now and then: that is where a cancelled job ends."""

    def __init__(self, work: Callable[[Callable[[str], None]], object]) -> None:
        self.last_message = ""
        self._cancelled = threading.Event()
        self._future: Future[object] = _WORKER.submit(work, self._report)

    def _report(self, text: str) -> None:
        self.last_message = text
        if self._cancelled.is_set():
            raise Cancelled

    def cancel(self) -> None:
        """End the work at its next report; work that has not begun does not begin."""
        self._cancelled.set()
        self._future.cancel()

    @property
    def done(self) -> bool:
        """Whether the work ended, well or not."""
        return self._future.done()
