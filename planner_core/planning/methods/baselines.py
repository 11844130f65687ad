"""Usual layouts as restrictions of the one space: data parallelism, FSDP and Megatron-LM."""

from __future__ import annotations

from planner_core.core import DeviceMesh, Graph
from planner_core.planning.methods.method import Restrict
from planner_core.planning.methods.restrictions import (
    AxisRules,
    PairTest,
    batch_split,
    sharded,
    summed,
    summed_once,
    used_in_parts,
)
from planner_core.search.network import Restriction


def data_parallel(graph: Graph, mesh: DeviceMesh) -> Restriction | None:
    """The batch is sharded over all GPUs. Every weight is Replicate, and its gradient is summed."""
    return AxisRules(graph, (batch_split,), (summed,), ranks=mesh.num_devices) if len(mesh.axis_sizes) == 1 else None


def fsdp(graph: Graph, mesh: DeviceMesh) -> Restriction | None:
    """The batch is sharded over all GPUs, and so is every weight matrix."""
    return AxisRules(graph, (batch_split,), (sharded,), ranks=mesh.num_devices) if len(mesh.axis_sizes) == 1 else None


def megatron(stream: PairTest) -> Restrict:
    """Products are sharded over the last mesh axis, where the residual stream passes the test `stream`. The first of two axes shards
    the batch. On it the optimizer states may be sharded, as Megatron-LM's distributed optimizer does (ZeRO-1)."""

    def restrict(graph: Graph, mesh: DeviceMesh) -> Restriction | None:
        if len(mesh.axis_sizes) == 1:
            return AxisRules(graph, (stream,), (used_in_parts,))
        if len(mesh.axis_sizes) == 2:
            return AxisRules(graph, (batch_split, stream), (summed_once, used_in_parts), ranks=mesh.axis_sizes[0])
        return None

    return restrict
