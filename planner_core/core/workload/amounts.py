"""Amounts as people write them: `15T`, `300B`."""

from __future__ import annotations

import re

TOKEN_COUNT = re.compile(r"(\d+(?:\.\d*)?(?:[eE]\+?\d{1,2})?)\s*([kKmMbBtT]?)")
MAGNITUDES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


class Unreadable(ValueError):
    """Why a text is not a value; the message ends the sentence that the text begins."""


def parse_tokens(text: str) -> float:
    """Read a number of tokens: `15T`, `300 B`, `1e12`. Raises Unreadable."""
    match = TOKEN_COUNT.fullmatch(text.strip())
    if match is None:
        raise Unreadable("is not a number of tokens such as 15T, 300B or 1e12")
    value = float(match[1]) * MAGNITUDES[match[2].upper()]
    if not 1 <= value <= 1e18:
        raise Unreadable("is not between 1 and 10^18")
    return value
