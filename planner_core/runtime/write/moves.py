"""The redistributions (moves) of a program. Each pair (steps of a tensor, steps of its gradient) has a name and one definition."""

from __future__ import annotations

from collections.abc import Sequence

from planner_core.core import Edge, Placements, Shard, Step
from planner_core.runtime.program.collectives import Segments, step_kind

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


class MoveTable:
    """Names and definitions of moves. `sizes` and `names` are those of the mesh axes."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        self.names, self.sizes = [n.upper() for n in names], sizes
        self.taken = frozenset(self.names)
        self.defined: dict[tuple[str, str, str], str] = {}
        self.products: dict[tuple[str, str, int], str] = {}

    def axis(self, axis: int) -> str:
        """Return the name of a mesh axis in the code."""
        return self.names[axis]

    def real(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """Return the steps on axes of more than one rank."""
        return tuple(s for s in steps if self.sizes[s.axis] > 1)

    def apply(self, text: str, forward: Sequence[Step], backward: Sequence[Step], segments: Segments) -> str:
        """Write a tensor after a move."""
        forward_steps, backward_steps = self.real(forward), self.real(backward)
        return (
            text
            if not forward_steps and not backward_steps
            else f"{self.name(forward_steps, backward_steps, segments)}({text})"
        )

    def name(self, forward: Sequence[Step], backward: Sequence[Step], segments: Segments) -> str:
        """Return the name of a move. The first call defines it."""
        dims = {s.src.dim for s in (*forward, *backward) if isinstance(s.src, Shard)}
        dims |= {s.dst.dim for s in (*forward, *backward) if isinstance(s.dst, Shard)}
        fused = {d: tuple(v) for d, v in segments.items() if d in dims and len(v) > 1}
        key = (self.steps(forward), self.steps(backward), str(fused) if fused else "")
        if key not in self.defined:
            base = f"{_describe_steps(forward)}_back_{_describe_steps(backward)}"
            name, count = base, 1
            while name in self.defined.values():
                count += 1
                name = f"{base}_{count}"
            self.defined[key] = name
        return self.defined[key]

    def product(self, forward: Sequence[Step], backward: Sequence[Step], chunks: int) -> str:
        """Return the name of a product in chunks whose result is moved. The first call defines it."""
        forward_steps, backward_steps = self.real(forward), self.real(backward)
        name = f"product_{_describe_steps(forward_steps)}_in_{chunks}_back_{_describe_steps(backward_steps)}"
        count = sum(one.startswith(name) for one in self.products.values())
        return self.products.setdefault(
            (self.steps(forward_steps), self.steps(backward_steps), chunks), f"{name}_{count + 1}" if count else name
        )

    def steps(self, steps: Sequence[Step]) -> str:
        """Write steps: `[all_gather(TENSOR, 1)]`."""
        return f"[{', '.join(map(self.step, steps))}]"

    def step(self, step: Step) -> str:
        """Write one step."""
        dims = [str(p.dim) for p in (step.src, step.dst) if isinstance(p, Shard)]
        return f"{CONSTRUCTORS.get(step_kind(step), step_kind(step))}({', '.join([self.axis(step.axis), *dims])})"

    def definitions(self) -> list[str]:
        """Write one line for each move, and for each kind of product in chunks."""
        return [
            f"{name} = move({forward}, backward={backward}{f', segments={fused}' if fused else ''})"
            for (forward, backward, fused), name in self.defined.items()
        ] + [
            f"{name} = chunked({forward}, backward={backward}, chunks={chunks})"
            for (forward, backward, chunks), name in self.products.items()
        ]


def _describe_steps(steps: Sequence[Step]) -> str:
    return "_".join(SHORT_NAMES.get(step_kind(s), step_kind(s)) for s in steps) or "same"
