"""The value `Method`: a restriction of the one space of plans, and what the search minimises in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner_core.core import ZERO, DeviceMesh, Graph, Note, NoteKind
from planner_core.search.network import Restriction

Restrict = Callable[[Graph, DeviceMesh], Restriction | None]
"""Gives the restriction for a graph and a mesh; None if the mesh does not suit the method."""


def unrestricted(graph: Graph, mesh: DeviceMesh) -> Restriction | None:
    """Forbid nothing, on any mesh."""
    return Restriction()


@dataclass(frozen=True, slots=True)
class Method:
    """One way to plan, with all that other modules need to know of it.

    A method of `--method` is an entry of `METHODS`; a baseline is an entry of `BASELINES` (see `registry`). The command line,
    the reports and the explorer read their lists from there.
    """

    name: str
    """The name for `--method` and in plan files: `megatron`."""
    title: str
    """The name of its plans in reports: `Megatron-LM`."""
    words: str
    """What it does, as one sentence after the title and a colon."""
    restrict: Restrict = unrestricted
    objective: str | None = None
    """What it minimises (see `OBJECTIVES`); None: what the request asks for."""
    zero: int = 3
    """The highest ZeRO stage of its space."""
    usual_stage: int | None = None
    """The same where the request's space holds this stage or a higher one: the stage in which such a layout is usually run (Megatron-LM
    with its distributed optimizer). None: `zero` everywhere."""
    uniform: bool = False
    """Whether all copies of a block are equal."""
    one_switch: bool = False
    """Whether what runs it recomputes all blocks wholly or none, by one switch."""
    by_volume: bool = False
    """Whether it counts bytes and not seconds, so that every mesh axis costs the same."""
    space: str = ""
    """What `restrict` forbids, as words after the method's name, for the steps of the ablation."""
    chunks: bool = False
    """Whether its plans say what they would gain if products ran in chunks (ATP)."""
    plan_title: str = ""
    """The name of its plan in the explorer, if that is not `title`."""
    suits: Callable[[Graph], bool] = lambda graph: True
    """Whether the model can have such a layout. If it cannot, reports do not mention the method."""

    @property
    def shown_plan(self) -> str:
        """The name of its plan in the explorer."""
        return self.plan_title or self.title[:1].upper() + self.title[1:]

    @property
    def admits(self) -> Note:
        """A note on its plan in reports: what the method does."""
        return Note(f"{self.title}: {self.words}", NoteKind.METHOD)

    def highest_stage(self, zero: int | None) -> int:
        """Return the highest ZeRO stage of its space, where the request asks for the stage `zero` (None: the search chooses it)."""
        return self.zero if self.usual_stage is None else min(self.usual_stage, max(ZERO) if zero is None else zero)

    def describe_aim(self, objective: str) -> str | None:
        """Return what its plans make least where the request asks for `objective`: `least bytes`. None where that is the step's time."""
        aim = self.objective or objective
        return None if aim == "time" else "least bytes" if self.by_volume else f"least {aim} time"

    @property
    def defined(self) -> str:
        """The name of its plan, and its words, as one sentence without the full stop."""
        return f"{self.shown_plan}: {self.words}"
