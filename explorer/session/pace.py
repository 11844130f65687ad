"""Progress of a long search for its page: not too often, and only for so long. No Streamlit here."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_POINT_S = 30.0
"""After this many seconds the search at one point of a sweep is given up."""
REPORT_INTERVAL_S = 0.1
"""Seconds between two reports to a page."""


class PacedProgress:
    """A progress callback that passes on a report every `REPORT_INTERVAL_S`, and ends a search after `max_s`.

    After a click on Stop, or a newer edit, Streamlit ends the run at the next report that the page draws.
    """

    def __init__(self, report: Callable[[str], None], max_s: float = MAX_POINT_S) -> None:
        self.report, self.max_s = report, max_s
        self._began_s = time.monotonic()
        self._reported_s = 0.0

    def __call__(self, text: str) -> None:
        """Report what is under way. Raises TimeoutError where the search takes too long."""
        now = time.monotonic()
        # Before the report is held back: a search that reports often must end in time too.
        if now - self._began_s > self.max_s:
            raise TimeoutError
        if now - self._reported_s > REPORT_INTERVAL_S:
            self._reported_s = now
            self.report(text)
