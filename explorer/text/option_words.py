"""Sentences of the planner in the words of the page."""

from __future__ import annotations

import math

from explorer.text.units import GIB, memory
from planner_core.core import OPTIONS, PlannerError, Sentence, Term
from planner_core.exporters import TARGETS
from planner_core.planning.methods import ALL


def page_wording(sentence: str | Exception) -> str:
    """Word an error or a note for the page: options by the names of their controls, memory in GiB, tools and methods as it calls them."""
    if isinstance(sentence, Exception):
        sentence = sentence.sentence if isinstance(sentence, PlannerError) else str(sentence)
    text = sentence.worded(_page_term) if isinstance(sentence, Sentence) else sentence
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")


def _page_term(term: Term) -> str:
    """A term in the words of the page."""
    if term.kind == "bytes":
        return memory(float(term.value))
    if term.kind == "tool":
        return TARGETS[term.name].title if term.name in TARGETS else term.text
    if term.kind == "method":
        return ALL[term.name].shown_plan
    control = OPTIONS[term.name].control
    if term.name == "memory_gb" and term.value is not None:
        # rounded up: what would do must do
        return f"{control} of {math.ceil(float(term.value) * 1e10 / GIB) / 10:g} GiB"
    return control if term.value is None or isinstance(term.value, bool) else f"{control} {term.value}"
