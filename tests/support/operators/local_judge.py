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

from planner_core.core import Edge, Placement, R, SitePlan, State
from planner_core.ops import Row
from planner_core.runtime.program import names
from planner_core.runtime.record import Ref, Tape, TapeCall, TapeTensor
from planner_core.runtime.record.tape import COMPUTED, INPUT
from planner_core.runtime.write import operators
from planner_core.runtime.write.placed_tape import PlannedTape
from planner_core.runtime.write.syntax import path
from tests.support.operators.judge import Case, Rank, Trial, put, results

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
        pieces_received = [sent.split(to)[self.rank] for sent, to in self._meet((pieces.detach().clone(), counts))]
        assert [len(x) for x in pieces_received] == (received or counts)
        return torch.cat(pieces_received)

    def start_send_recv(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what the rank before sends."""
        got = self._meet(x.detach().clone())[(self.rank - 1) % self.size]
        return lambda: got

    def _meet(self, given: Any) -> list[Any]:
        """Return what every rank of the axis hands in, in order."""
        meeting = self.meetings[self.axis, (*self.place[: self.axis], *self.place[self.axis + 1 :])]
        meeting.given[self.rank] = given
        meeting.barrier.wait(SECONDS)
        every = list(meeting.given)
        meeting.barrier.wait(SECONDS)
        return every


def judge_local(case: Case, chosen: Sequence[Row], sizes: tuple[int, ...]) -> str:
    """Return what is wrong with the runtime's way to run `case` by these rows; empty: nothing."""
    trial = Trial(case, chosen, sizes)
    row = _row(chosen, len(trial.op.inputs), len(trial.op.outputs))
    text, objects = _written(case, trial.op.fn, trial.want, row, sizes)
    meetings = {
        (axis, others): Meeting(threading.Barrier(sizes[axis]), [None] * sizes[axis])
        for axis in range(len(sizes))
        for others in itertools.product(*(range(n) for a, n in enumerate(sizes) if a != axis))
    }

    def run(rank: Rank) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        axes = {f"AXIS{a}": ThreadAxis(sizes, rank, a, meetings) for a in range(len(sizes))}
        operands = {f"x{i}": t.clone() for i, t in enumerate(trial.operands[rank])}
        made = results(eval(text, {**objects, **axes, **operands}))
        if not trial.wrt:
            return made, []
        live = [i for i in trial.fed if made[i].requires_grad]
        leaves, fed = [trial.operands[rank][i] for i in trial.wrt], [trial.fed[i][rank] for i in live]
        return made, list(torch.autograd.grad([made[i] for i in live], leaves, fed, allow_unused=True))

    with ThreadPoolExecutor(len(trial.operands)) as pool:
        by_rank = dict(zip(trial.operands, pool.map(run, trial.operands), strict=True))
    problem = trial.check_results({k: made for k, (made, _) in by_rank.items()})
    return problem or trial.check_gradients({k: grads for k, (_, grads) in by_rank.items()})


def _written(
    case: Case, fn: str, want: list[torch.Tensor], row: SitePlan, sizes: tuple[int, ...]
) -> tuple[str, dict[str, Any]]:
    """Return the code of one rank, whose operands are x0, x1, ... and whose axes AXIS0, AXIS1, ...; and the objects that it names."""
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
