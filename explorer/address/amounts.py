"""Amounts of the address as people write them: `15T`, `2M tokens`. No Streamlit here."""

from __future__ import annotations

import re

from planner_core.core import MAGNITUDES, Unreadable


def format_tokens(tokens: float) -> str:
    """Write a number of tokens as `core.parse_tokens` reads it: `15T`."""
    letter = next((x for x in "TBM" if tokens >= MAGNITUDES[x]), "")
    return f"{tokens / MAGNITUDES[letter]:.10g}{letter}"


BATCH_PATTERN = re.compile(r"(\d+(?:[.,]\d+)?)\s*([kKmMbB]?)\s*(tokens?|tok|samples?)?", re.IGNORECASE)


def parse_batch(text: str, seq: int, num_gpus: int) -> int:
    """Read the samples of a step: `256`, `256 samples` or `2M tokens`. Raises Unreadable.

    Tokens become the nearest number of samples that all GPUs share evenly, or the nearest at all where that is fewer than there are
    GPUs.
    """
    match = BATCH_PATTERN.fullmatch(text.replace("\u202f", "").replace(" ", "").strip())
    if match is None:
        raise Unreadable(f"“{text[:40]}” is not a batch such as 256 or 2M tokens.")
    value = float(match[1].replace(",", "")) * MAGNITUDES[match[2].upper()]
    if not (match[3] or "").lower().startswith("tok"):
        if value != int(value) or not 1 <= value <= 1e6:
            raise Unreadable(f"“{text[:40]}” is not a whole number of samples from 1 to 1 000 000.")
        return int(value)
    samples = value / seq
    if not 0.5 <= samples <= 1e6:
        raise Unreadable(f"“{text[:40]}” is no sample of {seq} tokens, or more than a million.")
    # 2M tokens of 4 096 on 64 GPUs are 488.3 samples: 512 are dealt out evenly, 488 are not
    return max(1, round(samples / num_gpus) * num_gpus or round(samples))
