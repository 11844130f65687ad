"""Sentences of the planner in the words of the page."""

from __future__ import annotations

import math

from explorer.text.recipe import layout_line
from explorer.text.units import GIB, memory, seconds
from planner_core.core import OPTIONS, Note, PlannerError, Sentence, Term, option_switch
from planner_core.exporters import TARGETS
from planner_core.planning.methods import ALL, parse_layout


def page_wording(sentence: str | Note | Exception) -> str:
    """Word an error or a note for the page: options, tools and methods by its names, memory in GiB, three digits."""
    if isinstance(sentence, Exception):
        sentence = sentence.sentence if isinstance(sentence, PlannerError) else str(sentence)
    if isinstance(sentence, Note):
        sentence = sentence.sentence
    text = word_terms(sentence)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")


def word_terms(sentence: str) -> str:
    """Put the terms of a sentence into the words of the page, as they are within a line."""
    return sentence.worded(_page_term) if isinstance(sentence, Sentence) else sentence


def _page_term(term: Term) -> str:
    """Return a term in the words of the page."""
    if term.kind == "bytes":
        return memory(float(term.value))
    if term.kind == "seconds":
        return seconds(float(term.value))
    if term.kind == "layout":
        return layout_line(parse_layout(term.value))
    if term.kind == "mesh":
        return term.text if len(term.value) > 1 else f"{term.value[0]} GPUs as one axis"
    if term.kind == "cluster":
        return "the cluster"
    if term.kind == "tool":
        return TARGETS[term.name].title if term.name in TARGETS else term.text
    if term.kind == "method":
        return ALL[term.name].shown_plan
    if term.kind == "check":
        return option_switch(term)
    control = OPTIONS[term.name].control
    if term.name == "memory_gb" and term.value is not None:
        # rounded up: what would do must do
        return f"{control} of {math.ceil(float(term.value) * 1e10 / GIB) / 10:g} GiB"
    return control if term.value is None or isinstance(term.value, bool) else f"{control} {term.value}"
