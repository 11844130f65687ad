"""The runtime's local form of an op, judged by arithmetic: every rank of a small mesh is a thread of this process.

`judge` runs the pieces by an interpreter of its own; here `runtime.dispatch.local_ops` runs them, with the messages that it sends
itself. Joined by their placements the pieces must be the whole op, forward and backward.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import tensor as dtensor

from planner_core.core import P, Placement, Shard
from planner_core.models.hooks import is_inplace
from planner_core.ops import Row
from planner_core.runtime import plan_reader
from planner_core.runtime.dispatch import dispatch_mode, local_ops
from tests.support.operators.judge import Case, Rank, cut, differs, gradients, put, results

SECONDS = 20.0
"""How long a rank waits for the others: one that fails leaves them waiting."""


@dataclass
class Meeting:
    """Where the ranks of one group hand in what they reduce."""

    barrier: threading.Barrier
    given: list[Any]


@dataclass
class ThreadMesh:
    """The mesh as one rank sees it: what `local_ops` asks of a DeviceMesh."""

    sizes: tuple[int, ...]
    rank: Rank
    meetings: dict[tuple[int, Rank], Meeting] = field(repr=False)

    def size(self, axis: int) -> int:
        return self.sizes[axis]

    def get_local_rank(self, axis: int) -> int:
        return self.rank[axis]


def all_reduce(x: torch.Tensor, mesh: ThreadMesh, axis: int, op: str = "sum") -> torch.Tensor:
    """In place of the runtime's own, between threads."""
    every = torch.stack(_meet(x.detach().clone(), mesh, axis))
    return every.sum(0) if op == "sum" else every.amax(0)


def all_gather(x: torch.Tensor, dim: int, mesh: ThreadMesh, axis: int) -> torch.Tensor:
    """In place of the runtime's own, between threads."""
    return torch.cat(_meet(x.detach().clone(), mesh, axis), dim)


def exchange(
    pieces: torch.Tensor, counts: list[int], mesh: ThreadMesh, axis: int, received: list[int] | None = None
) -> torch.Tensor:
    """In place of the runtime's own, between threads: from every rank the pieces that it sends to this one."""
    mine = mesh.rank[axis]
    found = [sent.split(to)[mine] for sent, to in _meet((pieces.detach().clone(), counts), mesh, axis)]
    assert [len(x) for x in found] == (received or counts)
    return torch.cat(found)


def send_recv(x: torch.Tensor, mesh: ThreadMesh, axis: int) -> Callable[[], torch.Tensor]:
    """In place of the runtime's own, between threads: what the rank before sends."""
    before = (mesh.rank[axis] - 1) % mesh.sizes[axis]
    got = _meet(x.detach().clone(), mesh, axis)[before]
    return lambda: got


MESSAGES = (all_gather, all_reduce, exchange, send_recv)
"""What stands in for the functions of the same names that `local_ops` sends by."""


def _meet(given: Any, mesh: ThreadMesh, axis: int) -> list[Any]:
    """What every rank of the axis hands in, in order."""
    meeting = mesh.meetings[axis, (*mesh.rank[:axis], *mesh.rank[axis + 1 :])]
    meeting.given[mesh.rank[axis]] = given
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
    row = _row(chosen, count, len(op.outputs))
    meetings = {
        (axis, others): Meeting(threading.Barrier(sizes[axis]), [None] * sizes[axis])
        for axis in range(len(sizes))
        for others in itertools.product(*(range(n) for a, n in enumerate(sizes) if a != axis))
    }

    def run(rank: Rank) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        mine = [piece[rank].clone().requires_grad_(values[i].grad) for i, piece in enumerate(given)]
        shapes = [tuple(o.shape) for o in want]
        made = _local(case, op.fn, [t.clone() for t in mine], row, shapes, ThreadMesh(sizes, rank, meetings))
        live = [i for i in fed if made[i].requires_grad]
        found = torch.autograd.grad(
            [made[i] for i in live], [mine[i] for i in wrt], [back[i][rank] for i in live], allow_unused=True
        ) if wrt else ()  # fmt: skip
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


def _local(case: Case, fn: str, mine: list[torch.Tensor], row: Any, shapes: Any, mesh: Any) -> list[torch.Tensor]:
    args, kwargs = put((case.args, case.kwargs), iter(mine))
    func = case.func
    if is_inplace(fn):
        fn, func, args, kwargs = dispatch_mode._out_of_place(fn, func, args, kwargs)
    return results(local_ops.run_local(local_ops.OpCall(fn, func, args, kwargs, row, shapes, mesh)))


def _row(chosen: Sequence[Row], num_inputs: int, num_outputs: int) -> plan_reader.Row:
    def edge(placements: list[Placement]) -> plan_reader.Edge:
        own = tuple(
            dtensor.Shard(p.dim) if isinstance(p, Shard) else dtensor.Partial() if p == P else dtensor.Replicate()
            for p in placements
        )
        return plan_reader.Edge(own, own)

    return plan_reader.Row(
        tuple(edge([r.inputs[i][0] for r in chosen]) for i in range(num_inputs)),
        tuple(edge([r.outputs[i][0] for r in chosen]) for i in range(num_outputs)),
    )
