"""The memory of a rank of a pipeline: weights of all its stages, and the micro-batches that are in flight in each of them.

When a stage runs a forward, the micro-batches before it whose backward has not come hold what autograd kept of them, and what was sent on.
So at each piece of a rank's work

    bytes = weights and states of the rank's stages + gradients of those whose backward has begun
          + micro-batches in flight, stage by stage, each times what one keeps
          + the highest moment of this pass through its own stage

Example: 1F1B with 4 ranks. Rank 0 holds 4 micro-batches when it runs the first backward, rank 3 holds 1.

torch keeps what a stage has received and sent on until the backward of that micro-batch is over, and then frees the gradients that it was
sent. With several stages a rank it receives before the passes that need it (`orders`). Gradients that are summed once a step need
memory beside the last backward alone.

PyTorch makes a gradient in the first backward that brings it. A stack with a buffer of gradients
(Megatron-LM) has them all the time. Example: 8 stages a rank, as many micro-batches as ranks: all forwards run before any gradient stands.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner_core.core import Pipeline, State
from planner_core.cost.memory import Moment, StageMoments, StandingMemory, num_update_tensors, stage_moments
from planner_core.cost.memory.peak import KnownCopies
from planner_core.cost.memory.standing import weight_forms
from planner_core.cost.model import CostModel
from planner_core.cost.resolved_ops import local_bytes
from planner_core.cost.schedule.pipeline.orders import Situation, steady_situations
from planner_core.cost.schedule.pipeline.stages import StagePlan, boundary_states


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage on one GPU.

    `of`: the highest moments of its passes. `kept`: what one micro-batch holds between its forward and backward, with what it `sent` on.
    `received`, `gradients`: operands and gradients of one micro-batch that are sent to it. `returned`: gradients of one micro-batch that it
    sends back. `outer`: the sum of gradients of each weight of the top block, by name, also of one that an earlier stage of the rank holds.
    """

    of: StageMoments
    kept: int
    sent: int
    received: int
    gradients: int
    returned: int
    outer: Mapping[str, int]

    @property
    def state(self) -> StandingMemory:
        """What the stage's weights take."""
        return self.of.state

    def passing(self, forward: bool, begun: bool, is_last: bool) -> Moment:
        """Return the highest moment of a pass beside gradients that stand, with the micro-batch's own kept bytes.

        `begun`: whether gradients of the stage stand when it begins. `is_last`: whether it is the backward of a step's last micro-batch."""
        if forward:
            return self.of.forward
        if not begun:
            return self.of.first_backward
        return self.of.last_backward if is_last else self.of.backward


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
    # What is handed on as it came stays in the buffer that received it.
    sent = sum(local_bytes(top, v, s.forward, model) for v, s in states.items() if v not in stage.takes)
    taken = boundary_states(stage).items()
    received = sum(local_bytes(top, v, s.forward, model) for v, s in taken)
    returned = sum(local_bytes(top, v, s.gradient, model) for v, s in taken if top.values[v].grad)
    moments = stage_moments(stage.blocks, stage.graph, model, gradients, sent, walked, stage.borrowed)
    plan = stage.blocks[""]
    forms = weight_forms(top, replace(plan, params={**plan.params, **stage.borrowed}), model)
    outer = {top.values[w.value].name: w.gradient.num_bytes for w in forms}
    return StageMemory(moments, moments.kept + sent, sent, received, sum(gradients.values()), returned, outer)


def rank_memory(
    pipeline: Pipeline, rank: int, memories: Sequence[StageMemory], situations: Sequence[Situation], model: CostModel
) -> dict[str, int]:
    """Return the bytes at the fullest moment of a GPU of a rank, by kind, as `Walk.memory_bytes`."""
    rank_stages = pipeline.stages_of(rank)
    buffer = model.software.gradient_buffer
    params, moments, updated = (
        sum(getattr(memories[s].state, name) for s in rank_stages)
        for name in ("params", "moments", "grads" if buffer else "reduced")
    )
    largest = max(memories[s].state.largest_param for s in rank_stages)
    peak = Moment(0, updated, num_update_tensors(model.workload) * largest)  # the optimizer's step
    # torch's schedule of one stage a rank drops the gradients that it has sent back when the next backward is over.
    returned = memories[rank].returned if pipeline.schedule == "1f1b" else 0
    for moment in _highest_moments(rank_stages, memories, situations, buffer, returned):
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
    rank_stages: Sequence[int],
    memories: Sequence[StageMemory],
    situations: Sequence[Situation],
    buffer: bool,
    returned: int,
) -> Iterator[Moment]:
    """Yield the highest moment of each situation of a rank. `buffer`: whether gradients stand all through a step. `returned`: bytes that
    the rank holds from its first backward on."""
    kept_by_stage = [memories[s].kept for s in rank_stages]
    grads_by_stage = [memories[s].state.grads for s in rank_stages]
    shared = _shared_gradients([memories[s].outer for s in rank_stages])
    received_by_stage = [(memories[s].received, memories[s].gradients) for s in rank_stages]
    for stage, forward, others, begun, is_last, operands, gradients in situations:
        stands = (True,) * len(begun) if buffer else begun
        kept = sum(map(operator.mul, others, kept_by_stage))
        grads = sum(map(operator.mul, stands, grads_by_stage))
        at = rank_stages.index(stage)
        # Backward comes first to the last stage that uses a weight, so its gradient stands before others of the stage that holds it. The
        # first backward of that stage counts it as its own.
        grads += sum(
            size
            for first, later, size in shared
            if not stands[first] and any(stands[k] for k in later) and (forward or at != first)
        )
        passing = memories[stage].passing(forward, stands[at], is_last)
        # When Megatron-LM, which has the buffer of gradients, receives is not known here.
        early = zip(operands, gradients, received_by_stage, strict=False) if not buffer else ()
        ahead = sum(n * operand + m * gradient for n, m, (operand, gradient) in early)
        yield passing + Moment(kept, grads, returned * any(begun) + ahead)


def _shared_gradients(outer: Sequence[Mapping[str, int]]) -> list[tuple[int, list[int], int]]:
    """Return for each weight that several stages of a rank use the first of them, which holds it, the others, and the bytes of the sum of
    its gradients. `outer`: that of each stage."""
    users: dict[str, list[int]] = {}
    for number, sizes in enumerate(outer):
        for name in sizes:
            users.setdefault(name, []).append(number)
    return [(first, later, outer[first][name]) for name, (first, *later) in users.items() if later]


def fullest_rank(
    pipeline: Pipeline, memories: Sequence[StageMemory], model: CostModel
) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return the bytes of the fullest rank by kind, and the peak of every rank."""
    every = [
        rank_memory(pipeline, rank, memories, situations, model)
        for rank, situations in enumerate(steady_situations(pipeline, model.workload.accumulate))
    ]
    return max(every, key=lambda m: m["peak"]), tuple(m["peak"] for m in every)
