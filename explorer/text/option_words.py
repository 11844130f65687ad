"""Sentences of the planner in the words of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from explorer.text.recipe import layout_line
from explorer.text.units import GIB, memory, seconds
from planner_core.core import OPTIONS, Note, PlannerError, Sentence, Term, option_switch
from planner_core.exporters import Remark, RemarkKind, name_file
from planner_core.planning.methods import ALL, TARGETS, parse_layout


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


def word_remarks(remarks: Sequence[Remark], file: str) -> list[str]:
    """Put an exporter's remarks in the words of the page, without those that it does not need: it writes the launch line for this cluster,
    and the options of the command line have controls. `file`: the name of the file that it offers."""
    shown = (r for r in remarks if r.kind not in (RemarkKind.LAUNCH, RemarkKind.READ_BACK))
    return [word_terms(name_file(remark, file)) for remark in shown]


def _page_term(term: Term) -> str:
    """Return a term in the words of the page."""
    return WORDS[term.kind](term) if term.kind in WORDS else term.text


def _word_mesh(term: Term) -> str:
    return term.text if len(term.value) > 1 else f"{term.value[0]} GPUs as one axis"


def _word_tool(term: Term) -> str:
    return TARGETS[term.name].title if term.name in TARGETS else term.text


def _word_option(term: Term) -> str:
    if term.name == "tool" and term.value in TARGETS:
        return f"“run with {TARGETS[term.value].title}”"
    control = OPTIONS[term.name].control
    if term.name == "memory_gb" and term.value is not None:
        # rounded up: what would do must do
        return f"{control} of {math.ceil(float(term.value) * 1e10 / GIB) / 10:g} GiB"
    return control if term.value is None or isinstance(term.value, bool) else f"{control} {term.value}"


WORDS: Mapping[str, Callable[[Term], str]] = {
    "bytes": lambda term: memory(float(term.value)),
    "seconds": lambda term: seconds(float(term.value)),
    "layout": lambda term: layout_line(parse_layout(term.value)),
    "mesh": _word_mesh,
    "cluster": lambda term: "the cluster",
    "tool": _word_tool,
    "form": _word_tool,
    "method": lambda term: ALL[term.name].shown_plan,
    "check": option_switch,
    "option": _word_option,
}
"""How the page words a term, by its kind."""
