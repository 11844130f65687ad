"""What a typed answer is worth, and what is said to it: an answer that answers the mistake made.

`static/js/lessons/answers.js` does the same in the files that work without a server; a test holds one against the other.
"""

from __future__ import annotations

import re

from explorer.learn.lesson import Question, near

FAR = 10
"""How many times too large or small an answer is of another order."""

SCALES = (
    {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30},
    {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6},
    {"times": 1.0, "time": 1.0, "x": 1.0, "×": 1.0, "%": 0.01, "percent": 0.01, "per cent": 0.01},
)
"""Units that turn into each other, by what one of them is worth."""

NUMBER = r"[-−]?\d(?:[\d.,\s]*\d)?"
TYPED = re.compile(rf"[≈~]?\s*({NUMBER})(?:\s*/\s*({NUMBER}))?\s*([^\d.,/]*)", re.ASCII)
PLAIN = re.compile(r"\d+(?:[.,]\d+)?", re.ASCII)
GROUPS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
GROUPS_BY_POINT = re.compile(r"\d{1,3}(?:\.\d{3})+,\d+", re.ASCII)


def numbers(text: str, unit: str = "") -> tuple[float, ...]:
    """What may have been meant, in `unit`: `1 234,5`, `1,234.5`, `5/4`, `101 MB`. The comma of `1,900` may divide thousands or
    fractions, so both are given, thousands first. Nothing where it is not a number, or one of another unit."""
    found = TYPED.fullmatch(text.strip())
    scale = _scale(found[3], unit) if found else None
    if found is None or scale is None:
        return ()
    above, below = _plain(found[1]), _plain(found[2]) if found[2] else (1.0,)
    return tuple(a / b * scale for a in above for b in below if b)


def _plain(text: str) -> tuple[float, ...]:
    sign = -1.0 if text[0] in "-−" else 1.0
    plain = "".join(text.lstrip("-−").split())
    found = []
    if GROUPS.fullmatch(plain) and plain[0] != "0":
        found.append(float(plain.replace(",", "")))
    if GROUPS_BY_POINT.fullmatch(plain):
        found.append(float(plain.replace(".", "").replace(",", ".")))
    if PLAIN.fullmatch(plain):
        found.append(float(plain.replace(",", ".")))
    return tuple(sign * x for x in found)


def _scale(typed: str, unit: str) -> float | None:
    """What one of the typed unit is in the unit that was asked for; None if it is of another kind."""
    told, asked = " ".join(typed.lower().split()).rstrip("."), unit.lower()
    if not told or told.rstrip("s") == asked.rstrip("s"):
        return 1.0
    return next((s[told] / s[asked] for s in SCALES if told in s and asked in s), None)


def judged(question: Question, text: str) -> tuple[int | None, str]:
    """The option that was typed and why it is right or wrong; None and a hint where it is not one of those that were expected."""
    meant = numbers(text, question.unit)
    if not meant:
        unit = f" of {question.unit}" if question.unit else ""
        return None, f"“{text[:20]}” is not a number{unit}; type one such as 12, 1.5 or 5/4."
    close = [i for value in meant for i, other in enumerate(question.values) if near(value, other)]
    if close:
        best = question.answer if question.answer in close else close[0]
        return best, question.why[best]
    value, right = meant[0], question.values[question.answer]
    if value <= 0 or right <= 0:
        return None, "It is more than that." if value < right else "It is less than that."
    ratio = value / right
    side = "large" if ratio > 1 else "small"
    if max(ratio, 1 / ratio) > FAR:
        return None, f"Too {side}, and of another order: look at the units, and at what is counted once and what again."
    if max(ratio, 1 / ratio) < 1.25:
        return None, f"Close, a little too {side}. Two figures are enough, but they must be right."
    return None, f"Too {side}. Go through the sentence once more: what is sent or computed, and how often?"
