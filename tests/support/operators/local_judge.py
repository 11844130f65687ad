"""The runtime's local form of an op, judged by arithmetic: every rank of a small mesh is a thread of this process.

`judge` runs the pieces by an interpreter of its own; here the code runs that `runtime.write.operators` writes, with the messages that it
sends itself. Joined by their placements the pieces must be the whole op, forward and backward.
"""

from __future__ import annotations

import ast
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from planner_core.core import Edge, Placement, R, Shard, SitePlan, State
from planner_core.ops import Row
from planner_core.runtime.program import names
from planner_core.runtime.record import Ref, Tape, TapeCall, TapeTensor
from planner_core.runtime.record.tape import COMPUTED, INPUT
from planner_core.runtime.write import operators
from planner_core.runtime.write.placed_tape import PlannedTape
from planner_core.runtime.write.syntax import path
from tests.support.operators.judge import Case, Rank, cut, differs, gradients, put, results

SECONDS = 20.0
"""How long a rank waits for the others: one that fails leaves them waiting."""


@dataclass
class Meeting:
    """Where the ranks of one group hand in what they reduce."""

    barrier: threading.Barrier
    given: list[Any]


@dataclass
class ThreadAxis:
    """A mesh axis as one rank sees it, in place of the runtime's own: it sends between threads."""

    sizes: tuple[int, ...]
    place: Rank
    axis: int
    meetings: dict[tuple[int, Rank], Meeting] = field(repr=False)

    @property
    def size(self) -> int:
        return self.sizes[self.axis]

    @property
    def rank(self) -> int:
        return self.place[self.axis]

    def all_reduce(self, x: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        every = torch.stack(self._meet(x.detach().clone()))
        return every.sum(0) if reduction == "sum" else every.amax(0)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._meet(x.detach().clone()), dim)

    def exchange(
        self, pieces: torch.Tensor, counts: list[int], received: list[int] | None = None, *, back: bool = False
    ) -> torch.Tensor:
        """From every rank the pieces that it sends to this one."""
        found = [sent.split(to)[self.rank] for sent, to in self._meet((pieces.detach().clone(), counts))]
        assert [len(x) for x in found] == (received or counts)
        return torch.cat(found)

    def start_send_recv(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """What the rank before sends."""
        got = self._meet(x.detach().clone())[(self.rank - 1) % self.size]
        return lambda: got

    def _meet(self, given: Any) -> list[Any]:
        """What every rank of the axis hands in, in order."""
        meeting = self.meetings[self.axis, (*self.place[: self.axis], *self.place[self.axis + 1 :])]
        meeting.given[self.rank] = given
        meeting.barrier.wait(SECONDS)
        every = list(meeting.given)
        meeting.barrier.wait(SECONDS)
        return every


def judge_local(case: Case, chosen: Sequence[Row], sizes: tuple[int, ...]) -> str:
    """What is wrong with the runtime's way to run `case` by these rows; empty: nothing."""
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` notes the call stack for GPUs to come
    op, values = case.op()
    count = len(op.inputs)
    whole = [t.detach().clone().requires_grad_(values[i].grad) for i, t in enumerate(case.tensors)]
    want = case.call([t.clone() for t in whole])
    fed = {i: torch.randn_like(o) for i, o in enumerate(want) if o.requires_grad}
    wrt = [i for i, t in enumerate(whole) if t.requires_grad] if fed else []
    true = gradients(want, fed, [whole[i] for i in wrt])
    segments = [
        {p.dim: s for r in chosen for j, s in r.segments.items() if j == i and isinstance(p := r.inputs[i][0], Shard)}
        for i in range(count)
    ]
    given = [cut(t.detach(), [r.inputs[i][0] for r in chosen], sizes, segments[i]) for i, t in enumerate(whole)]
    back = {i: cut(g, [r.outputs[i][1] for r in chosen], sizes, {}) for i, g in fed.items()}
    text, objects = _written(case, op.fn, want, _row(chosen, count, len(op.outputs)), sizes)
    meetings = {
        (axis, others): Meeting(threading.Barrier(sizes[axis]), [None] * sizes[axis])
        for axis in range(len(sizes))
        for others in itertools.product(*(range(n) for a, n in enumerate(sizes) if a != axis))
    }

    def run(rank: Rank) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        mine = [piece[rank].clone().requires_grad_(values[i].grad) for i, piece in enumerate(given)]
        axes = {f"AXIS{a}": ThreadAxis(sizes, rank, a, meetings) for a in range(len(sizes))}
        operands = {f"x{i}": t.clone() for i, t in enumerate(mine)}
        made = results(eval(text, {**objects, **axes, **operands}))
        live = [i for i in fed if made[i].requires_grad]
        found = (
            torch.autograd.grad(
                [made[i] for i in live], [mine[i] for i in wrt], [back[i][rank] for i in live], allow_unused=True
            )
            if wrt
            else ()
        )
        return made, list(found)

    ranks = list(itertools.product(*map(range, sizes)))
    with ThreadPoolExecutor(len(ranks)) as pool:
        by_rank = dict(zip(ranks, pool.map(run, ranks), strict=True))
    for i, o in enumerate(want):
        problem = differs(
            {k: made[i] for k, (made, _) in by_rank.items()}, [r.outputs[i][0] for r in chosen], sizes, {}, o
        )
        if problem:
            return f"result {i}: {problem}"
    for n, i in enumerate(wrt):
        zero = {k: torch.zeros_like(given[i][k]) for k in ranks}
        pieces = {k: zero[k] if g[n] is None else g[n] for k, (_, g) in by_rank.items()}
        problem = differs(pieces, [r.inputs[i][1] for r in chosen], sizes, segments[i], true[n])  # type: ignore[arg-type]
        if problem:
            return f"gradient of operand {i}: {problem}"
    return ""


def _written(
    case: Case, fn: str, want: list[torch.Tensor], row: SitePlan, sizes: tuple[int, ...]
) -> tuple[str, dict[str, Any]]:
    """The code of one rank, whose operands are x0, x1, ... and whose axes AXIS0, AXIS1, ...; and the objects that it names."""
    count = len(case.tensors)
    numbers = tuple(range(count + len(want)))
    refs = iter(map(Ref, numbers))
    args, kwargs = put((case.args, case.kwargs), refs)  # type: ignore[arg-type]
    kinds = [INPUT] * count + [COMPUTED] * len(want)
    tensors = [TapeTensor(k, tuple(t.shape), t.dtype) for k, t in zip(kinds, (*case.tensors, *want), strict=True)]
    call = TapeCall("op", fn, case.func, args, kwargs, numbers[:count], numbers[count:], site=fn)
    tape = Tape(tensors, [call], result=[Ref(n) for n in call.outputs])
    layout = PlannedTape(
        tape, [None] * len(tensors), {fn: row}, {}, {}, sizes, tuple(f"AXIS{a}" for a in range(len(sizes)))
    )
    objects: dict[str, Any] = {n: getattr(names, n) for n in names.__all__} | {"DEVICE": torch.device("cpu"), "seed": 0}

    def foreign(item: Any) -> ast.expr:
        name = f"_object{len(objects)}"
        objects[name] = item
        return path(name)

    local = operators.LocalCall(layout, call, row, [path(f"x{i}") for i in range(count)], "AXIS{}".format, foreign)
    text = ast.unparse(operators.write_operator(local))
    return text.replace(".new_empty(", ".new_zeros("), objects  # what a new tensor holds is any


def _row(chosen: Sequence[Row], num_inputs: int, num_outputs: int) -> SitePlan:
    def edge(placements: list[Placement]) -> Edge:
        state = State(tuple(placements), (R,) * len(placements))
        return Edge(state, state)

    return SitePlan(
        tuple(edge([r.inputs[i][0] for r in chosen]) for i in range(num_inputs)),
        tuple(edge([r.outputs[i][0] for r in chosen]) for i in range(num_outputs)),
    )
