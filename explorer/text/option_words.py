"""Sentences of the command line, worded for the page. Pure."""

from __future__ import annotations

import math
import re

from explorer.text.units import GIB, memory
from planner_core.exporters import TARGETS
from planner_core.planning.methods import BASELINES

OPTIONS = {
    "memory-gb": "memory per GPU",
    "mesh": "mesh",
    "batch": "batch",
    "seq": "sequence length",
    "layers": "layers",
    "recompute": "recomputation",
    "accumulate": "number of micro-batches",
    "dtype": "number format",
    "precision": "precision",
    "optimizer": "optimizer",
    "zero": "ZeRO stage",
    "cluster": "cluster",
    "method": "method",
    "objective": "goal",
    "for": "tool",
}


MEMORY = re.compile(r"(\d+(?:\.\d+)?) GB(?!/)")
"""The command line has memory in GB, the page in GiB."""


def page_wording(text: str) -> str:
    """Word a sentence of the command line for the page: options by the names of their controls, memory in GiB."""
    # rounded up: what would do must do
    text = re.sub(
        r"--memory-gb (\d+)", lambda m: f"--memory-gb of {math.ceil(float(m[1]) * 1e10 / GIB) / 10:g} GiB", text
    )
    for option, words in OPTIONS.items():
        text = re.sub(rf"--{option}\b", words, text)
    text = re.sub(r"^For ([a-z0-9]+):", lambda m: f"For {TARGETS[m[1]].title if m[1] in TARGETS else m[1]}:", text)
    text = text.replace("hf-expert", BASELINES["hf-expert"].shown_plan)
    text = MEMORY.sub(lambda m: memory(float(m[1]) * 1e9), text)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")
