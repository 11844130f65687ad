"""What each copy of a model takes as a part of a stage: seconds of a micro-batch and bytes, for each way to run the copies.

The model is cut into *pieces*: a copy of a repeated block with what stands behind it (the first also has what stands before it). The
seconds and bytes of a stage are sums over its pieces, but for the largest passing moment, which is a maximum. So those of any range
follow from running sums, whatever the depth.

A *way* is one plan of the whole model on the mesh of a rank, in which all copies of a block are equal: one for each policy of
recomputation. Copies of ways that hand on the residual stream in the same placements can be mixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner_core.core import BlockPlan, Graph, Pipeline
from planner_core.cost import CostModel, Ends, boundary_states, pipe_link, stage_costs, stage_memories, stage_plans

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run every piece. `blocks`: the plan of the whole model. The arrays have a number for each piece: `each` seconds of a
    micro-batch, forward and backward; `first` and `last` what gathers before the
    first forward and sums behind the last backward take more than compute hides; `step` seconds once a step; `sends`
    there and back to the next piece; `standing` bytes of weights, gradients and states; `kept` bytes of a micro-batch in flight; `sent`
    those of what is handed on; `passing` bytes at the highest moment beside these. `fixed`: seconds once a step of any stage.
    `handed_on`: how the tensors between two pieces lie. `kinds`: equal for pieces that are alike."""

    name: str
    blocks: Mapping[str, BlockPlan]
    each: Floats
    first: Floats
    last: Floats
    step: Floats
    sends: Floats
    standing: Floats
    kept: Floats
    sent: Floats
    passing: Floats
    fixed: float
    handed_on: tuple[object, ...]
    kinds: tuple[object, ...]


def way_of(name: str, blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel, ends: Ends, ranks: int) -> Way:
    """The pieces of a plan of the whole model on the mesh of one of the `ranks` of a pipeline."""
    calls = sum(graph.num_repeats.values())
    pieces = stage_plans(blocks, graph, Pipeline(calls, "1f1b", (1,) * calls))
    costs = stage_costs(pieces, model, ends, pipe_link(model.cluster, model.mesh, ranks))
    memories = stage_memories(pieces, model)
    grads = np.array([m.state.grads for m in memories], dtype=float)
    standing = np.array([m.state.params + m.state.moments - graph.buffer_bytes for m in memories], dtype=float)
    kept = np.array([m.kept - m.sent for m in memories], dtype=float)
    peak = np.array([max(m.forward.total, m.backward.total) for m in memories], dtype=float)
    states = tuple(tuple(str(s) for s in boundary_states(p).values()) for p in pieces[1:])
    return Way(
        name=name,
        blocks=blocks,
        each=np.array([c.forward_s + c.backward_s for c in costs]),
        first=np.array([c.first_s for c in costs]),
        last=np.array([c.last_s for c in costs]),
        step=np.array([c.step_s for c in costs]) - model.software.outside_s,
        sends=2 * np.array([c.send_s for c in costs]),
        standing=standing + grads,
        kept=kept,
        sent=np.array([m.sent for m in memories], dtype=float),
        passing=np.maximum(0.0, peak - grads - kept),
        fixed=model.software.outside_s,
        handed_on=states,
        kinds=tuple(p.key for p in pieces),
    )


@dataclass(frozen=True, slots=True)
class Range:
    """The pieces from `first` to `last` (not included), the last `slow` of them in the slower of two ways, by their numbers."""

    fast: int
    slow: int
    of_slow: int = 0


