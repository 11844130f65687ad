"""Collectives of weights that leave together, in one launch."""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from planner_core.runtime.program.collectives.axis import Axis

MERGED = ("all_gather", "reduce_scatter", "all_reduce")  # torch.distributed issues several of them in one launch
_LAUNCH = threading.local()  # `pending`: the collectives of weights that are to leave together


@dataclass(eq=False)
class Pending:
    """A collective of `packed` weights, or gradients (0: of one tensor of the computation), the first of `args` a tensor of its dtype.
    `work` is there when it has left."""

    axis: Axis
    kind: str
    packed: int
    call: Callable[..., Any]
    args: tuple[Any, ...]
    work: Any = None

    def start(self) -> None:
        """Issue it; or let it wait for those of weights that leave with it."""
        pending = getattr(_LAUNCH, "pending", None)
        if pending is not None and self.packed and self.kind in MERGED:
            pending.append(self)
        else:
            self.issue()

    def issue(self, others: Sequence[Pending] = ()) -> None:
        """Issue it, and others of its kind, axis and dtype in the same launch."""
        self.axis.packed, group = sum(max(1, p.packed) for p in (self, *others)), self.axis.group
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
