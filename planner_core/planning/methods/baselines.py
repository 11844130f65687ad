"""Experts' layouts as restrictions of the one space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner_core.core import DeviceMesh, Graph
from planner_core.planning.methods.restrictions import (
    AxisRules,
    PairTest,
    batch_split,
    sequence_split,
    sharded,
    split_weight,
    summed,
    whole,
)
from planner_core.search.network import Restriction


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
    return AxisRules(graph, (batch_split,), (summed,))


def _fsdp(graph: Graph, mesh: DeviceMesh) -> Restriction | None:
    if len(mesh.axis_sizes) != 1:
        return None
    return AxisRules(graph, (batch_split,), (sharded,))


def _megatron(stream: PairTest) -> Callable[[Graph, DeviceMesh], Restriction | None]:
    def restrict(graph: Graph, mesh: DeviceMesh) -> Restriction | None:
        if len(mesh.axis_sizes) == 1:
            return AxisRules(graph, (stream,), (split_weight,))
        if len(mesh.axis_sizes) == 2:
            return AxisRules(graph, (batch_split, stream), (summed, split_weight))
        return None

    return restrict


BASELINES = (
    Baseline("data parallel", "data-parallel", _data_parallel, zero=0),
    Baseline("FSDP", "fsdp", _fsdp, zero=3),
    Baseline("Megatron-LM", "megatron", _megatron(whole), zero=0),
    Baseline("Megatron-LM + sequence parallel", "megatron-sp", _megatron(sequence_split), zero=0),
)
