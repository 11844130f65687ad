"""Where a learner is, as text for the address: lesson, step, and controls that are not at their default."""

from __future__ import annotations

from collections.abc import Mapping

from explorer.learn.lesson import Choice, Control, Lesson
from explorer.learn.lessons import BY_KEY, LESSONS

KEYS = ("lesson", "step", "with", "done")


def write_lesson_address(lesson: Lesson, values: Mapping[str, Choice], step: int) -> dict[str, str]:
    """Write `lesson=collectives&step=3&with=n:6,bytes:1024`."""
    params = {"lesson": lesson.key}
    if step > 0:
        params["step"] = str(step + 1)
    changed = [f"{c.key}:{values[c.key]}" for c in lesson.controls if values[c.key] != c.default]
    return {**params, "with": ",".join(changed)} if changed else params


def read_address(params: Mapping[str, str]) -> tuple[Lesson, dict[str, Choice], int, list[str]]:
    """Return lesson, controls and step of an address, and a sentence for each part that cannot be read."""
    problems: list[str] = []
    wanted = params.get("lesson", LESSONS[0].key)
    if wanted not in BY_KEY:
        problems.append(f"There is no lesson “{wanted[:20]}”; showing the first of {len(LESSONS)}.")
    lesson = BY_KEY.get(wanted, LESSONS[0])
    values = lesson.defaults()
    controls = {c.key: c for c in lesson.controls}
    for part in filter(None, params.get("with", "").split(",")):
        key, _, text = part.partition(":")
        option = _option(controls[key], text) if key in controls else None
        if option is None:
            problems.append(f"“{part[:40]}” in the address is not a setting of this lesson; using its default.")
        else:
            values[key] = option
    step = params.get("step", "")
    number = int(step) if step.isascii() and step.isdecimal() and len(step) < 6 else 1
    return lesson, values, max(0, number - 1), problems


def _option(control: Control, text: str) -> Choice | None:
    return next((o for o in control.options if str(o) == text), None)
