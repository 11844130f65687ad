"""The time and memory of each copy as a part of a stage, under each policy to run the copies.

The model is cut into *pieces*: a copy of a repeated block with the operators after it (the first piece also has those before it). The
seconds and bytes of a stage are sums over its pieces; only the highest passing moment is a maximum. So the cost of any range of pieces
follows from prefix sums, whatever the depth.

    seconds(first, last) = prefix[last] - prefix[first]        4 pieces of 2, 3, 3, 5 s: prefix 0, 2, 5, 8, 13; pieces 1 and 2: 8 - 2 = 6 s

A *copy policy* is one plan of the whole model on the mesh of a rank in which all copies of a block are equal, such as the best plan under
full recomputation. A stage may mix two policies if both pass on the residual stream in the same placements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner_core.core import BlockPlan, Graph, Pipeline, PipelineAxis
from planner_core.cost import (
    CostModel,
    Ends,
    Floats,
    boundary_states,
    pipe_link,
    stage_costs,
    stage_memories,
    stage_plans,
    tied_seconds,
)


@dataclass(frozen=True, slots=True)
class CopyPolicy:
    """The cost of every piece under one policy. Arrays have one entry for each piece.

    Attributes:
        name: The recomputation and the share of memory it was searched with.
        blocks: The plan of the whole model.
        forward_s: Forward of a micro-batch.
        backward_s: Backward of a micro-batch.
        gather_s: Exposed gathers before the first forward of a step.
        reduce_s: Exposed sums of gradients after the last backward of a step.
        step_s: Work once a step, such as the optimizer.
        send_s: Sends to the next piece and back, for a micro-batch.
        state_bytes: Weights, gradients and optimizer states.
        activation_bytes: Activations of one micro-batch in flight, without those sent.
        sent_bytes: The boundary tensors of one micro-batch.
        passing_bytes: The highest moment of a pass, above states and activations.
        stage_s: Seconds once a step of any stage, outside of its pieces.
        boundary: Placements of the tensors between two pieces.
        kinds: Equal for equal pieces.
    """

    name: str
    blocks: Mapping[str, BlockPlan]
    forward_s: Floats
    backward_s: Floats
    gather_s: Floats
    reduce_s: Floats
    step_s: Floats
    send_s: Floats
    state_bytes: Floats
    activation_bytes: Floats
    sent_bytes: Floats
    passing_bytes: Floats
    stage_s: float
    boundary: tuple[object, ...]
    kinds: tuple[object, ...]

    @property
    def micro_batch_s(self) -> Floats:
        """Forward and backward of a micro-batch."""
        return self.forward_s + self.backward_s


def policy_from_plan(
    name: str, blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel, ends: Ends, pipe: PipelineAxis
) -> CopyPolicy:
    """Price the pieces of a plan of the whole model, on the mesh of one rank of a pipeline along `pipe`."""
    calls = sum(graph.num_repeats.values())
    # Each piece is priced as a stage by itself, so that sums over pieces are the price of any stage, but for what stages add.
    pieces = stage_plans(blocks, graph, Pipeline(calls, "1f1b", (1,) * calls))
    link = pipe_link(model.cluster, model.mesh, pipe)
    costs = stage_costs(pieces, model, ends, link)
    step_s = np.array([c.step_s for c in costs])
    if calls > 1:
        # Whatever the cut, the first stage has the embedding and the last one the head. If they are tied both sum its gradient, so
        # copies move from these stages to others.
        tied = tied_seconds((pieces[0], pieces[-1]), model, link)
        step_s[[0, -1]] += tied[0], tied[1]
    memories = stage_memories(pieces, model)
    grads = np.array([m.state.grads for m in memories], dtype=float)
    states = np.array([m.state.params + m.state.moments - graph.buffer_bytes for m in memories], dtype=float)
    # What passes through several pieces is received once by their stage, not by each. The walk of the priced plan counts it.
    activations = np.array([m.of.kept - m.of.received for m in memories], dtype=float)
    peak = np.array(
        [max(m.of.forward.total, m.of.backward.total - m.sent) - m.of.received for m in memories], dtype=float
    )
    boundary = tuple(tuple(str(s) for s in boundary_states(p).values()) for p in pieces[1:])
    return CopyPolicy(
        name=name,
        blocks=blocks,
        forward_s=np.array([c.forward_s for c in costs]),
        backward_s=np.array([c.backward_s for c in costs]),
        gather_s=np.array([c.first_s for c in costs]),
        reduce_s=np.array([c.last_s for c in costs]),
        # The seconds outside of the GPU's work are once a stage, not once a piece: `stage_s` adds them.
        step_s=step_s - model.software.outside_s,
        # The results go on, and their gradient comes back the same way.
        send_s=2 * np.array([c.send_s for c in costs]),
        state_bytes=states + grads,
        activation_bytes=activations,
        sent_bytes=np.array([m.sent for m in memories], dtype=float),
        # States and activations are sums over pieces. What is left of a piece's peak is not: a range has the highest of its pieces.
        passing_bytes=np.maximum(0.0, peak - activations),
        stage_s=model.software.outside_s,
        boundary=boundary,
        kinds=tuple(p.key for p in pieces),
    )


@dataclass(frozen=True, slots=True)
class PolicyMix:
    """The policies of a range of pieces, by their numbers: the last `num_slow` pieces use `slow`, those before them `fast`."""

    fast: int
    slow: int
    num_slow: int = 0


class RangeCosts:
    """The least seconds of any range of pieces within a budget, for a number of micro-batches."""

    def __init__(self, policies: list[CopyPolicy], micro_batches: int, budget: float) -> None:
        self.policies, self.micro_batches, self.budget = policies, micro_batches, budget
        self.sums = [_PrefixSums(policy) for policy in policies]
        kinds = policies[0].kinds
        self.kinds = [kinds.index(k) for k in kinds]
        self.changes = np.concatenate([[0], np.cumsum(np.diff(self.kinds) != 0)])
        self.results: dict[tuple[object, ...], tuple[float, float, PolicyMix] | None] = {}

    def best(self, first: int, last: int, in_flight: int) -> tuple[float, float, PolicyMix] | None:
        """Return the cheapest mix of policies of a range that fits: (own seconds of a step, seconds a micro-batch delays later stages,
        mix).

        `in_flight`: micro-batches in flight. Ranges of equal pieces share one result, so a deep model costs no more than a short one."""
        second = min(first + 1, last - 1)
        # If no kind changes from the second piece to the last but one, they are all of one kind, and its name replaces the position.
        uniform = self.changes[max(second, last - 2)] == self.changes[second]
        inner = (self.kinds[second],) if uniform else (first, last)
        # `first == 0`: the first range alone waits for its gathers (`_seconds`).
        key = last - first, first == 0, self.kinds[first], inner, self.kinds[last - 1], in_flight
        if key not in self.results:
            self.results[key] = self._find_best(first, last, in_flight)
        return self.results[key]

    def _find_best(self, first: int, last: int, in_flight: int) -> tuple[float, float, PolicyMix] | None:
        best: tuple[float, float, PolicyMix] | None = None
        for fast in range(len(self.policies)):
            for slow in range(fast, len(self.policies)):
                mix = self._cheapest_mix(first, last, in_flight, fast, slow)
                if mix is not None and (best is None or mix[0] < best[0]):
                    best = mix
            if best and not best[2].num_slow and best[2].fast == fast:
                break  # policies are sorted by time, so none after one that fits alone is quicker
        return best

    def _cheapest_mix(
        self, first: int, last: int, in_flight: int, fast: int, slow: int
    ) -> tuple[float, float, PolicyMix] | None:
        """Return the mix of two policies with the fewest pieces in the slower one that fits."""
        for num_slow in range(last - first + 1) if slow != fast else (0,):
            mix = PolicyMix(fast, slow, num_slow)
            if self._bytes(first, last, in_flight, mix) <= self.budget:
                return *self._seconds(first, last, mix), mix
        return None

    def _bytes(self, first: int, last: int, in_flight: int, mix: PolicyMix) -> float:
        fast, slow, middle = self.sums[mix.fast], self.sums[mix.slow], last - mix.num_slow
        resident = fast.resident_bytes(first, middle, in_flight) + slow.resident_bytes(middle, last, in_flight)
        passing = max(fast.passing_bytes(first, middle), slow.passing_bytes(middle, last))
        # Both policies send the same bytes, since only those with equal boundaries are mixed.
        return resident + passing + in_flight * float(self.policies[mix.fast].sent_bytes[last - 1])

    def _seconds(self, first: int, last: int, mix: PolicyMix) -> tuple[float, float]:
        """(seconds of the range in a step, seconds from a micro-batch's arrival to the next stage)."""
        policy, middle = self.policies[mix.fast], last - mix.num_slow
        times = self.sums[mix.fast].seconds(first, middle) + self.sums[mix.slow].seconds(middle, last)
        forward_s, backward_s, gather_s, reduce_s, step_s = times
        micro_batch_s = forward_s + backward_s
        gather_s = 0.0 if first else gather_s  # later stages gather while they wait for their first micro-batch
        own_s = self.micro_batches * micro_batch_s + gather_s + reduce_s + step_s + policy.stage_s
        return own_s, micro_batch_s + float(policy.send_s[last - 1])


class _PrefixSums:
    """Prefix sums over the pieces of one policy: [5, pieces + 1] seconds and [2, pieces + 1] bytes."""

    def __init__(self, policy: CopyPolicy) -> None:
        self.policy = policy
        times = [policy.forward_s, policy.backward_s, policy.gather_s, policy.reduce_s, policy.step_s]
        memory = [policy.state_bytes, policy.activation_bytes]
        # The leading 0 makes `prefix[last] - prefix[first]` hold for first = 0 too.
        self.times = np.concatenate([np.zeros((5, 1)), np.cumsum(times, axis=1)], axis=1)
        self.memory = np.concatenate([np.zeros((2, 1)), np.cumsum(memory, axis=1)], axis=1)

    def seconds(self, first: int, last: int) -> Floats:
        """Return the five times of a range: forward and backward of a micro-batch, gathers, sums of gradients, and once a step."""
        times: Floats = self.times[:, last] - self.times[:, first]
        return times

    def resident_bytes(self, first: int, last: int, in_flight: int) -> float:
        """States, and activations of the micro-batches in flight."""
        states, activations = self.memory[:, last] - self.memory[:, first]
        return float(states + in_flight * activations)

    def passing_bytes(self, first: int, last: int) -> float:
        """Return the highest passing moment of a range; 0 if it is empty."""
        return float(self.policy.passing_bytes[first:last].max()) if last > first else 0.0
