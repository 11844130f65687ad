"""What a typed answer is worth, and what is said to it: an answer that answers the mistake made."""

from __future__ import annotations

from explorer.learn.lesson import Question, near

FAR = 10
"""How many times too large or small an answer is of another order."""


def number(text: str) -> float | None:
    """The number in what was typed, with a point or a comma and with or without spaces; None if there is none."""
    plain = "".join(text.split()).replace("\u202f", "").replace(",", ".")
    if plain.count(".") > 1 or not plain.removeprefix("-").replace(".", "", 1).isdecimal() or not plain.isascii():
        return None
    return float(plain)


def judged(question: Question, text: str) -> tuple[int | None, str]:
    """The option that was typed and why it is right or wrong; None and a hint where it is none of those that were expected."""
    value = number(text)
    if value is None:
        unit = f" of {question.unit}" if question.unit else ""
        return None, f"“{text[:20]}” is not a number{unit}; type one such as 12 or 1.5."
    close = [i for i, other in enumerate(question.values) if near(value, other)]
    if close:
        best = question.answer if question.answer in close else close[0]
        return best, question.why[best]
    right = question.values[question.answer]
    if value <= 0 or right <= 0:
        return None, "It is more than that." if value < right else "It is less than that."
    ratio = value / right
    side = "large" if ratio > 1 else "small"
    if max(ratio, 1 / ratio) > FAR:
        return None, f"Too {side}, and of another order: look at the units, and at what is counted once and what again."
    if max(ratio, 1 / ratio) < 1.25:
        return None, f"Close, a little too {side}. Two figures are enough, but they must be right."
    return None, f"Too {side}. Go through the sentence once more: what is sent or computed, and how often?"
