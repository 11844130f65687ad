"""What an export says beside its file. A reader decides by a remark's kind and by its terms, never by its words."""

from __future__ import annotations

from enum import Enum

from planner_core.core import Plan, Sentence, Term
from planner_core.planning.methods import Target


class RemarkKind(Enum):
    """What a remark is about, where a page says the same by itself."""

    LAUNCH = "launch"
    """How the file is run on any cluster."""
    READ_BACK = "read back"
    """How the command line prices the file."""
    SHORTAGE = "shortage"
    """The plan does not fit, which is said before what was written."""
    OTHER = "other"


class Remark(Sentence):
    """A sentence of an export for its user, with its kind."""

    kind: RemarkKind

    def __new__(cls, *parts: str | Term, kind: RemarkKind = RemarkKind.OTHER) -> Remark:
        """Join texts, terms and sentences, as `Sentence` does. A remark among many keeps its kind: `Remark.of`."""
        remark = super().__new__(cls, *parts)
        assert isinstance(remark, Remark)
        remark.kind = kind
        return remark

    @staticmethod
    def of(text: str) -> Remark:
        """The same remark, or a text as one of no special kind."""
        return text if isinstance(text, Remark) else Remark(text)


FILE = Term("file", "", None, "FILE")
"""The path of the written file, which only whoever writes it knows."""
PRICE_FILE = Term("price file", "", None, "price(config=FILE)")
"""The command that prices a written file."""


def name_file(sentence: str, path: str) -> str:
    """The sentence with the path in the place of `FILE`; its other terms stay terms."""
    if not isinstance(sentence, Sentence):
        return sentence
    return Sentence(*(path if part == FILE else part for part in sentence.parts))


def describe_launch(
    target: Target, plan: Plan, torchrun: str = "torchrun ...", before: str = "", after: str = ""
) -> Remark:
    """Return the line that runs a written file, between two texts. `torchrun`: what starts the ranks."""
    start, end = (part.format(torchrun=torchrun, option=target.option(plan)) for part in target.launch.split("{file}"))
    return Remark(before, start, FILE, end, after, kind=RemarkKind.LAUNCH)