class Ranges:
    """The least seconds of any range of pieces within a budget, for so many micro-batches."""

    def __init__(self, ways: list[Way], micro_batches: int, budget: float) -> None:
        self.ways, self.micro_batches, self.budget = ways, micro_batches, budget
        self.sums = [_Sums(way) for way in ways]
        kinds = ways[0].kinds
        self.kinds = [kinds.index(k) for k in kinds]
        self.changes = np.concatenate([[0], np.cumsum(np.diff(self.kinds) != 0)])
        self.known: dict[tuple[object, ...], tuple[float, float, Range] | None] = {}

    def best(self, first: int, last: int, in_flight: int) -> tuple[float, float, Range] | None:
        """`_best`, worked out once for ranges of as many equal pieces."""
        second = min(first + 1, last - 1)
        # All pieces between the first and the last are of one kind where no kind changes between the second and the one before the last.
        plain = self.changes[max(second, last - 2)] == self.changes[second]
        inner = (self.kinds[second],) if plain else (first, last)
        key = last - first, first == 0, self.kinds[first], inner, self.kinds[last - 1], in_flight
        if key not in self.known:
            self.known[key] = self._best(first, last, in_flight)
        return self.known[key]

    def _best(self, first: int, last: int, in_flight: int) -> tuple[float, float, Range] | None:
        """(own seconds, seconds for which the stages behind wait, the ways): of the quickest way or mixture of two that fits while so
        many micro-batches are in flight."""
        found: tuple[float, float, Range] | None = None
        for fast in range(len(self.ways)):
            for slow in range(fast, len(self.ways)):
                mixed = self._mixed(first, last, in_flight, fast, slow)
                if mixed is not None and (found is None or mixed[0] < found[0]):
                    found = mixed
            if found and not found[2].of_slow and found[2].fast == fast:
                break  # the quickest way fits by itself
        return found

    def fit(self, ranges: Iterable[tuple[int, int, int]], way: int) -> bool:
        """Whether stages of one rank fit together, all in one way: (first piece, the one behind the last, micro-batches in flight)."""
        one, total, passing = self.sums[way], 0.0, 0.0
        for first, last, n in ranges:
            total += one.held(first, last, n) + n * float(self.ways[way].sent[last - 1])
            passing = max(passing, one.passing(first, last))
        return total + passing <= self.budget

    def _mixed(self, first: int, last: int, n: int, fast: int, slow: int) -> tuple[float, float, Range] | None:
        """The range with as few pieces in the slower way as fit."""
        for count in range(last - first + 1) if slow != fast else (0,):
            if self._bytes(first, last, n, fast, slow, count) <= self.budget:
                own, through = self._seconds(first, last, fast, slow, count)
                return own, through, Range(fast, slow, count)
        return None

    def _bytes(self, first: int, last: int, n: int, fast: int, slow: int, count: int) -> float:
        a, b, middle = self.sums[fast], self.sums[slow], last - count
        held = a.held(first, middle, n) + b.held(middle, last, n)
        passing = max(a.passing(first, middle), b.passing(middle, last))
        return held + passing + n * float(self.ways[fast].sent[last - 1])

    def _seconds(self, first: int, last: int, fast: int, slow: int, count: int) -> tuple[float, float]:
        a, b, middle = self.sums[fast], self.sums[slow], last - count
        each, gathers, sums, step = a.seconds(first, middle) + b.seconds(middle, last)
        gathers = 0.0 if first else gathers  # later stages wait for their first micro-batch meanwhile
        send = float(self.ways[fast].sends[last - 1])
        return self.micro_batches * each + gathers + sums + step + self.ways[fast].fixed, each + send


class _Sums:
    """Running sums over the pieces of one way."""

    def __init__(self, way: Way) -> None:
        self.way = way
        parts = [way.each, way.first, way.last, way.step]
        self.time = np.concatenate([np.zeros((4, 1)), np.cumsum(parts, axis=1)], axis=1)
        self.memory = np.concatenate([np.zeros((2, 1)), np.cumsum([way.standing, way.kept], axis=1)], axis=1)

    def seconds(self, first: int, last: int) -> Floats:
        found: Floats = self.time[:, last] - self.time[:, first]
        return found

    def held(self, first: int, last: int, n: int) -> float:
        standing, kept = self.memory[:, last] - self.memory[:, first]
        return float(standing + n * kept)

    def passing(self, first: int, last: int) -> float:
        return float(self.way.passing[first:last].max()) if last > first else 0.0
