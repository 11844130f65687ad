"""The papers' methods as restrictions of the one space."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner_core.core import DeviceMesh, Graph, Shard
from planner_core.planning.methods.restrictions import residual_shapes
from planner_core.search.network import Network, Restriction, only


@dataclass
class SplitWeights(Restriction):
    """ATP's space: every matrix of a repeated block is sharded on every axis. What passes between blocks is Replicate or sharded by
    features, but not by batch or tokens."""

    graph: Graph

    def apply(self, block: str, net: Network) -> None:
        """Add a factor that forbids the other states."""
        where = self.graph.blocks[block] if block else self.graph.top
        for name, states in net.tensors.items():
            index = int(name[1:])
            value = where.values[index]
            last = len(value.meta.shape) - 1
            if value.kind == "parameter":
                good = [isinstance(p, Shard) or last < 1 or not block for p, *_ in states.pairs]
            elif value.meta.shape in residual_shapes(self.graph):
                good = [not isinstance(p, Shard) or p.dim == last for p, *_ in states.pairs]
            else:
                continue
            ok = np.ones(len(states), dtype=bool)
            for axis in range(states.index.shape[1]):
                ok &= np.array(good, dtype=bool)[states.index[:, axis]]
            net.factors.append(only(name, ok))


def atp(graph: Graph, mesh: DeviceMesh) -> Restriction | None:
    """ATP's space (see `SplitWeights`), on any mesh."""
    return SplitWeights(graph)
