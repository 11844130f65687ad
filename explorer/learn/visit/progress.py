"""What a learner has solved: keys of lessons, as a link and the browser keep them."""

from __future__ import annotations

import re

from explorer.learn.lessons import FORMER, key_of

RANGE = re.compile(r"(\d{1,3})(?:-(\d{1,3}))?", re.ASCII)
MAX_CHARACTERS = 600

COOKIE = "shardscope_done"
"""The cookie that keeps the keys (static/js/lessons/rail.js). A cookie rather than a message from the drawn page: the message would start a
second run, which takes widgets whose values have not arrived yet for moved ones."""


def read_progress(text: str) -> tuple[set[str], list[str]]:
    """The keys of the lessons that such a text names, and the parts of it that name no lesson.

    Numbers that lessons once had are understood, and ranges of them: `1,4-6`. A range with an unknown end, `3-99`, names no lesson.
    """
    keys: set[str] = set()
    unknown: list[str] = []
    for part in filter(None, text[:MAX_CHARACTERS].split(",")):
        ends = RANGE.fullmatch(part)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, 0)
        if 1 <= first <= last <= len(FORMER):
            keys |= set(FORMER[first - 1 : last])
        elif not ends and key_of(part):
            keys.add(part)
        else:
            unknown.append(part)
    return keys, unknown


def from_cookie(text: str) -> set[str]:
    """The lessons of the browser's `memory.collectives`."""
    return read_progress(text.replace(".", ","))[0]
