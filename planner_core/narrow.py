"""Where exact elimination is too wide: fix what makes it so, and search the rest exactly.

A block whose weights are shared by all its copies (ALBERT's layer, Zamba's attention) has every weight at its boundary,
and the table over all of them has too many entries. `narrow` chooses the state of each shared weight as if a copy
had it for itself, forbids the others, and, where that is not enough, lets no tensor pass between blocks as a sum to be.
The plan is then the best of a smaller space, and is not called optimal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner_core.chain import scalar
from planner_core.coarsen import CoarseGraph
from planner_core.eliminate import TooWide, eliminate
from planner_core.graph import Block
from planner_core.placement import P
from planner_core.problem import Networks, Restriction, compile_network, ports
from planner_core.search import weights
from planner_core.states import Bools
from planner_core.tables import NUM_COMPONENTS, Factor, Network, tensor_name

NOTE = "weights shared by several layers are split as suits one layer by itself: the best plan of a smaller space, not proven to be optimal"


@dataclass
class Narrow(Restriction):
    """Another restriction, and the states that are left of some variables of each block."""

    inner: Restriction | None
    left: Mapping[tuple[str, str], Bools]

    def apply(self, block: str, net: Network) -> None:
        """Add a factor for each variable that was narrowed."""
        if self.inner is not None:
            self.inner.apply(block, net)
        net.factors += [_only(name, ok) for (where, name), ok in self.left.items() if where == block]


def narrow(networks: Networks, coarse: CoarseGraph, restrict: Restriction | None) -> Narrow:
    """What to forbid so that every block can be eliminated. Raises TooWide where even that is not enough."""
    found = Narrow(restrict, {})
    fixed: dict[int, int] = {}  # value of the top block -> its state
    for name, net in networks.blocks.items():
        block = coarse.graph.blocks[name]
        if _fits(_own(name, net, found), ports(block)):
            continue
        found = Narrow(restrict, {**found.left, **_plain(name, (*block.inputs, *block.outputs), block, net)})
        if _fits(_own(name, net, found), ports(block)):
            continue
        states = _shared_weights(name, block, _own(name, net, found), networks, coarse, fixed)
        masks = {(name, v): np.arange(net.sizes[v]) == s for v, s in states.items()}
        found = Narrow(restrict, {**found.left, **masks})
    top = networks.top
    masks = {("", tensor_name(o)): np.arange(top.sizes[tensor_name(o)]) == s for o, s in fixed.items() if tensor_name(o) in top.sizes}
    if not found.left:  # it is the top block
        masks = _plain("", range(len(coarse.graph.top.values)), coarse.graph.top, top)
    return Narrow(restrict, {**found.left, **masks})


def _own(name: str, net: Network, restrict: Restriction) -> Network:
    own = replace(net, factors=list(net.factors))
    restrict.apply(name, own)
    return own


def _fits(net: Network, keep: tuple[str, ...]) -> bool:
    try:
        compile_network(net, keep)
    except TooWide:
        return False
    return True


def _only(name: str, ok: Bools) -> Factor:
    return Factor((name,), np.zeros((NUM_COMPONENTS, len(ok))), ok)


def _plain(name: str, values: Iterable[int], block: Block, net: Network) -> dict[tuple[str, str], Bools]:
    """For activations: no state with a Partial, forward or of the gradient."""
    found: dict[tuple[str, str], Bools] = {}
    for value in dict.fromkeys(values):
        states = net.tensors.get(tensor_name(value))
        if states is None or block.values[value].kind != "activation":
            continue
        plain = np.array([P not in pair for pair in states.pairs])
        found[name, tensor_name(value)] = np.asarray(plain[states.index].all(axis=1))
    return found


def _shared_weights(
    name: str, block: Block, net: Network, networks: Networks, coarse: CoarseGraph, fixed: dict[int, int]
) -> dict[str, int]:
    """A state for each weight that the block is given, best for one copy that bears its share of their cost."""
    calls = [c for c in coarse.graph.calls() if c.block == name]
    given = [(p, v) for p, v in enumerate(block.inputs) if block.values[v].kind == "parameter"]
    for position, v in given:
        outer = [c.inputs[position] for c in calls]
        known = next((fixed[o] for o in outer if o in fixed), None)
        if known is not None:
            net.factors.append(_only(tensor_name(v), np.arange(net.sizes[tensor_name(v)]) == known))
        for f in networks.top.factors:
            if f.vars == (tensor_name(outer[0]),):
                net.factors.append(Factor((tensor_name(v),), f.cost / len(calls), f.allowed))
    shared = {tensor_name(v) for _, v in given}
    compiled = compile_network(net, tuple(k for k in ports(block) if k not in shared))
    link = eliminate(compiled.sizes, scalar(compiled.factors, weights("time")), compiled.sequence, compiled.keep)
    best = np.unravel_index(int(link.table.argmin()), link.table.shape) if link.kept else ()
    states = link.assignment({k: int(s) for k, s in zip(link.kept, best, strict=True)})
    found = {v: int(compiled.alive[v][states[v]]) for v in shared if v in states}
    for position, v in given:
        for c in calls:
            fixed.setdefault(c.inputs[position], found[tensor_name(v)])
    return found
