"""The papers' methods as restrictions of the one space."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner_core.core import Graph, Shard
from planner_core.cost import block_of
from planner_core.ops import FLOPS_BOUND_KINDS, operator
from planner_core.planning.methods.restrictions import residual_shapes
from planner_core.search.network import Network, Restriction, allow_only, tensor_name


@dataclass
class SplitWeights(Restriction):
    """ATP's space: every matrix of a repeated block is sharded on every axis. What passes between blocks is Replicate or sharded by
    features, but not by batch or tokens."""

    graph: Graph

    def apply(self, block: str, net: Network) -> None:
        """Add a factor that forbids the other states."""
        stream = residual_shapes(self.graph)
        for number, value, states in net.placed_values(block_of(self.graph, block)):
            last = len(value.meta.shape) - 1
            if value.kind == "parameter":
                good = [isinstance(p, Shard) or last < 1 or not block for p, *_ in states.axis_states]
            elif value.meta.shape in stream:
                good = [not isinstance(p, Shard) or p.dim == last for p, *_ in states.axis_states]
            else:
                continue
            ok = np.ones(len(states), dtype=bool)
            for axis in range(states.index.shape[1]):
                ok &= np.array(good, dtype=bool)[states.index[:, axis]]
            net.factors.append(allow_only(tensor_name(number), ok))


@dataclass
class SplitWork(Restriction):
    """Alpa's space for operators (its section 4.2): on no axis do two GPUs compute the same product. Lighter operators may be computed by
    all. A product that cannot be split on every axis may be computed in any way."""

    graph: Graph

    def apply(self, block: str, net: Network) -> None:
        """Add a factor that forbids the other rows."""
        for name, node in net.nodes.items():
            s = node.strategy
            heavy = [i for i, op in enumerate(s.ops) if operator(op.fn).kind in FLOPS_BOUND_KINDS]
            split = np.array([all(row[i].splits_work for i in heavy) for row in s.rows], dtype=bool)
            ok = np.asarray(split[node.index].all(axis=1))
            # A product whose dims do not divide the axes keeps all its rows: without them the model would have no plan at all.
            if heavy and ok.any():
                net.factors.append(allow_only(name, ok))
