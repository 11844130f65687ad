"""The stages of a plan, and the order in which they run their micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner_core.core.mesh import PipelineAxis

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb", "zbv")
"""The orders in which stages run their micro-batches (`cost.schedule.pipeline`)."""
V_SHAPED, VIRTUAL_OF_V = "zbv", 2
"""The order whose stages go there and back over the ranks, and how many stages each rank then has."""
ONE_EACH = ("gpipe", "1f1b")
"""The orders in which a rank has one stage."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a model is cut into stages, and in which order the stages run their micro-batches.

    `ranks`: the number of groups of GPUs between which the stages are dealt; each group is a mesh of the form `Plan.mesh`. `outer` axes of
    that mesh lie outside of the pipeline's (`PipelineAxis`); if none does, the groups lie one behind the other. `copies`: how many calls
    of repeated blocks each stage runs, in order. What stands before the first call belongs to the first stage, what stands behind a call
    to the stage of that call.

    `parts`: of each stage the prefixes of its calls, in order, and the names of the weights outside of them that it reads. A run needs
    them before it has seen a forward pass. Empty while stages are only priced.
    """

    ranks: int
    schedule: str
    copies: tuple[int, ...]
    parts: tuple[tuple[str, ...], ...] = ()
    outer: int = 0

    @property
    def axis(self) -> PipelineAxis:
        """The axis of the groups in the mesh of all GPUs."""
        return PipelineAxis(self.ranks, self.outer)

    @property
    def virtual(self) -> int:
        """Stages of one rank."""
        return len(self.copies) // self.ranks

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are apart, which is priced and does not run."""
        return self.schedule in ("zb", "zbv")

    def rank_of(self, stage: int) -> int:
        """Return the group that runs a stage: stages go round, but in `zbv` there and back (a V)."""
        turn, at = divmod(stage, self.ranks)
        # Example: 3 ranks and 6 stages. Round: 0 1 2 0 1 2. In a V: 0 1 2 2 1 0.
        return self.ranks - 1 - at if self.schedule == V_SHAPED and turn % 2 else at

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a group runs, in order of the model."""
        return tuple(s for s in range(len(self.copies)) if self.rank_of(s) == rank)

    def call_range(self, stage: int) -> tuple[int, int]:
        """Return the first call of a stage, and the first one behind it."""
        before = sum(self.copies[:stage])
        return before, before + self.copies[stage]

    def reads(self, stage: int, weight: str) -> bool:
        """Return whether a stage reads a weight, by its name in the whole model."""
        # A weight that operators around the copies read is a part by its own name, even if a copy's prefix begins it. Example: T5's first
        # stage reads `decoder.block.0.…relative_attention_bias` for all layers, and the second stage runs `decoder.block.0`.
        if any(weight in parts for parts in self.parts):
            return weight in self.parts[stage]
        return any(weight.startswith(f"{part}.") for part in self.parts[stage])

    def stages_that_read(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the stages that read a weight which has these names (tied weights have several)."""
        return tuple(s for s in range(len(self.parts)) if any(self.reads(s, name) for name in names))
