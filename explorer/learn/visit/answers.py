"""Judges a typed answer: which option it means, and the reply that fits the mistake."""

from __future__ import annotations

import re

from explorer.learn.lesson import Question, near

OTHER_ORDER, CLOSE = 10, 1.25
"""Ratios to the right answer from which on a typed one is of another order, and up to which it is close."""

SCALES = (
    {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30},
    {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6},
    {"times": 1.0, "time": 1.0, "x": 1.0, "×": 1.0, "%": 0.01, "percent": 0.01, "per cent": 0.01},
)
"""Units that turn into each other, by what one of them is worth."""

NUMBER = r"[-−]?\d(?:[\d.,\s]*\d)?(?:[eE][-+]?\d{1,2})?"
TYPED = re.compile(rf"[≈~]?\s*({NUMBER})(?:\s*/\s*({NUMBER}))?\s*([^\d.,/]*)", re.ASCII)
PLAIN = re.compile(r"\d+(?:[.,]\d+)?", re.ASCII)
GROUPS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
GROUPS_BY_POINT = re.compile(r"\d{1,3}(?:\.\d{3})+,\d+", re.ASCII)


def judge_answer(question: Question, text: str) -> tuple[int | None, str]:
    """Return the option that was typed, and why it is right or wrong; None and a hint where no option expects it."""
    readings = read_numbers(text, question.unit)
    if not text:
        return None, "Type a number first."
    if not readings:
        unit = f" of {question.unit}" if question.unit else ""
        return None, f"“{text[:20]}” is not a number{unit}; type one such as 12, 1.5 or 5/4."
    close = [i for value in readings for i, other in enumerate(question.values) if near(value, other)]
    if close:
        option = question.answer if question.answer in close else close[0]
        return option, question.why[option]
    return None, _hint(readings[0], question.values[question.answer])


def _hint(value: float, right: float) -> str:
    if value <= 0 or right <= 0:
        return "It is more than that." if value < right else "It is less than that."
    side = "large" if value > right else "small"
    ratio = max(value / right, right / value)
    if ratio > OTHER_ORDER:
        return f"Too {side}, and of another order: look at the units, and at what is counted once and what again."
    if ratio < CLOSE:
        return f"Close, a little too {side}. Two figures are enough, but they must be right."
    return f"Too {side}. Go through the sentence once more: what is sent or computed, and how often?"


def read_numbers(text: str, unit: str) -> tuple[float, ...]:
    """Return the numbers that a text may mean, in `unit`: `1 234,5`, `1,234.5`, `5/4`, `1e3`, `101 MB`.

    The comma of `1,900` may divide thousands or fractions, so both readings are given, thousands first. Empty where the text is not a
    number, or is one of another unit.
    """
    match = TYPED.fullmatch(text.strip())
    scale = _unit_scale(match[3], unit) if match else None
    if match is None or scale is None:
        return ()
    numerators, denominators = _readings(match[1]), _readings(match[2]) if match[2] else (1.0,)
    return tuple(a / b * scale for a in numerators for b in denominators if b)


def _readings(text: str) -> tuple[float, ...]:
    sign = -1.0 if text[0] in "-−" else 1.0
    digits, _, power = "".join(text.lstrip("-−").split()).lower().partition("e")
    scale = sign * 10.0 ** int(power or 0)
    values = []
    if GROUPS.fullmatch(digits) and digits[0] != "0":
        values.append(float(digits.replace(",", "")))
    if GROUPS_BY_POINT.fullmatch(digits):
        values.append(float(digits.replace(".", "").replace(",", ".")))
    if PLAIN.fullmatch(digits):
        values.append(float(digits.replace(",", ".")))
    return tuple(scale * x for x in values)


def _unit_scale(typed: str, unit: str) -> float | None:
    """Return how many of `unit` one of the typed unit is; None if it is of another kind."""
    given, wanted = " ".join(typed.lower().split()).rstrip("."), unit.lower()
    if not given or given.rstrip("s") == wanted.rstrip("s"):
        return 1.0
    return next((s[given] / s[wanted] for s in SCALES if given in s and wanted in s), None)
