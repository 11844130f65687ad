"""What a plan is in its answer, and what is said about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class PlanRole(Enum):
    """What a plan is in its answer, where a reader treats such plans in another way than the rest."""

    BEST = "best"
    """The best plan of one stage by the method and objective of the request."""
    SIMPLER = "simpler"
    """It stands in the place of the best one, since it is simpler and ties with it."""
    FASTEST = "fastest"
    """The best plan behind a simpler one."""
    TRADE_OFF = "trade-off"
    """A corner of the front of time and memory."""
    STAGES = "stages"
    """The best plan with pipeline stages."""
    STOCK_STAGES = "stock stages"
    """The best plan with stages that a stock tool can be told."""
    SMALLEST_STAGES = "smallest stages"
    """A plan with stages that does not fit, where no plan does, and takes less memory than one stage."""
    OTHER = "other"
    """Any other plan, and every plan of a file."""


STAGED_ROLES = (PlanRole.STAGES, PlanRole.STOCK_STAGES, PlanRole.SMALLEST_STAGES)
"""The roles of the plans that a search of stages adds to an answer."""


class NoteKind(Enum):
    """What a note is about, where a reader treats such notes in another way than the rest."""

    GAP = "gap"
    """By how much the plan may be above the best there is."""
    SCOPE = "scope"
    """Which plans the search left out, so that nothing is proven."""
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
    KERNELS = "kernels"
    """Whose kernels the rows of a tool's layout are on; pages say it at the tool's name."""
    WORKLOAD = "workload"
    """With whose micro-batches and recomputation a method of a paper is searched."""
    EDIT = "edit"
    """Which weights were placed by hand, and from which plan the rest comes."""
    REMARK = "remark"
    """Any other note, and every note of a plan file."""


UNPROVEN_KINDS = (NoteKind.SCOPE, NoteKind.GAP)
"""The notes that say why a plan is not proven."""


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence about a plan, for people. What a program asks of it is its `kind`."""

    sentence: str
    # A plan file holds the sentences alone, so a plan that comes back from its file has the same notes by them.
    kind: NoteKind = field(default=NoteKind.REMARK, compare=False)

    def __str__(self) -> str:
        return self.sentence
