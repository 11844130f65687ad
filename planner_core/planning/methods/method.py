"""What a way to plan is: a restriction of the one space of plans, and what the search minimises there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner_core.core import DeviceMesh, Graph
from planner_core.search.network import Restriction

Restrict = Callable[[Graph, DeviceMesh], Restriction | None]
"""What is forbidden on a mesh; None where the mesh does not suit the method."""


def free(graph: Graph, mesh: DeviceMesh) -> Restriction | None:
    """Forbid nothing, on any mesh."""
    return Restriction()


def always(graph: Graph) -> bool:
    """Every model."""
    return True


@dataclass(frozen=True, slots=True)
class Method:
    """One way to plan; all of it that another module needs to know.

    A method that `--method` takes is an entry of `METHODS`, a usual layout is an entry of `BASELINES` (see
    `registry`). The command line, the reports and the explorer read their lists from there.
    """

    name: str
    """As `--method` takes it, and as plan files keep it: `megatron`."""
    title: str
    """As reports call a plan of it: `Megatron-LM`."""
    words: str
    """What it does, in one sentence that follows the title and a colon."""
    restrict: Restrict = free
    objective: str | None = None
    """What it minimises (see `OBJECTIVES`); None: what the request asks for."""
    zero: int = 3
    """The highest ZeRO stage that its space knows."""
    uniform: bool = False
    """Whether all copies of a block run alike."""
    by_volume: bool = False
    """Whether every mesh axis costs alike: bytes count, not seconds."""
    space: str = ""
    """What `restrict` forbids, in words that follow the method's name; for the steps from exact to this method."""
    chunks: bool = False
    """Whether a plan says what running the batch in chunks would hide (ATP)."""
    called: str = ""
    """As the explorer calls it, where that is not `title`."""
    plan_title: str = ""
    """As the explorer calls its plan, where that is not `title`."""
    suits: Callable[[Graph], bool] = always
    """Whether the model has such a layout at all; where it has not, its absence is not worth a note."""

    @property
    def shown(self) -> str:
        """What the explorer calls the method."""
        return self.called or self.title

    @property
    def shown_plan(self) -> str:
        """What the explorer calls a plan of it."""
        return self.plan_title or self.title[:1].upper() + self.title[1:]

    @property
    def defined(self) -> str:
        """Its plan and its words as one sentence, without the full stop."""
        return f"{self.shown_plan}: {self.words}"
