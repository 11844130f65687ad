"""Baselines and the papers' methods as restrictions of one space: the same search, with states forbidden.

A restriction says which states the tensors and parameters of a block may take on each mesh axis. What it leaves
free is still chosen best, so a baseline is never worse than its author's plan under the same rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner_core.graph import Graph, Value
from planner_core.mesh import DeviceMesh
from planner_core.network import NUM_COMPONENTS, Factor, Network
from planner_core.placement import P, R, Shard
from planner_core.problem import Restriction
from planner_core.rules import Pair

PairTest = Callable[[Value, Pair], bool]


@dataclass
class AxisRules(Restriction):
    """Per mesh axis, a test of the state pairs of the residual stream and one of the parameters; `ends_only` leaves
    tensors of the stream's shape inside a block free (with sequence parallelism they are gathered there)."""

    graph: Graph
    activations: tuple[PairTest | None, ...]
    parameters: tuple[PairTest | None, ...]
    ends_only: bool = False

    def apply(self, block: str, net: Network) -> None:
        """Add a factor that forbids the states that fail a test."""
        where = self.graph.blocks[block] if block else self.graph.top
        stream = residual_shapes(self.graph)
        for name, states in net.tensors.items():
            index = int(name[1:])
            value = where.values[index]
            is_param = value.kind == "parameter"
            if not is_param and (value.meta.shape not in stream or (self.ends_only and index not in (*where.inputs, *where.outputs))):
                continue
            if is_param and index in where.inputs:
                continue
            tests = self.parameters if is_param else self.activations
            ok = np.ones(len(states), dtype=bool)
            for axis, test in enumerate(tests):
                if test is not None:
                    ok &= np.array([test(value, p) for p in states.pairs])[states.index[:, axis]]
            if ok.any():  # a tensor that no state passes (a small bias) keeps its freedom
                net.factors.append(Factor((name,), np.zeros((NUM_COMPONENTS, len(states))), ok))


def residual_shapes(graph: Graph) -> set[tuple[int, ...]]:
    """Shapes of the activations that pass between repeated blocks (of a model without any: every activation)."""
    found = {
        b.values[i].meta.shape
        for b in graph.blocks.values()
        for i in (*b.inputs, *b.outputs)
        if b.values[i].kind == "activation" and b.values[i].meta.shape[:1] == (graph.workload["batch"],)
    }
    return found or {v.meta.shape for v in graph.top.values if v.kind == "activation"}


def is_matrix(v: Value) -> bool:
    """Whether a parameter is a weight matrix (or a larger tensor) rather than a bias or a norm."""
    return len(v.meta.shape) >= 2


def batch_split(v: Value, pair: Pair) -> bool:
    """The first dim is split."""
    return pair[0] == Shard(0)


def whole(v: Value, pair: Pair) -> bool:
    """Whole (or a sum to be) on every device."""
    return pair[0] in (R, P)


def sequence_split(v: Value, pair: Pair) -> bool:
    """The second dim (tokens) is split."""
    return pair[0] == Shard(1)


def kept_whole(v: Value, pair: Pair) -> bool:
    """A parameter that is replicated."""
    return pair[0] == R


def sharded(v: Value, pair: Pair) -> bool:
    """A matrix that is sharded along this axis; anything goes for small parameters."""
    return isinstance(pair[0], Shard) or not is_matrix(v)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A named expert's plan: its restriction on a mesh, or None where the mesh does not suit it."""

    name: str
    method: str
    restrict: Callable[[Graph, DeviceMesh], Restriction | None]
    zero: int


def _data_parallel(graph: Graph, mesh: DeviceMesh) -> Restriction | None:
    if len(mesh.axis_sizes) != 1:
        return None
    return AxisRules(graph, (batch_split,), (kept_whole,))


def _fsdp(graph: Graph, mesh: DeviceMesh) -> Restriction | None:
    if len(mesh.axis_sizes) != 1:
        return None
    return AxisRules(graph, (batch_split,), (sharded,))


def _megatron(stream: PairTest, ends_only: bool = False) -> Callable[[Graph, DeviceMesh], Restriction | None]:
    def restrict(graph: Graph, mesh: DeviceMesh) -> Restriction | None:
        if len(mesh.axis_sizes) == 1:
            return AxisRules(graph, (stream,), (sharded,), ends_only)
        if len(mesh.axis_sizes) == 2:
            return AxisRules(graph, (batch_split, stream), (kept_whole, sharded), ends_only)
        return None

    return restrict


BASELINES = (
    Baseline("data parallel", "data-parallel", _data_parallel, zero=0),
    Baseline("FSDP", "fsdp", _fsdp, zero=3),
    Baseline("Megatron-LM", "megatron", _megatron(whole), zero=0),
    Baseline("Megatron-LM + sequence parallel", "megatron-sp", _megatron(sequence_split, ends_only=True), zero=0),
)


