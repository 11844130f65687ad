"""The redistributions (moves) of a program. Each pair (steps of a tensor, steps of its gradient) has a name and one definition."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from planner_core.core import Edge, Placements, Shard, Step, numbered_names
from planner_core.runtime.program.collectives import Segments, step_kind
from planner_core.runtime.write.syntax import assign, make_call, path

SHORT_NAMES = {
    "all_gather": "gather",
    "all_reduce": "all_reduce",
    "reduce_scatter": "scatter",
    "all_to_all": "exchange",
}
CONSTRUCTORS = {"slice": "shard"}


def split_weight_steps(
    edge: Edge, forward_steps: Sequence[Step], backward_steps: Sequence[Step]
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return the steps of a weight's edge that are taken outside of the function, where they can be bucketed and issued early.

    These are the first steps forward, up to the last one that communicates, and the last steps of the gradient, from where it
    has the weight's own shape. Axes of one rank have no steps.
    """
    axes = sorted({step.axis for step in (*forward_steps, *backward_steps)})
    # Outside, a gradient must be in the shards of the tensor there. If none of its steps leads to those of the gathered weight, the weight
    # is gathered inside, and its gradient may still come out in the weight's own shards.
    for gather in (count_to_last_collective(forward_steps), 0):
        placements = edge.src.forward
        for step in forward_steps[:gather]:
            placements = _placements_after(placements, step)
        gradient = edge.dst.gradient
        for number in range(len(backward_steps) + 1):
            if _sharded_dims(gradient, axes) == _sharded_dims(placements, axes):
                return tuple(forward_steps[:gather]), tuple(backward_steps[number:])
            if number < len(backward_steps):
                gradient = _placements_after(gradient, backward_steps[number])
    return (), ()


def count_to_last_collective(steps: Sequence[Step]) -> int:
    """Return the number of steps up to and including the last one that communicates."""
    return max((i + 1 for i, s in enumerate(steps) if s.collective), default=0)


def _placements_after(placements: Placements, step: Step) -> Placements:
    return (*placements[: step.axis], step.dst, *placements[step.axis + 1 :])


def _sharded_dims(placements: Placements, axes: Sequence[int]) -> tuple[int | None, ...]:
    return tuple(p.dim if isinstance(p := placements[axis], Shard) else None for axis in axes)


StepsKey = tuple[tuple[str, int, tuple[int, ...]], ...]
"""Steps as code writes them: of each the function, the axis and the dims. Steps that are written alike are one move."""


class MoveTable:
    """Names and definitions of moves. `sizes` and `names` are those of the mesh axes."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        self.names, self.sizes = [n.upper() for n in names], sizes
        self.taken = frozenset(self.names)
        self.defined: dict[tuple[StepsKey, StepsKey, tuple[Any, ...]], str] = {}
        self.products: dict[tuple[StepsKey, StepsKey, int], str] = {}

    def axis(self, axis: int) -> str:
        """Return the name of a mesh axis in the code."""
        return self.names[axis]

    def real(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """Return the steps on axes of more than one rank."""
        return tuple(s for s in steps if self.sizes[s.axis] > 1)

    def apply(self, value: ast.expr, forward: Sequence[Step], backward: Sequence[Step], segments: Segments) -> ast.expr:
        """Write a tensor after a move; the same node if there is none."""
        forward_steps, backward_steps = self.real(forward), self.real(backward)
        if not forward_steps and not backward_steps:
            return value
        return make_call(self.name(forward_steps, backward_steps, segments), value)

    def name(self, forward: Sequence[Step], backward: Sequence[Step], segments: Segments) -> str:
        """Return the name of a move. The first call defines it."""
        dims = {s.src.dim for s in (*forward, *backward) if isinstance(s.src, Shard)}
        dims |= {s.dst.dim for s in (*forward, *backward) if isinstance(s.dst, Shard)}
        fused = {d: tuple(v) for d, v in segments.items() if d in dims and len(v) > 1}
        key = (_steps_key(forward), _steps_key(backward), tuple(fused.items()))
        if key not in self.defined:
            base = f"{_describe_steps(forward)}_back_{_describe_steps(backward)}"
            self.defined[key] = _free_name(base, self.defined.values())
        return self.defined[key]

    def product(self, forward: Sequence[Step], backward: Sequence[Step], chunks: int) -> str:
        """Return the name of a product in chunks whose result is moved. The first call defines it."""
        forward_steps, backward_steps = self.real(forward), self.real(backward)
        key = (_steps_key(forward_steps), _steps_key(backward_steps), chunks)
        if key not in self.products:
            base = f"product_{_describe_steps(forward_steps)}_in_{chunks}_back_{_describe_steps(backward_steps)}"
            self.products[key] = _free_name(base, self.products.values())
        return self.products[key]

    def definitions(self) -> list[ast.stmt]:
        """Write one statement for each move, and for each kind of product in chunks."""
        moves = [
            self._write_definition(name, "move", forward, backward, {"segments": dict(fused)} if fused else {})
            for (forward, backward, fused), name in self.defined.items()
        ]
        return moves + [
            self._write_definition(name, "chunked", forward, backward, {"chunks": chunks})
            for (forward, backward, chunks), name in self.products.items()
        ]

    def _write_definition(
        self, name: str, function: str, forward: StepsKey, backward: StepsKey, options: Mapping[str, Any]
    ) -> ast.stmt:
        """Write `name = function([all_gather(TENSOR, 1)], backward=[...])`."""
        steps, gradient_steps = (
            [make_call(constructor, path(self.axis(axis)), *dims) for constructor, axis, dims in key]
            for key in (forward, backward)
        )
        return assign(name, make_call(function, steps, backward=gradient_steps, **options))


def _steps_key(steps: Sequence[Step]) -> StepsKey:
    kinds = (step_kind(s) for s in steps)
    dims = (tuple(p.dim for p in (s.src, s.dst) if isinstance(p, Shard)) for s in steps)
    return tuple((CONSTRUCTORS.get(k, k), s.axis, d) for s, k, d in zip(steps, kinds, dims, strict=True))


def _free_name(base: str, taken: Collection[str]) -> str:
    """Return the name, with a number from 2 on if it is taken: moves along other axes or dims are described alike."""
    return next(name for name in numbered_names(base, "_") if name not in taken)


def _describe_steps(steps: Sequence[Step]) -> str:
    return "_".join(SHORT_NAMES.get(step_kind(s), step_kind(s)) for s in steps) or "same"
