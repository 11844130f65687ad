"""How the ops and parameters of a block run and lie: the edges between states, and the copies that share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from planner_core.core.placement import Partial, Placements, Shard, State, Step, shortest_steps


@dataclass(frozen=True, slots=True)
class Edge:
    """The redistribution of one tensor from state `src` to state `dst`. `forward` and `backward` are its steps, in order.

    `segments` maps a tensor dim to the sizes of its fused parts (q, k, v in one projection). A shard of that dim holds an equal part
    of each of them. `chunks`: the number of parts of its last dim in which a product makes the tensor. The collective of one part runs
    while the next part is computed (ATP, section 3.4).
    """

    src: State
    dst: State
    forward: tuple[Step, ...] = ()
    backward: tuple[Step, ...] = ()
    segments: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    chunks: int = 1


@dataclass(frozen=True, slots=True)
class SitePlan:
    """How one op runs: an edge for each tensor operand and each result, in order of the call."""

    inputs: tuple[Edge, ...]
    outputs: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class ParamPlan:
    """The placements of one parameter's three forms, one of each per mesh axis.

    `stored`: the parameter as the optimizer, a checkpoint and the user see it (master weights and moments). `working`: the copy in
    compute dtype that is kept between uses. `gradient`: the gradient that accumulates over micro-batches. If it is Partial, each
    device keeps its term, and the terms are reduced to `stored` once a step. On an axis on which every device uses the whole weight:

        data parallel   stored R, working R, gradient P       ZeRO-2   stored S, working R, gradient S
        ZeRO-1          stored S, working R, gradient P       ZeRO-3   stored S, working S, gradient S

    `gathered`: the axes on which the working copy is sharded but used whole. It is gathered at use, freed, and gathered again for
    backward.
    `refresh`: the steps from `stored` to `working`, and `reduce`: those from `gradient` to `stored`. Both are taken once a step. None:
    the steps of `shortest_steps`.
    `trained`: whether the loss sends it a gradient. If not, it is kept in compute dtype.
    """

    stored: Placements
    working: Placements
    gradient: Placements
    gathered: tuple[int, ...] = ()
    segments: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    refresh: tuple[Step, ...] | None = None
    reduce: tuple[Step, ...] | None = None
    trained: bool = True

    def refresh_steps(self) -> tuple[Step, ...]:
        """Steps that make the working copy, once a step."""
        return shortest_steps(self.stored, self.working) if self.refresh is None else self.refresh

    def reduce_steps(self) -> tuple[Step, ...]:
        """Steps that bring the accumulated gradient to the stored parameter, once a step."""
        return shortest_steps(self.gradient, self.stored) if self.reduce is None else self.reduce

    @property
    def once_gathered_axes(self) -> tuple[int, ...]:
        """Mesh axes on which the working copy is whole though the parameter is stored in parts (ZeRO-1, ZeRO-2)."""
        parts = enumerate(zip(self.stored, self.working, strict=True))
        return tuple(a for a, (s, w) in parts if isinstance(s, Shard) and not isinstance(w, Shard))

    @property
    def reduced_axes(self) -> tuple[int, ...]:
        """The mesh axes over which the gradient's terms are reduced once a step."""
        return tuple(a for a, p in enumerate(self.gradient) if p == Partial())


class BlockLabel(NamedTuple):
    """The key of a block in a plan: the block's name in the graph, and the number of the variant that some of its copies run as.

    A plan file holds it as text: `Block`, `Block#1`, `Block#2`; "" is the top block. Text is parsed and written here alone.
    """

    block: str
    variant: int = 0

    @classmethod
    def parse(cls, text: str) -> BlockLabel:
        """Return the label of a text, as `Block#1`. No text fails; one that is not a label does not come back from `str`."""
        block, _, variant = text.partition("#")
        return cls(block, int(variant) if variant.isdecimal() else 0)

    def __str__(self) -> str:
        return f"{self.block}#{self.variant}" if self.variant else self.block


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """One way to run a block, and the copies that run so, by the prefixes of their parameter names. The top block has the prefix "".

    `recompute` says what is recomputed in backward: "none", "full", or a policy that keeps the results of the ops in `kept`.
    """

    prefixes: tuple[str, ...]
    params: Mapping[str, ParamPlan]
    sites: Mapping[str, SitePlan]
    recompute: str = "none"
    kept: tuple[str, ...] = ()
