"""What a long search tells its page: not too often, and only for so long. No Streamlit here."""

from __future__ import annotations

import time
from collections.abc import Callable

POINT_S = 30.0
"""After so many seconds the search at one point of a sweep or a map is given up."""
SAY_S = 0.1
"""How often a page is told what goes on, in seconds."""


class Pace:
    """A `say` for searches: passes on what they say every `SAY_S`, and ends one that takes longer than `POINT_S`.

    Where a click on Stop has come in, Streamlit ends the run at the next thing that the page is told.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.began = time.monotonic()
        self.said = 0.0

    def __call__(self, text: str) -> None:
        """Tell what is under way. Raises TimeoutError where the search takes too long."""
        now = time.monotonic()
        if now - self.began > POINT_S:
            raise TimeoutError
        if now - self.said > SAY_S:
            self.said = now
            self.tell(text)
