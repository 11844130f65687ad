"""The redistributions (moves) of a program. Each pair (steps of a tensor, steps of its gradient) has a name and one definition."""

from __future__ import annotations

from collections.abc import Sequence

from planner_core.core import Edge, Placement, Placements, Replicate, Shard, Step
from planner_core.runtime.program.collectives import Segments

KIND_OF_LETTERS = {
    ("S", "R"): "all_gather",
    ("P", "R"): "all_reduce",
    ("P", "S"): "reduce_scatter",
    ("R", "S"): "slice",
    ("S", "S"): "all_to_all",
    ("S", "P"): "pad",
    ("R", "P"): "divide",
}
SHORT_NAMES = {
    "all_gather": "gather",
    "all_reduce": "all_reduce",
    "reduce_scatter": "scatter",
    "all_to_all": "exchange",
}
CONSTRUCTORS = {"slice": "shard"}
LOCAL_KINDS = ("slice", "pad", "divide")


def placement_letter(placement: Placement) -> str:
    """`S`, `R` or `P`."""
    return "S" if isinstance(placement, Shard) else "R" if isinstance(placement, Replicate) else "P"


def step_kind(step: Step) -> str:
    """The kind of a step."""
    return KIND_OF_LETTERS[placement_letter(step.src), placement_letter(step.dst)]


def split_weight_steps(
    edge: Edge, ahead: Sequence[Step], back: Sequence[Step]
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps of a weight's edge that are taken outside of the function, where they can be bucketed and issued early.

    These are the first steps forward, up to the last one that communicates; and the last steps of the gradient, from where it
    has the weight's own shape. Axes of one rank have no steps.
    """
    axes = sorted({step.axis for step in (*ahead, *back)})
    for gather in (count_to_last_collective(ahead), 0):
        here = edge.src.forward
        for step in ahead[:gather]:
            here = _placements_after(here, step)
        gradient = edge.dst.gradient
        for number in range(len(back) + 1):
            if _sharded_dims(gradient, axes) == _sharded_dims(here, axes):
                return tuple(ahead[:gather]), tuple(back[number:])
            if number < len(back):
                gradient = _placements_after(gradient, back[number])
    return (), ()


def count_to_last_collective(steps: Sequence[Step]) -> int:
    """The number of steps up to the last one that communicates, with it."""
    return max((i + 1 for i, s in enumerate(steps) if step_kind(s) not in LOCAL_KINDS), default=0)


def _placements_after(placements: Placements, step: Step) -> Placements:
    return (*placements[: step.axis], step.dst, *placements[step.axis + 1 :])


def _sharded_dims(placements: Placements, axes: Sequence[int]) -> tuple[int | None, ...]:
    return tuple(p.dim if isinstance(p := placements[axis], Shard) else None for axis in axes)


class MoveTable:
    """Names and definitions of moves; `sizes` and `names` are those of the mesh axes."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        self.names, self.sizes = [n.upper() for n in names], sizes
        self.taken = frozenset(self.names)
        self.defined: dict[tuple[str, str, str], str] = {}
        self.products: dict[tuple[str, str, int], str] = {}

    def axis(self, axis: int) -> str:
        """The name of a mesh axis in the code."""
        return self.names[axis]

    def real(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """The steps on axes of more than one rank."""
        return tuple(s for s in steps if self.sizes[s.axis] > 1)

    def apply(self, text: str, forward: Sequence[Step], backward: Sequence[Step], segments: Segments) -> str:
        """The text of a tensor after a move."""
        ahead, back = self.real(forward), self.real(backward)
        return text if not ahead and not back else f"{self.name(ahead, back, segments)}({text})"

    def name(self, forward: Sequence[Step], backward: Sequence[Step], segments: Segments) -> str:
        """The name of a move. The first call defines it."""
        used = {s.src.dim for s in (*forward, *backward) if isinstance(s.src, Shard)}
        used |= {s.dst.dim for s in (*forward, *backward) if isinstance(s.dst, Shard)}
        fused = {d: tuple(v) for d, v in segments.items() if d in used and len(v) > 1}
        key = (self.steps(forward), self.steps(backward), str(fused) if fused else "")
        if key not in self.defined:
            wanted = f"{_describe_steps(forward)}_back_{_describe_steps(backward)}"
            name, count = wanted, 1
            while name in self.defined.values():
                count += 1
                name = f"{wanted}_{count}"
            self.defined[key] = name
        return self.defined[key]

    def product(self, forward: Sequence[Step], backward: Sequence[Step], chunks: int) -> str:
        """The name of a product in chunks whose result is moved. The first call defines it."""
        ahead, back = self.real(forward), self.real(backward)
        name = f"product_{_describe_steps(ahead)}_in_{chunks}_back_{_describe_steps(back)}"
        count = sum(one.startswith(name) for one in self.products.values())
        return self.products.setdefault(
            (self.steps(ahead), self.steps(back), chunks), f"{name}_{count + 1}" if count else name
        )

    def steps(self, steps: Sequence[Step]) -> str:
        """Steps as code: `[all_gather(TENSOR, 1)]`."""
        return f"[{', '.join(map(self.step, steps))}]"

    def step(self, step: Step) -> str:
        """One step as code."""
        dims = [str(p.dim) for p in (step.src, step.dst) if isinstance(p, Shard)]
        return f"{CONSTRUCTORS.get(step_kind(step), step_kind(step))}({', '.join([self.axis(step.axis), *dims])})"

    def definitions(self) -> list[str]:
        """One line for each move, and for each kind of product in chunks."""
        return [
            f"{name} = move({forward}, backward={backward}{f', segments={fused}' if fused else ''})"
            for (forward, backward, fused), name in self.defined.items()
        ] + [
            f"{name} = chunked({forward}, backward={backward}, chunks={chunks})"
            for (forward, backward, chunks), name in self.products.items()
        ]


def _describe_steps(steps: Sequence[Step]) -> str:
    return "_".join(SHORT_NAMES.get(step_kind(s), step_kind(s)) for s in steps) or "same"
