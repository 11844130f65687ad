"""The lessons, in order: a module for each, which computes what its file of `content/` says.

A lesson's number is its place. Addresses and cookies name it by its key, which stays.
"""

from __future__ import annotations

from importlib import import_module
from itertools import groupby
from pkgutil import iter_modules

from explorer.learn.lesson import Lesson
from explorer.learn.lessons import basics, layers, planners, times

LESSONS: tuple[Lesson, ...] = tuple(
    sorted(
        (
            import_module(f"{package.__name__}.{module.name}").LESSON
            for package in (basics, layers, planners, times)
            for module in iter_modules(package.__path__)
            if module.name[1:3].isdecimal()  # `l05_mlp`; others hold what several lessons compute
        ),
        key=lambda lesson: lesson.number,
    )
)
CHAPTERS = {chapter: tuple(lessons) for chapter, lessons in groupby(LESSONS, lambda lesson: lesson.chapter)}
"""The lessons of each chapter."""
FORMER = [x.key for x in sorted((x for x in LESSONS if x.former), key=lambda lesson: lesson.former)]
"""Keys by the numbers that addresses and cookies once had: an old link still names the same lesson."""


def key_of(text: str) -> str:
    """Return the key that a text means: itself, or that of the lesson which once had this number; empty if no lesson has it."""
    if text.isascii() and text.isdecimal() and len(text) < 6:
        return FORMER[int(text) - 1] if 1 <= int(text) <= len(FORMER) else ""
    return text if any(x.key == text for x in LESSONS) else ""


def by_key(key: str) -> Lesson:
    """Return the lesson of a key that `key_of` gave."""
    return next(x for x in LESSONS if x.key == key)
