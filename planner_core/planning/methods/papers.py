"""The papers' methods as restrictions of the one space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner_core.core import DeviceMesh, Graph, Shard
from planner_core.planning.methods.restrictions import residual_shapes
from planner_core.search.network import NUM_COMPONENTS, Factor, Network, Restriction


@dataclass(frozen=True, slots=True)
class Lens:
    """A paper's search space and objective on this project's machinery.

    `by_volume` prices every axis alike (bytes, not seconds); `uniform` runs all copies of a block the same way;
    `zero` is the ZeRO stage that the space knows.
    """

    name: str
    objective: str
    says: str
    restrict: Callable[[Graph, DeviceMesh], Restriction | None]
    zero: int = 0
    uniform: bool = True
    by_volume: bool = False


def _anything(graph: Graph, mesh: DeviceMesh) -> Restriction | None:
    return Restriction()


@dataclass
class SplitWeights(Restriction):
    """ATP's space: every matrix of a repeated block is split on every axis, and what passes between blocks is whole or
    split by features, never by batch or tokens."""

    graph: Graph

    def apply(self, block: str, net: Network) -> None:
        """Add a factor that forbids the other states."""
        where = self.graph.blocks[block] if block else self.graph.top
        for name, states in net.tensors.items():
            index = int(name[1:])
            value = where.values[index]
            last = len(value.meta.shape) - 1
            if value.kind == "parameter":
                good = [isinstance(p, Shard) or last < 1 or not block for p, _ in states.pairs]
            elif value.meta.shape in residual_shapes(self.graph):
                good = [not isinstance(p, Shard) or p.dim == last for p, _ in states.pairs]
            else:
                continue
            ok = np.ones(len(states), dtype=bool)
            for axis in range(states.index.shape[1]):
                ok &= np.array(good, dtype=bool)[states.index[:, axis]]
            net.factors.append(Factor((name,), np.zeros((NUM_COMPONENTS, len(states))), ok))


def _atp(graph: Graph, mesh: DeviceMesh) -> Restriction | None:
    return SplitWeights(graph)


LENSES = {
    lens.name: lens
    for lens in (
        Lens("tap", "communication", "TAP: least volume, weights kept, one plan per unique block", _anything, by_volume=True),
        Lens("taps", "communication", "TAPS: least communication time, weights kept, one plan per unique block", _anything),
        Lens("atp", "communication", "ATP: every matrix split over a 2-D mesh, row- or column-first", _atp),
    )
}  # fmt: skip
