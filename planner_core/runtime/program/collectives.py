"""Collectives along one mesh axis, which are issued early and waited for late; and the redistributions that are made of them:

    P>R all_reduce    P>S reduce_scatter    S>R all_gather    S>S all_to_all    R>S slice    S>P pad with zeros    R>P divide

A dim with segments (q, k, v in one projection) is sharded segment by segment: every rank holds a part of each segment. A dim of a
weight with one segment has parts of different length, cut as `torch.chunk` does: the segment is its whole length. Messages carry the
shorter part padded to the length of the others.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from planner_core.cost import Event
from planner_core.runtime.dispatch.kept import replaying

Segments = Mapping[int, tuple[int, ...]]
NO_SEGMENTS: Segments = {}
Finish = Callable[[], torch.Tensor]
"""Waits for a collective, and returns its result."""


@dataclass
class Trace:
    """The events of one rank, in order."""

    events: list[Event] = field(default_factory=list)

    def add(self, what: str, kind: str, axis: str = "", num_bytes: int = 0, packed: int = 0) -> None:
        """Add one event."""
        self.events.append(Event(what, kind, axis, num_bytes, packed))


class Axis:
    """One mesh axis as this rank sees it. `start_*` issues a collective, and returns a function that waits for it. An axis with
    only a name is a placeholder, whose ranks are not known yet."""

    def __init__(self, name: str, group: dist.ProcessGroup | None = None, size: int = 1, rank: int = 0) -> None:
        self.name, self.group, self.size, self.rank = name, group, size, rank
        self.group_name = "" if group is None else group.group_name
        self.trace: Trace | None = None
        self.packed = 1
        """Number of tensors that the collective that is being issued carries."""

    def __repr__(self) -> str:
        return f"Axis({self.name}, size={self.size}, rank={self.rank})"

    # --- issuing --------------------------------------------------------------------------------------

    def start_all_gather(self, x: torch.Tensor, packed: int = 0) -> Finish:
        """The tensors of all ranks, one after the other along dim 0."""
        x = x.contiguous()
        if torch.compiler.is_compiling():
            return _traced(torch.ops._c10d_functional.all_gather_into_tensor(x, self.size, self.group_name))
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return self._issue("all_gather", packed, dist.all_gather_single, out, out, x)

    def start_reduce_scatter(self, x: torch.Tensor, packed: int = 0) -> Finish:
        """This rank's part, along dim 0, of the sum of all ranks' tensors."""
        x = x.contiguous()
        if torch.compiler.is_compiling():
            return _traced(torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", self.size, self.group_name))
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        return self._issue("reduce_scatter", packed, dist.reduce_scatter_single, x, out, x)

    def start_all_reduce(
        self, x: torch.Tensor, reduction: str = "sum", *, owned: bool = False, packed: int = 0
    ) -> Finish:
        """The sum (or max) of all ranks' tensors. `owned`: the result may overwrite `x`."""
        if torch.compiler.is_compiling():
            return _traced(torch.ops._c10d_functional.all_reduce(x.contiguous(), reduction, self.group_name))
        out = x if owned else x.detach().clone(memory_format=torch.contiguous_format)
        op = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
        return self._issue("all_reduce", packed, dist.all_reduce, out, out, op)

    def start_all_to_all(
        self,
        x: torch.Tensor,
        counts: list[int] | None = None,
        received: list[int] | None = None,
        *,
        back: bool = False,
        packed: int = 0,
    ) -> Finish:
        """Pieces along dim 0 go to ranks, `counts[r]` of them to rank r (by default an equal part), and `received[r]` come from it (by
        default as many). The bytes that are recorded are those sent; or, if the pieces go `back`, those received."""
        x = x.contiguous()
        counts = counts or [x.shape[0] // self.size] * self.size
        received = received or counts
        if torch.compiler.is_compiling():
            return _traced(torch.ops._c10d_functional.all_to_all_single(x, received, counts, self.group_name))
        out = x.new_empty((sum(received), *x.shape[1:]))
        counted = out if back else x
        return self._issue("all_to_all", packed, dist.all_to_all_single, counted, out, x, received, counts)

    def exchange(
        self, pieces: torch.Tensor, counts: list[int], received: list[int] | None = None, *, back: bool = False
    ) -> torch.Tensor:
        """Send `counts[r]` of the pieces along dim 0 to each rank r, and receive `received[r]` from it; in order of ranks."""
        return pieces if self.size == 1 else self.start_all_to_all(pieces, counts, received, back=back)()

    def start_send_recv(self, x: torch.Tensor) -> Finish:
        """Send a flat tensor to the next rank, and receive one as long from the rank before."""
        there, here = neighbours(x.numel(), self.size, self.rank)
        if torch.compiler.is_compiling():
            return _traced(torch.ops._c10d_functional.all_to_all_single(x, here, there, self.group_name))
        out = torch.empty_like(x)
        return self._issue("send_recv", 0, dist.all_to_all_single, out, out, x, here, there)

    def _issue(self, kind: str, packed: int, collective: Callable[..., Any], counted: torch.Tensor, *args: Any) -> Finish:  # fmt: skip
        """Issue a collective of `packed` weights, or add it to a launch. Its bytes are those of `counted`; `args` begin with its result."""
        if replaying():
            out: torch.Tensor = args[0]
            return lambda: out
        trace, pending = self.trace, getattr(_LAUNCH, "pending", None)
        work = Pending(self, kind, max(1, packed), collective, args)
        if pending is not None and packed and kind in MERGED:
            pending.append(work)
        else:
            work.issue()
        num_bytes = counted.nbytes * (self.size if kind in ("all_to_all", "send_recv") else 1)
        if trace is not None:
            trace.add("issue", kind, self.name, num_bytes, packed)

        def finish() -> torch.Tensor:
            work.wait()
            if trace is not None:
                trace.add("wait", kind, self.name, num_bytes, packed)
            out: torch.Tensor = args[0]
            return out

        return finish

    # --- moves of one tensor --------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        """The sum (or max) of every rank's tensor."""
        return x if self.size == 1 else self.start_all_reduce(x, reduction)()

    def all_gather(self, x: torch.Tensor, dim: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
        """The whole tensor, of which each rank has a part along `dim`."""
        whole = uneven(segments, dim)
        gathered = self.start_all_gather(x if whole is None else padded(x, dim, part_of(whole, self.size)))()
        if whole is not None:
            return joined(gathered.chunk(self.size), dim).narrow(dim, 0, whole)
        if dim == 0 and len(segments.get(0, ())) < 2:
            return gathered
        return joined(gathered.chunk(self.size), dim, segments)

    def reduce_scatter(self, x: torch.Tensor, dim: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
        """This rank's part, along `dim`, of the sum of all ranks' tensors."""
        whole = uneven(segments, dim)
        if whole is not None:
            pieces = [padded(piece, dim, part_of(whole, self.size)) for piece in cut(x, dim, self.size)]
            own = self.start_reduce_scatter(torch.cat(pieces))()
            return own.narrow(dim, 0, own_length(whole, self.size, self.rank)).contiguous()
        if dim == 0 and len(segments.get(0, ())) < 2:
            return self.start_reduce_scatter(x)()
        return self.start_reduce_scatter(torch.cat(shares(x, dim, self.size, segments)))()

    def all_to_all(self, x: torch.Tensor, src: int, dst: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
        """From a part along `src` to a part along `dst`."""
        pieces = torch.stack(shares(x, dst, self.size, segments))
        return joined(self.start_all_to_all(pieces)().unbind(0), src, segments)

    def slice(self, x: torch.Tensor, dim: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        return own_share(x, dim, self.size, self.rank, segments).contiguous()

    def view(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a whole tensor, as a view."""
        return own_share(x, dim, self.size, self.rank)

    def pad(self, x: torch.Tensor, dim: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
        """A tensor of the whole size: this rank's part in its place, and zeros elsewhere."""
        shape = list(x.shape)
        shape[dim] *= self.size
        whole = x.new_zeros(shape)
        places = [part.chunk(self.size, dim)[self.rank] for part in parts(whole, dim, segments)]
        for place, piece in zip(places, parts(x, dim, segments), strict=True):
            place.copy_(piece)
        return whole

    def divide(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's term of a sum over ranks that gives `x`: `x` divided by the number of ranks."""
        return x / self.size


def neighbours(length: int, size: int, rank: int) -> tuple[list[int], list[int]]:
    """How many of `length` elements go to each rank and come from each rank, if all go to the next rank around a ring."""
    there, here = [0] * size, [0] * size
    there[(rank + 1) % size] = here[(rank - 1) % size] = length
    return there, here


def _traced(out: torch.Tensor) -> Finish:
    """The finish of a functional collective in a compiled function, which needs no wait."""
    return lambda: torch.ops._c10d_functional.wait_tensor(out)


# --- launches -----------------------------------------------------------------------------------------

MERGED = ("all_gather", "reduce_scatter", "all_reduce")  # torch.distributed issues several of them in one launch
_LAUNCH = threading.local()  # `pending`: the collectives of weights that are to leave together


@dataclass(eq=False)
class Pending:
    """A collective of `packed` tensors, the first of `args` one of its dtype. `work` is there when it has left."""

    axis: Axis
    kind: str
    packed: int
    call: Callable[..., Any]
    args: tuple[Any, ...]
    work: Any = None

    def issue(self, others: Sequence[Pending] = ()) -> None:
        """Issue it, and others of its kind, axis and dtype in the same launch."""
        self.axis.packed, group = self.packed + sum(p.packed for p in others), self.axis.group
        with dist._coalescing_manager(group, async_ops=True) if others else contextlib.nullcontext() as merged:  # type: ignore[attr-defined]
            for p in (self, *others):
                work = p.call(*p.args, group=group, async_op=True)
                p.work = merged or work
        self.axis.packed = 1

    def wait(self) -> None:
        """Wait for its end."""
        if self.work is None:
            _leave()
        self.work.wait()
        # Those of one launch are waited for once: at a second wait gloo writes results again, over what was added to them.
        getattr(self.work, "works", []).clear()


@contextlib.contextmanager
def one_launch() -> Iterator[None]:
    """Collectives of weights that are issued inside leave at the end, or when one of them is waited for: those of one kind over one axis
    in one launch. NCCL runs a group call so (its guide: "Aggregated Operations"), and they pay its latency once."""
    outer = getattr(_LAUNCH, "pending", None)
    _LAUNCH.pending = [] if outer is None else outer
    try:
        yield
        if outer is None:
            _leave()
    finally:
        _LAUNCH.pending = outer


def _leave() -> None:
    groups: dict[object, list[Pending]] = {}
    for p in _LAUNCH.pending:
        alone = id(p) if p.args[0].is_meta else 0  # torch has no merged collectives of meta tensors
        groups.setdefault((p.kind, p.axis, p.args[0].dtype, alone), []).append(p)
    _LAUNCH.pending.clear()
    for group in groups.values():
        group[0].issue(group[1:])


# --- shares of a dim ----------------------------------------------------------------------------------


def parts(x: torch.Tensor, dim: int, segments: Segments) -> Sequence[torch.Tensor]:
    """The segments of a dim, as views; the whole dim if it has none."""
    sizes = segments.get(dim, (1,))
    if len(sizes) < 2:
        return (x,)
    cut: Sequence[torch.Tensor] = x.split([size * x.size(dim) // sum(sizes) for size in sizes], dim)
    return cut


def uneven(segments: Segments, dim: int) -> int | None:
    """The whole length of a dim whose parts differ in length; None for any other dim."""
    sizes = segments.get(dim, ())
    return sizes[0] if len(sizes) == 1 else None


def part_of(whole: int, size: int) -> int:
    """The length of the longest of `size` parts."""
    return -(-whole // size)


def own_length(whole: int, size: int, rank: int) -> int:
    """The length of the part of `rank`."""
    part = part_of(whole, size)
    return max(0, min(part, whole - rank * part))


def cut(x: torch.Tensor, dim: int, size: int) -> list[torch.Tensor]:
    """The part of every rank of a dim whose parts differ in length, as views. The last ones may be empty."""
    whole = x.size(dim)
    lengths = [own_length(whole, size, rank) for rank in range(size)]
    return list(x.split(lengths, dim))


def padded(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """`x`, with zeros behind its end along `dim`."""
    missing = length - x.size(dim)
    return torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim) if missing else x


def own_share(x: torch.Tensor, dim: int, size: int, rank: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
    """The part of `dim` that belongs to `rank`. It is a view unless the dim has fused segments."""
    if x.size(dim) % size and uneven(segments, dim) is None:
        raise ValueError(f"dim {dim} of a tensor of shape {tuple(x.shape)} cannot be split evenly over {size} ranks")
    if uneven(segments, dim) is not None:
        return cut(x, dim, size)[rank]
    own = [part.chunk(size, dim)[rank] for part in parts(x, dim, segments)]
    return own[0] if len(own) == 1 else torch.cat(own, dim)


def shares(x: torch.Tensor, dim: int, size: int, segments: Segments = NO_SEGMENTS) -> list[torch.Tensor]:
    """The part of `dim` of every rank, in order of ranks."""
    if len(segments.get(dim, ())) < 2:
        return list(x.chunk(size, dim))
    cut = [part.chunk(size, dim) for part in parts(x, dim, segments)]
    return [torch.cat([part[rank] for part in cut], dim) for rank in range(size)]


def joined(pieces: Sequence[torch.Tensor], dim: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
    """The whole tensor from the parts of `dim` of all ranks."""
    if len(segments.get(dim, ())) < 2:
        return torch.cat(list(pieces), dim)
    cut = [parts(piece, dim, segments) for piece in pieces]
    return torch.cat([share[part] for part in range(len(cut[0])) for share in cut], dim)


# --- moves --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AxisMove:
    """One move along one axis, from placement `src` to `dst`: the number of a sharded dim, or R (None) or P ("P")."""

    axis: Axis
    kind: str
    src: int | None = None
    dst: int | None = None

    def take(self, x: torch.Tensor, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
        """The tensor after the step."""
        axis, kind = self.axis, self.kind
        if axis.size == 1:
            return x
        if kind == "all_reduce":
            return axis.all_reduce(x)
        if kind == "divide":
            return axis.divide(x)
        if kind == "all_to_all":
            return axis.all_to_all(x, sharded(self.src), sharded(self.dst), segments)
        if kind in ("slice", "reduce_scatter"):
            move = axis.slice if kind == "slice" else axis.reduce_scatter
            return move(x, sharded(self.dst), segments)
        move = axis.all_gather if kind == "all_gather" else axis.pad
        return move(x, sharded(self.src), segments)

    @property
    def collective(self) -> bool:
        """Whether the step communicates."""
        return self.kind not in ("slice", "pad", "divide")


def sharded(dim: int | None) -> int:
    """The dim of a move from or to Shard; a move from or to Replicate or Partial has none there."""
    assert dim is not None
    return dim


def take(x: torch.Tensor, steps: Iterable[AxisMove], segments: Segments = NO_SEGMENTS) -> torch.Tensor:
    """The tensor after all steps, in order."""
    for step in steps:
        x = step.take(x, segments)
    return x


def move(
    forward: Sequence[AxisMove], backward: Sequence[AxisMove], segments: Segments = NO_SEGMENTS
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that takes a tensor along the steps `forward`, and its gradient along `backward`, which may be other steps."""
    ahead, back = tuple(forward), tuple(backward)

    class Move(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            moved = take(x, ahead, segments)
            return x.view_as(x) if moved is x else moved

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return take(gradient, back, segments)

    return Move.apply
