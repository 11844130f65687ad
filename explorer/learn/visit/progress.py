"""What a learner has solved and answered, as a link and the browser keep it."""

from __future__ import annotations

import zlib

from explorer.learn.lesson import Question
from explorer.learn.lessons import BY_KEY

MAX_CHARACTERS = 600

COOKIE = "shardscope_done"
"""The cookie that keeps the keys of solved lessons and the answers given (static/js/lessons/rail.js). A cookie rather than a message from the drawn page: the message would start a
second run, which takes widgets whose values have not arrived yet for moved ones."""


def read_progress(text: str) -> tuple[set[str], list[str]]:
    """Return the keys of the lessons that a text such as `memory,mlp` names, and the parts of it that name no lesson."""
    parts = [part for part in text[:MAX_CHARACTERS].split(",") if part]
    return BY_KEY.keys() & parts, [part for part in parts if part not in BY_KEY]


def from_cookie(text: str) -> set[str]:
    """Return the solved lessons of the browser's `memory.collectives.cuts~2~1z141z4`."""
    return read_progress(",".join(part for part in text.split(".") if "~" not in part))[0]


def answers_from_cookie(text: str) -> dict[str, str]:
    """Return the answers of the same text by the keys of their lessons, as `write_answer` wrote them."""
    parts = (part.partition("~") for part in text.split(".") if "~" in part)
    return {key: answer for key, _, answer in parts if key in BY_KEY}


def write_answer(question: Question, option: int) -> str:
    """Return an answer as a cookie keeps it: the option, and a sum of the question, since another model or control asks another one."""
    return f"{option}~{zlib.crc32(repr((question.ask, question.options)).encode()):x}"


def read_answer(question: Question, text: str) -> int | None:
    """Return the option that was kept as `text`, if it answers this question."""
    return next((i for i in range(len(question.options)) if write_answer(question, i) == text), None)
