"""What a long search tells its page: not too often, and only for so long. No Streamlit here."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_POINT_S = 30.0
"""After so many seconds the search at one point of a sweep or a map is given up."""
REPORT_INTERVAL_S = 0.1
"""How often a page is told what goes on, in seconds."""


class PacedProgress:
    """A `say` for searches: passes on what they say every `REPORT_INTERVAL_S`, and ends one that takes longer than `MAX_POINT_S`.

    Where a click on Stop has come in, Streamlit ends the run at the next thing that the page is told.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.began = time.monotonic()
        self.said = 0.0

    def __call__(self, text: str) -> None:
        """Tell what is under way. Raises TimeoutError where the search takes too long."""
        now = time.monotonic()
        if now - self.began > MAX_POINT_S:
            raise TimeoutError
        if now - self.said > REPORT_INTERVAL_S:
            self.said = now
            self.tell(text)
