"""What is said about a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class NoteKind(Enum):
    """What a note is about, where a reader treats such notes in another way than the rest."""

    GAP = "gap"
    """By how much the plan may be above the best there is."""
    SCOPE = "scope"
    """Which plans the search left out, so that nothing is proven."""
    TIE = "tie"
    """The plan leads since it is simpler than the fastest one, which stands behind it, and ties with it."""
    SHORTAGE = "shortage"
    """No plan fits: how many bytes are missing."""
    IDLE_GPUS = "idle GPUs"
    """No plan fits, since most GPUs hold the same weights."""
    REPEATED_WORK = "repeated work"
    """GPUs do the same work, since they cannot share the samples."""
    UNEVEN_BATCH = "uneven batch"
    """The samples do not divide over the GPUs."""
    DEFAULT_BATCH = "default batch"
    """The samples of a step or the tokens of a sample that a request left open: pages have them in their first line."""
    METHOD = "method"
    """What the plan's method admits; the sentence begins with the method's title, which is the plan's name."""
    UNKNOWN_HOST = "unknown host"
    """The step has no waits for the host, whose pace was not measured on the plan's stack."""
    EDIT = "edit"
    """Which weights were placed by hand, and from which plan the rest comes."""
    REMARK = "remark"
    """Any other note, and every note of a plan file."""


UNPROVEN = (NoteKind.SCOPE, NoteKind.GAP)
"""The notes that say why a plan is not proven."""


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence about a plan, for people. What a program asks of it is its `kind`."""

    sentence: str
    # A plan file holds the sentences alone, so a plan that comes back from its file has the same notes by them.
    kind: NoteKind = field(default=NoteKind.REMARK, compare=False)

    def __str__(self) -> str:
        return self.sentence
