"""The memory of a rank of a pipeline: weights of all its stages, and the micro-batches that are in flight in each of them.

When a stage runs a forward, the micro-batches before it whose backward has not come hold what autograd kept of them, and what was sent on.
So at each piece of a rank's work

    bytes = weights and states of the rank's stages + their gradients so far
          + micro-batches in flight, stage by stage, each times what one keeps
          + the highest moment of this pass through its own stage

Example: 1F1B with 4 ranks. Rank 0 holds 4 micro-batches when it runs the first backward, rank 3 holds 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner_core.core import Pipeline, State
from planner_core.cost.memory import Moment, StandingMemory, num_update_tensors, stage_moments
from planner_core.cost.memory.peak import KnownCopies
from planner_core.cost.model import CostModel
from planner_core.cost.resolved_ops import local_bytes
from planner_core.cost.schedule.pipeline.orders import Situation, steady_situations
from planner_core.cost.schedule.pipeline.stages import StagePlan, boundary_states


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage on one GPU. `kept`: what one micro-batch holds between its forward and its backward, with what it `sent` on.
    `forward` and `backward`: the highest moments of one pass, with the micro-batch's own kept bytes."""

    state: StandingMemory
    kept: int
    forward: Moment
    backward: Moment
    sent: int = 0


def stage_memories(stages: Sequence[StagePlan], model: CostModel) -> tuple[StageMemory, ...]:
    """Return what each stage of a plan takes. Stages that are alike are walked once."""
    known: dict[object, StageMemory] = {}
    # Stages of three and of four copies differ, but each copy inside is walked once for all of them.
    walked: KnownCopies = {}
    memories = []
    for number, stage in enumerate(stages):
        following = boundary_states(stages[number + 1]) if number + 1 < len(stages) else {}
        # Example: 64 stages of two copies each are three to walk, the first, an inner one and the last.
        if stage.key not in known:
            known[stage.key] = _stage_memory(stage, following, model, walked)
        memories.append(known[stage.key])
    return tuple(memories)


def _stage_memory(stage: StagePlan, states: Mapping[int, State], model: CostModel, walked: KnownCopies) -> StageMemory:
    """`states`: how each tensor that it hands on lies on the mesh."""
    top = stage.graph.top
    gradients = {v: local_bytes(top, v, s.gradient, model) for v, s in states.items() if top.values[v].grad}
    state, kept_bytes, forward, backward = stage_moments(stage.blocks, stage.graph, model, gradients, walked)
    sent = sum(local_bytes(top, v, s.forward, model) for v, s in states.items())
    return StageMemory(state, kept_bytes + sent, forward, backward, sent)


def rank_memory(
    pipeline: Pipeline, rank: int, memories: Sequence[StageMemory], situations: Sequence[Situation], model: CostModel
) -> dict[str, int]:
    """Return the bytes at the fullest moment of a GPU of a rank, by kind, as `Walk.memory_bytes`."""
    rank_stages = pipeline.stages_of(rank)
    params, moments, grads, reduced = (
        sum(getattr(memories[s].state, name) for s in rank_stages) for name in ("params", "moments", "grads", "reduced")
    )
    largest = max(memories[s].state.largest_param for s in rank_stages)
    peak = Moment(0, reduced, num_update_tensors(model.workload) * largest)  # the optimizer's step
    for moment in _highest_moments(rank_stages, memories, situations, grads):
        peak = max(peak, moment, key=lambda m: m.total)
    return {
        "params": params,
        "grads": peak.grads,
        "optimizer": moments,
        "activations": peak.kept,
        "buffers": peak.flying + peak.ahead,
        "overlap": peak.ahead,
        "peak": params + moments + peak.total,
    }


def _highest_moments(
    rank_stages: Sequence[int], memories: Sequence[StageMemory], situations: Sequence[Situation], grads: int
) -> Iterator[Moment]:
    """Yield the highest moment of each situation of a rank."""
    for stage, forward, others in situations:
        now = memories[stage].forward if forward else memories[stage].backward
        in_flight = sum(n * memories[s].kept for s, n in zip(rank_stages, others, strict=True))
        # A pass brings the gradients of its own stage; those of the rank's other stages are there too.
        yield now + Moment(in_flight, grads - memories[stage].state.grads)


def fullest_rank(
    pipeline: Pipeline, memories: Sequence[StageMemory], model: CostModel
) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return the bytes of the fullest rank by kind, and the peak of every rank."""
    every = [
        rank_memory(pipeline, rank, memories, situations, model)
        for rank, situations in enumerate(steady_situations(pipeline, model.workload.accumulate))
    ]
    return max(every, key=lambda m: m["peak"]), tuple(m["peak"] for m in every)
