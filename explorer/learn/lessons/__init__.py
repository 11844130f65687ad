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
BY_KEY = {lesson.key: lesson for lesson in LESSONS}
